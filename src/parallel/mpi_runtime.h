// MpiRuntime: MPI for the life of the program, and the ranks of this host. Collective over all ranks; one per process,
// on the main thread, made before anything that communicates. A program started without mpirun is one rank.
//
// MPI is initialised for funneled threads (only the main thread communicates) and finalised by the destructor, unless
// somebody else had initialised it. When an exception unwinds past it the job is aborted instead, since other ranks may
// wait for this one; main() should catch errors inside and call abort() with their exit code.
#pragma once

#include <memory>

#include "parallel/communicator.h"

namespace annulus::parallel {

class MpiRuntime {
 public:
  MpiRuntime(int* argc, char*** argv);
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  Communicator& world() { return *world_; }  // host data, all ranks
  Communicator& host() { return *host_; }    // host data, the ranks on this host
  int local_rank() const { return host_->rank(); }
  int local_size() const { return host_->size(); }

  // Ends every rank of the job; mpirun returns `code`. Not collective.
  [[noreturn]] void abort(int code);

 private:
  bool owns_mpi_ = false;
  int exceptions_;  // in flight at construction
  std::unique_ptr<Communicator> world_, host_;
};

// For Context::progress on CPU ranks: moves the messages of all live MpiCommunicators. Cheap when nothing is in flight.
// Main thread only; never throws, since kernels call it inside parallel regions: errors come out of wait().
void mpi_progress();

}  // namespace annulus::parallel
