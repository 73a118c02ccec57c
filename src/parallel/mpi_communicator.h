// MpiCommunicator: Communicator over MPI, for host data. Construction, split() and barrier() are collective. Funneled:
// the main thread alone calls it. Transfers move inside start calls, wait() and mpi_progress() (mpi_runtime.h) only.
//
// wait() polls all live communicators (a peer may need what another of them forwards), yields the core between polls
// and sleeps when nothing moves, so that ranks may outnumber cores. Errors of MPI are thrown, with the call's text, in
// wait(); sizes that differ between ranks are found where messages of both exist.
#pragma once

#include <mpi.h>

#include <exception>

#include "parallel/communicator.h"
#include "parallel/mpi_operations.h"

namespace annulus::parallel {

struct MpiOptions {
  std::int64_t max_message = std::int64_t{1} << 30;  // bytes; longer ones go in pieces. Tests make it small
};

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm comm, MpiOptions options = {});  // over a duplicate of comm
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }

  Handle all_reduce(Context& ctx, TensorView data, ReduceOp op) override;
  Handle all_gather(Context& ctx, TensorView send, TensorView recv) override;
  Handle reduce_scatter(Context& ctx, TensorView send, TensorView recv) override;
  Handle shift(Context& ctx, TensorView send, TensorView recv, int distance) override;
  Handle broadcast(Context& ctx, TensorView data, int root) override;
  void wait(Context& ctx, Handle handle) override;
  void barrier() override;
  std::unique_ptr<Communicator> split(int color, int key) override;
  std::unique_ptr<MpiCommunicator> split_by_host();  // collective: the ranks that share this one's memory

  void progress() noexcept;  // moves what can move; keeps errors for wait()

 private:
  struct Active {
    std::int64_t id;
    std::unique_ptr<MpiOperation> operation;  // null when done
    std::exception_ptr error;
  };
  struct Adopt {};
  MpiCommunicator(Adopt, MPI_Comm comm, MpiOptions options);

  int next_tags();
  static void advance(Active& active) noexcept;
  Handle start(std::unique_ptr<MpiOperation> operation);

  MpiOptions options_;
  MpiGroup group_;
  StagingPool pool_;            // outlives active_, whose operations give buffers back
  std::vector<Active> active_;  // few
  std::int64_t next_id_ = 0;
  int tag_ = 0;
};

}  // namespace annulus::parallel
