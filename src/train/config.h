// RunConfig: a whole run, typed. Read from TOML (config_toml.cpp), overridden by --set section.key=value, validated
// before memory is taken. One table of fields (config_fields.h) drives reading, suggestions for unknown keys, writing
// the resolved config and the documentation of every key (docs/config.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/config.h"
#include "model/config.h"
#include "optim/config.h"

namespace annulus::train {

struct ParallelConfig {
  int sequence = 0;               // ranks per sequence; 0: all ranks that `data` leaves
  int data = 0;                   // replicas; 0: all ranks that `sequence` leaves (with both 0: sequence takes all)
  std::string layout = "zigzag";  // zigzag, contiguous
  std::string device = "auto";    // auto, cpu, cuda
  bool operator==(const ParallelConfig&) const = default;
};

struct TrainConfig {
  std::int64_t steps = 1000;
  std::int64_t global_batch = 8;  // sequences per step, over all replicas
  std::int64_t micro_batch = 1;   // sequences per replica in one forward and backward
  std::int64_t sequence_length = 1024;
  std::string precision = "fp32";  // fp32, bf16, fp64
  std::string recompute = "none";  // none, keep_attention, block
  bool deterministic = true;
  std::int64_t seed = 0;
  double watchdog_seconds = 300;  // a rank without progress for this long ends the job with exit code 6; 0: off
  bool operator==(const TrainConfig&) const = default;
};

struct CheckpointConfig {
  std::string dir = "runs/default";  // the run folder: checkpoints, metrics.jsonl, config.toml
  std::int64_t every = 500;          // steps; 0: only at the end
  std::int64_t keep = 2;
  std::string resume = "auto";  // auto, none, PATH of a checkpoint
  std::string init_from;        // a run that resumes from nothing starts with this MODEL's weights; empty: random ones
  bool operator==(const CheckpointConfig&) const = default;
};

struct LogConfig {
  std::int64_t every = 1;  // steps per progress line and metrics record
  bool bar = true;         // live bar where stdout is a terminal
  double peak_tflops = 0;  // MFU's denominator per rank; 0: measured at start
  bool operator==(const LogConfig&) const = default;
};

struct EvalConfig {
  std::int64_t every = 0;   // steps; 0: only at the end, if there is validation data
  std::int64_t tokens = 0;  // at most this many scored tokens; 0: all
  bool operator==(const EvalConfig&) const = default;
};

// What the config is judged against beside the number of ranks.
struct Machine {
  bool cuda_build = false;  // the program has the CUDA twins
  int gpus = 0;             // that this process can see
};
Machine this_machine();

struct RunConfig {
  model::ModelConfig model;
  ParallelConfig parallel;
  data::DataConfig data;
  TrainConfig train;
  optim::OptimizerConfig optimizer;
  optim::ScheduleConfig schedule;
  CheckpointConfig checkpoint;
  LogConfig log;
  EvalConfig eval;

  // Resolves derived values (also parallel sizes for `world_size` ranks, and device auto to cpu or cuda), then checks
  // everything that needs no file and no other rank; throws ConfigError. Idempotent. `plan` passes the machine it plans
  // for.
  void resolve_and_validate(int world_size, const Machine& machine = this_machine());
  bool operator==(const RunConfig&) const = default;
};

// Reads a TOML file; "section.key=value" overrides are TOML values (a bare word is a string). Unknown keys, wrong types
// and syntax errors are ConfigErrors with file, line and the nearest known key. Relative data paths are relative to the
// working directory. Nothing is resolved or validated yet. `name` stands for the file in messages.
RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides);
RunConfig parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides);
std::string to_toml(const RunConfig& config);  // every key; parse_config(to_toml(c)) == c
// Keys of [model] that differ, with both values: "model.nsa.window was 16 and is 3".
std::vector<std::string> model_differences(RunConfig before, RunConfig now);
// Of a model that no run of ours made: [model], data.tokenizer, train.sequence_length and train.precision only.
std::string without_recipe(const RunConfig& config);
std::string config_docs();  // docs/config.md: every key with type, default and meaning

}  // namespace annulus::train
