// Sums over rows in two stages and a fixed order: slices of rows to the workspace, then the slices. For .cu files.
#pragma once

#include "core/cuda/kernel.h"

namespace annulus::ops::cuda {

using namespace annulus::cuda;

constexpr int kSumColumns = 32, kSumRows = 8;  // a block's threads

// partial[slice, c] = Σ of f(r, c) over the slice's rows. The terms of one thread are few enough for plain fp32 sums:
// rows / (slices · kSumRows), then a tree over threads and slices.
template <class F>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    slice_sum_kernel(std::int64_t rows, std::int64_t columns, std::int64_t rows_per_slice, float* partial, F f) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const std::int64_t begin = blockIdx.y * rows_per_slice, end = min(rows, begin + rows_per_slice);
  __shared__ float parts[kSumRows][kSumColumns];
  float sum = 0;
  if (column < columns) {
    for (std::int64_t r = begin + threadIdx.y; r < end; r += kSumRows) sum += f(r, column);
  }
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kSumRows; ++i) sum += parts[i][threadIdx.x];
  partial[blockIdx.y * columns + column] = sum;
}

static __global__ void __launch_bounds__(256)
    add_slices_kernel(std::int64_t columns, int slices, const float* partial, float* result) {
  const std::int64_t column = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  double sum = 0;
  for (int i = 0; i < slices; ++i) sum += partial[i * columns + column];
  result[column] = static_cast<float>(result[column] + sum);
}

// result[c] += Σ_r f(r, c). The number of slices depends on the shape alone.
template <class F>
void add_column_sums(const Context& ctx, std::int64_t rows, std::int64_t columns, float* result, F f) {
  if (rows == 0 || columns == 0) return;
  const std::int64_t fit = Device::kWorkspaceBytes / static_cast<std::int64_t>(sizeof(float)) / columns;
  ANNULUS_CHECK(fit > 0, "a sum over rows has too many columns for its workspace");
  const std::int64_t wanted = std::min<std::int64_t>({fit, 256, (rows + 63) / 64});
  const std::int64_t rows_per_slice = (rows + wanted - 1) / wanted;
  const dim3 grid(blocks_for(columns, kSumColumns), blocks_for(rows, rows_per_slice));
  auto* partial = static_cast<float*>(ctx.cuda->workspace);
  slice_sum_kernel<<<grid, dim3(kSumColumns, kSumRows), 0, stream_of(ctx)>>>(rows, columns, rows_per_slice, partial, f);
  ANNULUS_CUDA_LAUNCHED("a sum over rows");
  add_slices_kernel<<<blocks_for(columns, 256), 256, 0, stream_of(ctx)>>>(columns, static_cast<int>(grid.y), partial,
                                                                          result);
  ANNULUS_CUDA_LAUNCHED("a sum over rows");
}

}  // namespace annulus::ops::cuda
