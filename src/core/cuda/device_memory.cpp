#include "core/cuda/device_memory.h"

#include <cstring>

namespace annulus::cuda {
namespace {

void transfer(Context& ctx, const TensorView& from, const TensorView& to, cudaMemcpyKind kind) {
  ANNULUS_CHECK(ctx.device == DeviceKind::cuda && ctx.cuda, "a copy to or from a GPU needs a Context on it");
  ANNULUS_CHECK(from.dtype == to.dtype && from.numel() == to.numel(), "cannot copy {} {} to {} {}", name_of(from.dtype),
                from.shape.str(), name_of(to.dtype), to.shape.str());
  if (ctx.planning || from.numel() == 0) return;
  ANNULUS_CUDA_TRY(cudaMemcpyAsync(to.data, from.data, static_cast<std::size_t>(from.bytes()), kind, stream_of(ctx)));
}

}  // namespace

ComputeDevice make_compute_device(int host_local_rank) {
  const int count = device_count();
  if (count == 0)
    throw ConfigError("no GPU is visible (nvidia-smi and CUDA_VISIBLE_DEVICES say why); set device = \"cpu\"");
  if (host_local_rank >= count) {
    throw ConfigError(
        fmt::format("rank {} of this host has no GPU left: the host shows {}; start at most {} ranks per host",
                    host_local_rank, count, count));
  }
  cudaDeviceProp properties{};
  ANNULUS_CUDA_TRY(cudaGetDeviceProperties(&properties, host_local_rank));
  ComputeDevice out;
  out.kind = DeviceKind::cuda;
  out.cuda = std::make_shared<Device>(host_local_rank);
  out.allocator = device_allocator();
  out.host_allocator = page_locked_allocator();
  out.name = properties.name;
  out.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  return out;
}

Allocator device_allocator() {
  return {[](std::int64_t bytes) {
            void* memory = nullptr;
            const cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
            if (status == cudaErrorMemoryAllocation) {
              cudaGetLastError();
              std::size_t available = 0, total = 0;
              ANNULUS_CUDA_TRY(cudaMemGetInfo(&available, &total));
              constexpr double kGiB = 1 << 30;
              throw Error(fmt::format("out of GPU memory: {:.2f} GiB could not be taken, {:.2f} of {:.2f} GiB are free",
                                      static_cast<double>(bytes) / kGiB, static_cast<double>(available) / kGiB,
                                      static_cast<double>(total) / kGiB));
            }
            ANNULUS_CUDA_TRY(status);
            ANNULUS_CUDA_TRY(cudaMemset(memory, 0, static_cast<std::size_t>(bytes)));
            ANNULUS_CUDA_TRY(cudaDeviceSynchronize());  // our stream does not wait for the default stream
            return memory;
          },
          [](void* memory) { cudaFree(memory); }};
}

Allocator page_locked_allocator() {
  return {[](std::int64_t bytes) {
            void* memory = nullptr;
            ANNULUS_CUDA_TRY(cudaMallocHost(&memory, static_cast<std::size_t>(bytes)));
            std::memset(memory, 0, static_cast<std::size_t>(bytes));
            return memory;
          },
          [](void* memory) { cudaFreeHost(memory); }};
}

void copy_to_device(Context& ctx, const TensorView& host, const TensorView& device) {
  transfer(ctx, host, device, cudaMemcpyHostToDevice);
}

void copy_to_host(Context& ctx, const TensorView& device, const TensorView& host) {
  transfer(ctx, device, host, cudaMemcpyDeviceToHost);
}

void copy(Context& ctx, const TensorView& from, const TensorView& to) {
  if (from.device == DeviceKind::cpu) return copy_to_device(ctx, from, to);
  if (to.device == DeviceKind::cpu) return copy_to_host(ctx, from, to);
  transfer(ctx, from, to, cudaMemcpyDeviceToDevice);
}

void record(Context& ctx, std::shared_ptr<void>& event) {
  if (!event) {
    cudaEvent_t made = nullptr;  // waiting for it leaves the core to others
    ANNULUS_CUDA_TRY(cudaEventCreateWithFlags(&made, cudaEventBlockingSync));
    event = {made, [](void* old) { cudaEventDestroy(static_cast<cudaEvent_t>(old)); }};
  }
  ANNULUS_CUDA_TRY(cudaEventRecord(static_cast<cudaEvent_t>(event.get()), stream_of(ctx)));
}

void wait(const std::shared_ptr<void>& event) {
  ANNULUS_CUDA_TRY(cudaEventSynchronize(static_cast<cudaEvent_t>(event.get())));
}

double milliseconds_between(const std::shared_ptr<void>& from, const std::shared_ptr<void>& to) {
  float ms = 0;
  ANNULUS_CUDA_TRY(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(from.get()), static_cast<cudaEvent_t>(to.get())));
  return ms;
}

void synchronize(Context& ctx) { ANNULUS_CUDA_TRY(cudaStreamSynchronize(stream_of(ctx))); }

}  // namespace annulus::cuda
