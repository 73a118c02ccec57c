#include "parallel/device_communicator.h"

#ifdef ANNULUS_CUDA
#include "parallel/nccl_communicator.h"
#endif

namespace annulus::parallel {

DeviceCommunicatorFactory device_communicators(const ComputeDevice& device) {
  if (device.kind == DeviceKind::cpu) return nullptr;
#ifdef ANNULUS_CUDA
  return [&device](Communicator& host) { return make_nccl_communicator(host, device); };
#else
  throw ConfigError("parallel.device = \"cuda\", but this program was built without CUDA; build the preset cuda");
#endif
}

}  // namespace annulus::parallel
