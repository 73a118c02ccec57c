// One body for element-by-element kernels: f.run<N>(i) works on elements i … i + N − 1. Packs of 16 bytes where all
// pointers allow, single elements for the rest. For .cu files.
#pragma once

#include "core/cuda/kernel.h"

namespace annulus::ops::cuda {

using namespace annulus::cuda;

template <class F>
__global__ void __launch_bounds__(256) elementwise_kernel(std::int64_t n, bool packed, F f) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (!packed) {
    if (thread < n) f.template run<1>(thread);
    return;
  }
  const std::int64_t begin = thread * kPack;
  if (begin + kPack <= n) f.template run<kPack>(begin);
  else
    for (std::int64_t i = begin; i < n; ++i) f.template run<1>(i);
}

template <class F>
void launch_elementwise(const Context& ctx, std::int64_t n, bool packed, F f) {
  if (n == 0) return;
  elementwise_kernel<<<blocks_for(n, packed ? 256 * kPack : 256), 256, 0, stream_of(ctx)>>>(n, packed, f);
  ANNULUS_CUDA_LAUNCHED("an element-by-element kernel");
}

}  // namespace annulus::ops::cuda
