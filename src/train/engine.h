// Engine: a model on this rank's device with all its memory: planned by a dry run of the step, then taken once. Loads
// micro-batches of whole sequences, runs them, and takes optimiser steps. The trainer, the evaluator, the benches and
// the oracle check all drive this. Calls are collective over the mesh where they run the model or step.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "model/parameters.h"
#include "optim/optimizer.h"

namespace annulus::train {

// The layout of a model's sequences: NSA layers ask for chunks of their own (attention/nsa_shape.h). ConfigError with
// the lengths that fit.
parallel::SequenceLayout sequence_layout(const model::ModelConfig& model, parallel::LayoutKind kind,
                                         std::int64_t tokens, int ranks);

struct EngineOptions {
  model::ModelConfig model;
  DType dtype = DType::f32;
  parallel::LayoutKind layout = parallel::LayoutKind::zigzag;
  std::int64_t sequence_length = 1024;  // S
  std::int64_t batch = 1;               // B, sequences per micro-batch
  bool training = true;
  model::Recompute recompute = model::Recompute::none;
  bool deterministic = true;
  optim::OptimizerConfig optimizer;
};

// One micro-batch of B whole sequences, the same on every rank of a replica: all [B · S].
struct Sequences {
  std::span<const std::int32_t> tokens, targets;
  std::span<const std::int32_t> document_start;  // index in the sequence of the first token of the token's document
};

struct StepResult {
  double loss_sum = 0;   // over all ranks, of the targets since the last step
  double grad_norm = 0;  // before clipping
  bool finite = true;    // false: the step was refused, nothing changed
};

class Engine {
 public:
  Engine(const ComputeDevice& device, parallel::Mesh& mesh, const EngineOptions& options);
  Engine(const Engine&) = delete;

  // Sizes every arena by allocating without memory and running a step with ctx.planning. No memory is taken.
  void plan();
  // Takes the memory (plan() first).
  void commit();
  std::vector<const Arena*> arenas() const;
  std::int64_t planned_bytes() const;

  void initialize(std::uint64_t seed);  // weights from the seed; optimiser state to zero

  void load(const Sequences& sequences);
  void zero_gradients();
  // Gradients of scale · (sum of losses) are added; the loss sum too.
  void forward_backward(double scale);
  // Reduces gradients over all ranks, clips, updates, spreads the weights. Blocks the host once. step: k from 1.
  StepResult optimizer_step(double lr, double grad_clip, std::int64_t step);

  // losses[B · T]: of this rank's rows of the loaded micro-batch, 0 without a target; row r of sequence b is its token
  // layout().global_index(coordinate("sequence"), r).
  std::span<const double> losses();
  // correct[B · T] of the last losses(): 1 where the row has a target and no other logit is as great as the target's.
  std::span<const std::int32_t> correct() const;
  void logits(const TensorView& out) { model_.forward_logits(ctx_, batch_, out); }

  // After weights were written into store().values() of this rank's shard: spreads them to every rank.
  void gather_weights();

  Context& context() { return ctx_; }
  parallel::Mesh& mesh() { return mesh_; }
  const parallel::SequenceLayout& layout() const { return layout_; }
  const EngineOptions& options() const { return options_; }
  model::Transformer& model() { return model_; }
  model::ParameterStore& store() { return store_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  const std::vector<optim::Segment>& segments() const { return segments_; }

 private:
  void allocate();

  EngineOptions options_;
  ComputeDevice device_;
  parallel::Mesh& mesh_;
  Context ctx_;
  parallel::SequenceLayout layout_;
  model::Transformer model_;
  model::ParameterStore store_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<optim::Segment> segments_;

  Arena parameters_, gradients_, optimizer_state_, activations_, scratch_, host_;
  model::MicroBatch batch_;
  TensorView losses_;   // [R] stat
  TensorView correct_;  // [R] i32
  TensorView scalars_;  // f64 [4] on the device: loss sum, sum of squares, norm, clip factor
  TensorView host_scalars_, host_losses_, host_correct_;
  TensorView host_token_, host_target_, host_position_, host_first_, host_last_, host_start_;  // staging
  Fence staged_;                     // the staging has been copied
  std::vector<std::int32_t> first_;  // [B, S] first visible token, for the ring's plan
  std::vector<double> loss_values_;
};

}  // namespace annulus::train
