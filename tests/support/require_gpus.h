// For test programs that need a GPU for each of at least two ranks, under mpirun: otherwise they end with 77 before
// their first test, which ctest counts as skipped (see require_gpu.h). And what such tests share: this rank's device
// and world.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <cstdlib>

#include "core/device_memory.h"
#include "parallel/mpi_runtime.h"

namespace annulus::testing {

inline parallel::MpiRuntime& runtime() {  // mpi_main.cpp has started MPI and ends it
  static auto* const only = new parallel::MpiRuntime(nullptr, nullptr);
  return *only;
}

inline bool has_gpu_per_rank() { return device_count(DeviceKind::cuda) >= runtime().local_size(); }

class RequireGpus : public ::testing::Environment {
 public:
  void SetUp() override {
    if (runtime().world().size() > 1 && has_gpu_per_rank()) return;
    if (runtime().world().rank() == 0)
      std::fputs("needs mpirun with two ranks or more and a GPU for each: skipped\n", stderr);
    MPI_Finalize();
    std::exit(77);
  }
};

}  // namespace annulus::testing
