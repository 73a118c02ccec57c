// The GPU part of core/device_memory.h, same contracts.
#pragma once

#include "core/cuda/device.h"
#include "core/device_memory.h"

namespace annulus::cuda {

ComputeDevice make_compute_device(int host_local_rank);
Allocator device_allocator();       // cudaMalloc, zero-filled
Allocator page_locked_allocator();  // cudaMallocHost, zero-filled
void copy_to_device(Context& ctx, const TensorView& host, const TensorView& device);
void copy_to_host(Context& ctx, const TensorView& device, const TensorView& host);
void copy(Context& ctx, const TensorView& from, const TensorView& to);  // at least one of them on the GPU
void record(Context& ctx, std::shared_ptr<void>& event);                // makes the event where there is none
void wait(const std::shared_ptr<void>& event);
double milliseconds_between(const std::shared_ptr<void>& from, const std::shared_ptr<void>& to);
void synchronize(Context& ctx);

}  // namespace annulus::cuda
