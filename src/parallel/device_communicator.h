// The communicators for tensors of a compute device: NCCL for GPUs, none of their own for CPU ranks (the mesh then uses
// MPI for both). The one place that knows which device needs which.
#pragma once

#include "core/device_memory.h"
#include "parallel/mesh.h"

namespace annulus::parallel {

DeviceCommunicatorFactory device_communicators(const ComputeDevice& device);  // null for CPU ranks

}  // namespace annulus::parallel
