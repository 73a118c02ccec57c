#include "attention/cuda/sm90/forward_kernel.cuh"

namespace annulus::attention::cuda::sm90 {

ForwardKernel forward_kernel_128() {
  using S = ForwardShape<128, 2, 2, true>;
  return {S::kRows, S::kThreads, static_cast<int>(sizeof(ForwardMemory<S>)), band_forward_kernel<S>};
}

}  // namespace annulus::attention::cuda::sm90
