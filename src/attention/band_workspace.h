// Scratch memory of the band operations, by device: host arithmetic on shapes and dtypes that every build has, so that
// a dry run counts what the twin takes (see ops/workspace.h). 0 for operations without an overload. A CPU twin's tiles
// are one set per OpenMP thread.
#pragma once

#include "attention/band.h"
#include "ops/workspace.h"

namespace annulus::attention {

namespace cpu {
template <class Args>
constexpr std::int64_t workspace_bytes(const Args&) {
  return 0;
}
std::int64_t workspace_bytes(const BandForward& args);
std::int64_t workspace_bytes(const BandBackward& args);
}  // namespace cpu

namespace cuda {
template <class Args>
constexpr std::int64_t workspace_bytes(const Args&) {
  return 0;
}
}  // namespace cuda

}  // namespace annulus::attention
