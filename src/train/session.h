// Session: what a run stands on: device, mesh, engine. Shared by train, evaluate, bench and plan.
#pragma once

#include <memory>
#include <string>

#include "parallel/mpi_runtime.h"
#include "train/config.h"
#include "train/engine.h"
#include "train/open_model.h"

namespace annulus::train {

DType parse_precision(const std::string& name);  // fp32, bf16, fp64
EngineOptions engine_options(const RunConfig& config, bool training);

class Session {
 public:
  // A resolved and validated config. Collective; takes no memory.
  Session(const RunConfig& config, parallel::MpiRuntime& runtime, bool training);

  void take_memory();  // plan and commit; ConfigError where the host's memory cannot hold its ranks

  const RunConfig& config() const { return config_; }
  const ComputeDevice& device() const { return device_; }
  parallel::Mesh& mesh() { return *mesh_; }
  Engine& engine() { return *engine_; }

 private:
  RunConfig config_;
  int ranks_on_host_;
  ComputeDevice device_;
  std::unique_ptr<parallel::Mesh> mesh_;
  std::unique_ptr<Engine> engine_;
};

// Threads for this rank's CPU kernels: the cores it may use, shared with the host's other ranks; OMP_NUM_THREADS wins.
// Rank 0 warns when mpirun bound it to fewer cores than its share. Before anything computes.
int set_threads(parallel::MpiRuntime& runtime);

}  // namespace annulus::train
