#include "core/cuda/device.h"

namespace annulus::cuda {

Device::Device(int device_index) : index(device_index) {
  ANNULUS_CUDA_TRY(cudaSetDevice(index));
  ANNULUS_CUDA_TRY(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index));
  ANNULUS_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ANNULUS_CUBLAS_TRY(cublasLtCreate(&blas));
  ANNULUS_CUDA_TRY(cudaMalloc(&workspace, static_cast<std::size_t>(kWorkspaceBytes)));
}

Device::~Device() {  // errors cannot be reported here, and at the end of a failed run they are not news
  cudaSetDevice(index);
  if (stream) cudaStreamSynchronize(stream);
  matmul_plans.reset();
  if (workspace) cudaFree(workspace);
  if (blas) cublasLtDestroy(blas);
  if (stream) cudaStreamDestroy(stream);
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // forget it: no driver is not a failure
    return 0;
  }
  return count;
}

}  // namespace annulus::cuda
