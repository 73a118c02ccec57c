// Context: where and how an operation runs. Every operation takes it first.
#pragma once

#include "core/arena.h"

namespace annulus {

namespace cuda {
struct Device;  // stream, cuBLASLt handle: core/cuda/device.h
}

struct Context {
  DeviceKind device = DeviceKind::cpu;
  Arena* scratch = nullptr;   // stack for workspaces; used through Arena::Scope
  bool planning = false;      // dry run: operations and collectives return at once, arenas only count
  bool deterministic = true;  // fixed reduction orders; same ranks, same bits
  void (*progress)() = nullptr;  // CPU kernels call poll() between tiles: Open MPI moves messages only inside MPI calls
  cuda::Device* cuda = nullptr;  // set when device is cuda

  void poll() const {  // from the main thread only
    if (progress) progress();
  }
};

}  // namespace annulus
