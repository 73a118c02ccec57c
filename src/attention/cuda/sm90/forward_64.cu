#include "attention/cuda/sm90/forward_kernel.cuh"

namespace annulus::attention::cuda::sm90 {

ForwardKernel forward_kernel_64() {
  using S = ForwardShape<64, 3, 4, false>;
  return {S::kRows, S::kThreads, static_cast<int>(sizeof(ForwardMemory<S>)), band_forward_kernel<S>};
}

}  // namespace annulus::attention::cuda::sm90
