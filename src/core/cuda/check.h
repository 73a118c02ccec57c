// Wrapping of CUDA and cuBLASLt results: a failure throws Error with the call's text, its reason and place.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "core/error.h"

namespace annulus::cuda {

[[noreturn]] void fail_cuda(cudaError_t status, const char* call, const char* file, int line);
[[noreturn]] void fail_cublas(cublasStatus_t status, const char* call, const char* file, int line);

}  // namespace annulus::cuda

#define ANNULUS_CUDA_TRY(call)                                                                                \
  do {                                                                                                        \
    const cudaError_t annulus_status = (call);                                                                \
    if (annulus_status != cudaSuccess) ::annulus::cuda::fail_cuda(annulus_status, #call, __FILE__, __LINE__); \
  } while (0)

#define ANNULUS_CUBLAS_TRY(call)                                               \
  do {                                                                         \
    const cublasStatus_t annulus_status = (call);                              \
    if (annulus_status != CUBLAS_STATUS_SUCCESS)                               \
      ::annulus::cuda::fail_cublas(annulus_status, #call, __FILE__, __LINE__); \
  } while (0)

// After a kernel launch: a wrong configuration shows here, an error inside the kernel at the next synchronize().
#define ANNULUS_CUDA_LAUNCHED(kernel)                                                      \
  do {                                                                                     \
    const cudaError_t annulus_status = cudaGetLastError();                                 \
    if (annulus_status != cudaSuccess)                                                     \
      ::annulus::cuda::fail_cuda(annulus_status, "launch of " kernel, __FILE__, __LINE__); \
  } while (0)
