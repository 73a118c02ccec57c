// Communicator: the collectives of one group of ranks. Written once against this interface, run on MPI for CPU ranks
// and host data (MpiCommunicator), on NCCL for GPUs (NcclCommunicator) and alone (SelfCommunicator).
//
// Contract: start calls are collective: every rank of the group makes the same calls in the same order. A start call
// reads what the Context's stream has produced so far (its ready event) and returns a handle; buffers belong to the
// transfer until wait(), which orders the Context's stream behind it (CPU: completes it) and never blocks the host for
// a GPU. Each handle is waited for once. With ctx.planning nothing happens. Counts are int64; longer messages go in
// pieces of <= 1 GiB. Results are the same bits for the same ranks, and of all_reduce the same bits on every rank; min
// and max keep NaN. Reductions take f32, f64, i32, i64 (bf16 only where the device adds it: CPU ranks refuse it).
// Failures throw Error with the call's text; an error met while messages move in the background is thrown by wait().
#pragma once

#include <memory>
#include <string>

#include "core/context.h"

namespace annulus::parallel {

enum class ReduceOp { sum, min, max };

struct Handle {
  std::int64_t id = -1;  // -1: nothing to wait for
};

struct ByteCounters {  // bytes this rank sent, by operation; planning counts nothing
  std::int64_t all_reduce = 0, all_gather = 0, reduce_scatter = 0, shift = 0, broadcast = 0;
  std::int64_t num_shifts = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual Handle all_reduce(Context& ctx, TensorView data, ReduceOp op) = 0;  // in place
  // send [n] -> recv [size · n] in rank order; send may be its own part of recv.
  virtual Handle all_gather(Context& ctx, TensorView send, TensorView recv) = 0;
  // Sum of send [size · n] over ranks, part `rank` of it -> recv [n], which may be its own part of send; else send
  // stays.
  virtual Handle reduce_scatter(Context& ctx, TensorView send, TensorView recv) = 0;
  // Sends to rank + distance and receives from rank − distance (mod size), 0 < distance < size; equal sizes everywhere.
  virtual Handle shift(Context& ctx, TensorView send, TensorView recv, int distance) = 0;
  virtual Handle broadcast(Context& ctx, TensorView data, int root) = 0;
  virtual void wait(Context& ctx, Handle handle) = 0;
  virtual void barrier() = 0;

  // Collective: a communicator of the ranks with equal color, ordered by key (color >= 0). Own resources, so that two
  // rings never share an order of launches.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  const ByteCounters& counters() const { return counters_; }

 protected:
  ByteCounters counters_;
};

// One rank. Copies only host tensors: on a GPU all_gather and reduce_scatter must be in place.
std::unique_ptr<Communicator> make_self_communicator();

}  // namespace annulus::parallel
