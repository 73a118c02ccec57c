#include "parallel/mpi_runtime.h"

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "parallel/mpi_communicator.h"

namespace annulus::parallel {

MpiRuntime::MpiRuntime(int* argc, char*** argv) : exceptions_(std::uncaught_exceptions()) {
  int initialized = 0, provided = 0;
  MPI_Initialized(&initialized);
  if (initialized) {
    MPI_Query_thread(&provided);
  } else {
    check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    owns_mpi_ = true;
  }
  ANNULUS_CHECK(provided >= MPI_THREAD_FUNNELED, "this MPI offers thread level {} and not MPI_THREAD_FUNNELED",
                provided);
  auto world = std::make_unique<MpiCommunicator>(MPI_COMM_WORLD);
  host_ = world->split_by_host();
  world_ = std::move(world);
}

MpiRuntime::~MpiRuntime() {
  if (std::uncaught_exceptions() > exceptions_) abort(1);
  host_.reset();
  world_.reset();
  if (owns_mpi_) MPI_Finalize();
}

void MpiRuntime::abort(int code) {
  std::fflush(nullptr);
  if (world_->size() > 1) {
    MPI_Abort(MPI_COMM_WORLD, code);
  } else if (owns_mpi_) {
    MPI_Finalize();  // alone, so nobody can be missed; spares the user mpirun's report
  }
  std::_Exit(code);
}

}  // namespace annulus::parallel
