// Descriptions of tensors for the copy engine (TMA).
#pragma once

#include <cuda.h>

#include "core/tensor.h"

namespace annulus::attention::cuda::sm90 {

// x [B, rows, heads, columns] in bf16, 16-byte aligned: boxes of 64 columns of `box_rows` rows of one head, swizzled by
// 128 bytes. Coordinates are column, head, row, batch; rows of the next sequence are never read: zeros are.
CUtensorMap head_boxes(const TensorView& x, int box_rows);

}  // namespace annulus::attention::cuda::sm90
