#include "attention/cuda/sm90/backward_kernel.cuh"

namespace annulus::attention::cuda::sm90 {

BackwardKernel backward_kernel_64() {
  using S = BackwardShape<64>;
  return {S::kRows, S::kThreads, static_cast<int>(sizeof(BackwardMemory<S>)), band_backward_kernel<S>};
}

}  // namespace annulus::attention::cuda::sm90
