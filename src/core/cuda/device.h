// cuda::Device: one GPU of this process with the stream all operations run on, and what they share. Owning; created
// once per process, on the thread that uses it (cudaSetDevice is per thread).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "core/context.h"
#include "core/cuda/check.h"

namespace annulus::cuda {

struct Device {
  explicit Device(int device_index);  // makes it the thread's current device
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int index = 0;
  int num_sms = 0;
  cudaStream_t stream = nullptr;
  cublasLtHandle_t blas = nullptr;
  // Workspace of the operation being launched: operations follow each other on `stream`, so one block serves cuBLASLt
  // and all two-stage reductions. Nothing in it outlives the operation.
  void* workspace = nullptr;
  static constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;
  std::shared_ptr<void> matmul_plans;  // cuBLASLt's choices by shape: ops/cuda/matmul.cpp
};

int device_count();  // 0 without a driver or a GPU; never throws

// The stream of a Context on a GPU.
inline cudaStream_t stream_of(const Context& ctx) { return ctx.cuda->stream; }

}  // namespace annulus::cuda
