#include "train/session.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "parallel/device_communicator.h"

namespace annulus::train {

DType parse_precision(const std::string& name) {
  if (name == "fp32") return DType::f32;
  if (name == "fp64") return DType::f64;
  if (name == "bf16") return DType::bf16;
  throw ConfigError(fmt::format("train.precision = \"{}\"; expected fp32, bf16 or fp64", name));
}

EngineOptions engine_options(const RunConfig& c, bool training) {
  return {.model = c.model,
          .dtype = parse_precision(c.train.precision),
          .layout = c.parallel.layout == "contiguous" ? parallel::LayoutKind::contiguous : parallel::LayoutKind::zigzag,
          .sequence_length = c.train.sequence_length,
          .batch = c.train.micro_batch,
          .training = training,
          .recompute = model::parse_recompute(c.train.recompute),
          .deterministic = c.train.deterministic,
          .optimizer = c.optimizer};
}

Session::Session(const RunConfig& config, parallel::MpiRuntime& runtime, bool training)
    : config_(config), ranks_on_host_(runtime.local_size()) {
  const bool gpu =
      config.parallel.device == "cuda" || (config.parallel.device == "auto" && device_count(DeviceKind::cuda) > 0);
  device_ = make_compute_device(gpu ? DeviceKind::cuda : DeviceKind::cpu, runtime.local_rank());
  mesh_ = std::make_unique<parallel::Mesh>(
      runtime.world(),
      std::vector<parallel::Axis>{{"data", config.parallel.data}, {"sequence", config.parallel.sequence}},
      parallel::device_communicators(device_));
  engine_ = std::make_unique<Engine>(device_, *mesh_, engine_options(config, training));
  if (!gpu) engine_->context().progress = parallel::mpi_progress;
}

void Session::take_memory() {
  engine_->plan();
  if (device_.kind == DeviceKind::cpu) {
    // Refused here, since Linux promises memory that it does not have and kills whoever touches it.
    const double have = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
    const double want = static_cast<double>(engine_->planned_bytes()) * ranks_on_host_;
    if (want > have) {
      throw ConfigError(fmt::format(
          "the run needs {:.1f} GiB on this host ({} ranks), which has {:.1f} GiB; lower train.micro_batch or "
          "train.sequence_length, set train.recompute, or use more hosts (annulus plan shows what takes it)",
          want / (1 << 30), ranks_on_host_, have / (1 << 30)));
    }
  }
  engine_->commit();
}

int set_threads(parallel::MpiRuntime& runtime) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  cpu_set_t allowed;
  int usable = cores;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) usable = CPU_COUNT(&allowed);
  const char* wish = std::getenv("OMP_NUM_THREADS");
  const int share = std::max(1, cores / runtime.local_size());
  const int threads = wish ? std::max(1, std::atoi(wish)) : std::min(share, usable);
  omp_set_num_threads(threads);
  if (!wish && usable < share && runtime.world().rank() == 0) {
    fmt::print(
        stderr,
        "annulus: warning: this rank is bound to {} of {} cores, its share is {}; start with mpirun --bind-to none\n",
        usable, cores, share);
  }
  return threads;
}

}  // namespace annulus::train
