// Descriptions of tensors for the copy engine (TMA).
#pragma once

#include <cuda.h>

#include <initializer_list>

#include "core/context.h"

namespace annulus::attention::cuda::sm90 {

// Compute capability 9.0, and every tensor 16-byte aligned, as the copy engine wants them.
bool fits(const Context& ctx, std::initializer_list<const TensorView*> tensors);

// x [B, rows, heads, columns] in bf16 or fp32: boxes of 128 bytes of columns (64 or 32) of `box_rows` rows of one head,
// swizzled by 128 bytes. Coordinates are column, head, row, batch; rows of the next sequence are never read or written:
// zeros are read.
CUtensorMap head_boxes(const TensorView& x, int box_rows);

}  // namespace annulus::attention::cuda::sm90
