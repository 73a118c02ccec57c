// What the cases of `annulus bench` share: timing between device synchronisations (medians of wall time; ranks report
// rank 0's), random tensors, and the table of results.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "model/config.h"
#include "parallel/mpi_runtime.h"
#include "train/bench.h"

namespace annulus::train {

struct BenchResult {
  std::string name, shape;
  double ms = 0;
  double flops = 0, bytes = 0;  // of one call, this rank; one of them is 0
  std::string extra;            // further JSON members
};

class BenchRun {
 public:
  BenchRun(const BenchOptions& options, parallel::MpiRuntime& runtime);

  void ceilings();
  void kernels();
  // Causal attention over a sequence spread over all ranks. A case with a suffix is heavy: run by name only.
  void attention(std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim,
                 const std::string& suffix = "");
  // Native sparse attention at the paper's sizes, whole and (on one rank) by stage: cases nsa_{prefix}…; heavy.
  void nsa(std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim, const std::string& prefix);
  // Dense attention on one GPU, every case of bench_gpu.cpp whose name and shape together contain the filter.
  void gpu_attention();
  void training_step(const std::string& name, const model::ModelConfig& model, std::int64_t tokens);
  void print() const;

 private:
  bool wanted(const std::string& name, bool only_by_name = false) const {
    return options_.filter.empty() ? !only_by_name : name.find(options_.filter) != std::string::npos;
  }
  // Median over at least 3 calls and 0.5 s, after one to warm up. Collective where `call` is.
  double time(const std::function<void()>& call);
  void measure(const std::string& name, const std::string& shape, double flops, double bytes,
               const std::function<void()>& call) {
    if (wanted(name)) results_.push_back({name, shape, 1e3 * time(call), flops, bytes, {}});
  }
  TensorView random(Arena& arena, const Shape& shape);
  double device_ms(const std::function<void()>& call);  // of a GPU's work: median after three calls to warm up
  void fill_random(const TensorView& t);                // bf16 on a GPU

  BenchOptions options_;
  parallel::MpiRuntime& runtime_;
  ComputeDevice device_;
  Context ctx_;
  Arena scratch_;
  double peak_flops_ = 0, bandwidth_ = 0;
  std::vector<BenchResult> results_;
};

}  // namespace annulus::train
