// NcclCommunicator: Communicator over NCCL, for tensors of a GPU. Construction, split() and barrier() are collective.
// Each has its own NCCL communicator and stream, so that transfers of two rings pass each other; all ranks launch in
// one order.
//
// A start call waits (on its own stream) for what the Context's stream holds so far, wait() makes the Context's stream
// wait for the transfer: the host is never blocked, and nothing is allocated after construction. At most kMaxInFlight
// handles are open at once. bf16 is summed in bf16, step by step. NCCL's min and max drop NaN, so they are refused for
// floating point: reduce such values on the host. Failures throw Error with the call's text and NCCL's. No CUDA header
// here; in builds with CUDA only.
#pragma once

#include <memory>

#include "core/device_memory.h"
#include "parallel/communicator.h"

namespace annulus::parallel {

struct NcclOptions {
  std::int64_t max_message = std::int64_t{1} << 30;  // bytes; longer ones go in pieces. Tests make it small
};
constexpr int kMaxInFlight = 64;

// The ranks of `host`, which it uses for NCCL's id, for barrier() and for split(), and which must outlive it, as must
// the device. Every rank has a GPU of its own.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const ComputeDevice& device,
                                                     NcclOptions options = {});

}  // namespace annulus::parallel
