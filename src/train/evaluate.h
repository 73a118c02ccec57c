// Language-modelling loss and accuracy over documents (spec/cli.md, Scoring).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "parallel/mpi_runtime.h"
#include "train/attention_statistics.h"

namespace annulus::train {

struct PositionBucket {
  std::int64_t upto = 0;  // targets that see upto/2 < tokens <= upto of their window
  double loss_sum = 0;
  std::int64_t tokens = 0;
  std::int64_t correct = 0;

  double loss() const { return loss_sum / static_cast<double>(tokens); }  // a bucket holds at least one
  double accuracy() const { return static_cast<double>(correct) / static_cast<double>(tokens); }
};

struct Evaluation {
  double loss_sum = 0;       // nats
  std::int64_t tokens = 0;   // targets scored
  std::int64_t correct = 0;  // of them, those to which the model gives the greatest probability
  std::int64_t bytes = 0;    // UTF-8 bytes scored; 0: the documents are no text
  std::vector<PositionBucket> by_position;

  double loss() const { return tokens > 0 ? loss_sum / static_cast<double>(tokens) : 0; }
  double perplexity() const;
  double accuracy() const { return tokens > 0 ? static_cast<double>(correct) / static_cast<double>(tokens) : 0; }
  double bits_per_byte() const;  // −1 without bytes
};

// Scores the documents' windows, at most `max_tokens` targets (0: all; whole windows). Replicas share the windows, the
// ranks of a replica share each window. `watch` sees the passes. Collective; the result is the same on every rank.
Evaluation evaluate(Engine& engine, const data::ScoringData& documents, std::int64_t max_tokens = 0,
                    AttentionWatch* watch = nullptr);

struct EvaluateOptions {
  std::string model;                 // checkpoint, run folder or HuggingFace folder
  std::vector<std::string> data;     // files and folders
  std::int64_t sequence_length = 0;  // 0: the training length; without a recipe the model's own limit, at most 4,096
  std::int64_t stride = 0;           // 0: the whole window
  std::string precision;             // empty: fp32, fp64 if the checkpoint is
  bool attention = false;            // what sparse layers do: gates, selected blocks
  std::vector<std::string> without;  // branches of sparse layers whose gates are shut: compressed, selected, window
  bool json = false;
};

// The subcommand: prints the result on rank 0. Collective over the runtime's world. Returns the exit code.
int run_evaluation(const EvaluateOptions& options, parallel::MpiRuntime& runtime);

}  // namespace annulus::train
