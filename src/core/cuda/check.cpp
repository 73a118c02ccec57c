#include "core/cuda/check.h"

#include <cstring>

namespace annulus::cuda {
namespace {

const char* project_path(const char* file) {  // the path inside the project, not the builder's folders
  const char* source = std::strstr(file, "/src/");
  return source ? source + 1 : file;
}

}  // namespace

void fail_cuda(cudaError_t status, const char* call, const char* file, int line) {
  throw Error(fmt::format("CUDA: {}: {} ({}) at {}:{}", call, cudaGetErrorString(status), cudaGetErrorName(status),
                          project_path(file), line));
}

void fail_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  throw Error(fmt::format("cuBLASLt: {}: {} ({}) at {}:{}", call, cublasLtGetStatusString(status),
                          cublasLtGetStatusName(status), project_path(file), line));
}

}  // namespace annulus::cuda
