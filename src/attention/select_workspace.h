// Scratch memory of the selection operations, by device: overloads beside those of attention/band_workspace.h, which
// has the default, 0. A CPU twin's tiles are one set per OpenMP thread.
#pragma once

#include "attention/band_workspace.h"
#include "attention/select.h"

namespace annulus::attention {

namespace cpu {
std::int64_t workspace_bytes(const SelectBlocks& args);
std::int64_t workspace_bytes(const SelectedForward& args);
std::int64_t workspace_bytes(const SelectedBackward& args);
}  // namespace cpu

}  // namespace annulus::attention
