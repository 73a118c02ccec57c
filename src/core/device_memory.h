// The compute device as plain C++ sees it: no CUDA header here, so that the trainer and the tests need no compiler
// switch. The CPU part is in device_memory.cpp, the GPU part in cuda/; a build without CUDA says so when a GPU is asked
// for.
//
// A copy to or from a GPU is ordered on the Context's stream: its host side may be read, or written again, after
// synchronize(). None of these is collective.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/context.h"

namespace annulus {

int device_count(DeviceKind kind);  // cpu: 1; cuda: the GPUs this process sees, 0 without a driver or in a CPU build

// A device in use, shared by copies of the object and released with the last one; arenas, Contexts and communicators on
// it must go before.
struct ComputeDevice {
  DeviceKind kind = DeviceKind::cpu;
  std::shared_ptr<cuda::Device> cuda;          // null on the CPU
  Allocator allocator = cpu_allocator();       // for arenas of tensors
  Allocator host_allocator = cpu_allocator();  // for host arenas that exchange data with it (page-locked for a GPU)
  std::string name = "cpu";                    // as the driver names it
  std::int64_t memory_bytes = 0;               // of the GPU; 0 on the CPU
};

// One process uses one GPU, the one whose number is the process's rank among those of its host. ConfigError where there
// is none left for it. The memory of a GPU arena is zero-filled, as on the CPU.
ComputeDevice make_compute_device(DeviceKind kind, int host_local_rank = 0);

// A Context on the device, without a scratch arena. The device must outlive it.
Context make_device_context(const ComputeDevice& device);

// to = from: equal types and numbers of elements, any pair of places; not overlapping. With ctx.planning nothing
// happens.
void copy(Context& ctx, const TensorView& from, const TensorView& to);

// A point of a Context's stream that the host can wait for: so host memory that a copy reads is written again without
// waiting for the work behind the copy. Nothing to wait for before the first set(), and on the CPU.
class Fence {
 public:
  void set(Context& ctx);                                 // here: behind everything the stream was given so far
  void wait();                                            // reports errors of kernels
  double milliseconds_since(const Fence& earlier) const;  // of a GPU's work between them; both have been waited for

 private:
  std::shared_ptr<void> event_;  // of a GPU
};

// Waits until everything the Context's stream was given is done; reports errors of kernels. Returns at once on the CPU.
void synchronize(Context& ctx);

}  // namespace annulus
