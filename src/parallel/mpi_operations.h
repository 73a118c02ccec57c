// The transfers behind MpiCommunicator, written on point-to-point messages so that every reduction has one fixed order
// and every byte is counted (MPI libraries pick algorithms by size, and some by address). Not thread-safe: the main
// thread.
//
// An operation is a state machine: advance() posts what may be posted, tests what is in flight and returns whether all
// is done; it never blocks. Messages of one operation carry one tag and arrive in the order in which they were posted.
// Buffers must outlive it. Errors throw Error.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "core/tensor.h"
#include "parallel/communicator.h"

namespace annulus::parallel {

// Throws Error with the text of `call` and MPI's own.
void check_mpi(int result, const std::string& call);

// out = a op b, elementwise; out may be a or b.
void combine(ReduceOp op, DType dtype, void* out, const void* a, const void* b, std::int64_t count);

struct MpiGroup {  // where an operation sends
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::int64_t max_message = 1;  // bytes
};

using StagingPool = std::vector<std::vector<std::byte>>;  // buffers between uses; grows to what was once needed

class MpiOperation {
 public:
  virtual ~MpiOperation() = default;
  virtual bool advance() = 0;
};

// `tag` below: two consecutive tags belong to each operation.
std::unique_ptr<MpiOperation> make_shift(const MpiGroup& group, int tag, const TensorView& send, const TensorView& recv,
                                         int distance);
std::unique_ptr<MpiOperation> make_broadcast(const MpiGroup& group, int tag, const TensorView& data, int root);
// recv [size · n] holds this rank's part already.
std::unique_ptr<MpiOperation> make_all_gather(const MpiGroup& group, int tag, const TensorView& recv);
// Part s is ((x_{s+1} + x_{s+2}) + …) + x_s, indices mod size.
std::unique_ptr<MpiOperation> make_reduce_scatter(const MpiGroup& group, int tag, const TensorView& send,
                                                  const TensorView& recv, StagingPool& pool);
// Short ones: everybody's data to everybody, combined in rank order. Long ones: reduce-scatter, then all-gather.
std::unique_ptr<MpiOperation> make_all_reduce(const MpiGroup& group, int tag, const TensorView& data, ReduceOp op,
                                              StagingPool& pool);
std::int64_t all_reduce_bytes(const MpiGroup& group, const TensorView& data);  // that this rank sends

}  // namespace annulus::parallel
