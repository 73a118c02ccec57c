// Kernels and a training step on a CPU, dense attention on a GPU, timed against ceilings measured in the same run.
#pragma once

#include <string>

#include "parallel/mpi_runtime.h"

namespace annulus::train {

struct BenchOptions {
  std::string filter;           // cases whose name contains it; empty: all
  std::string device = "auto";  // cpu, cuda, or auto: cuda where the program and the machine have it
  bool json = false;            // one line: name, shape, ms, tflops or gbps, fraction of the ceiling
};

// The subcommand: prints on rank 0. Collective over the runtime's world. Returns the exit code.
int run_bench(const BenchOptions& options, parallel::MpiRuntime& runtime);

}  // namespace annulus::train
