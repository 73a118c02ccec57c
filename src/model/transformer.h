// The model: embedding, blocks, final norm, and the loss head in chunks. Holds parameters' names and shapes from the
// start; memory comes from the caller's arenas. Calls that run blocks are collective over the mesh's sequence axis.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "model/block.h"

namespace annulus::model {

// One micro-batch on the compute device: this rank's R = B·T rows.
struct MicroBatch {
  attention::SequenceBatch sequence;
  TensorView token, target;  // [R] i32; target −1: none
  TensorView position;       // [R] i32, from the document's first token
};

struct ModelSizes {
  DType dtype = DType::f32;  // working type
  std::int64_t batch = 1, local_tokens = 1;
};

class Transformer {
 public:
  explicit Transformer(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }
  void visit_parameters(const ParameterVisitor& visit);
  std::int64_t num_parameters();

  // Buffers that live from forward to backward (training) or through a forward (evaluation). Called twice: once to
  // plan, once after commit (core/arena.h).
  void allocate_training(Arena& arena, const ModelSizes& sizes, Recompute policy);
  void allocate_evaluation(Arena& arena, const ModelSizes& sizes);
  // Inverse frequencies, once after allocate.
  void upload_constants(Context& ctx);

  // Adds the gradients of scale · (sum of the targets' losses) to every parameter's gradient, and that sum (unscaled)
  // to loss_sum[0] (f64).
  void forward_backward(Context& ctx, const MicroBatch& batch, double scale, const TensorView& loss_sum);
  // losses[R] (stat): each row's loss, 0 where there is no target. correct[R] i32: 1 where the target has the greatest
  // logit.
  void forward_losses(Context& ctx, const MicroBatch& batch, const TensorView& losses, const TensorView& correct);
  // logits[R, V] of the working type.
  void forward_logits(Context& ctx, const MicroBatch& batch, const TensorView& logits);

  // Generation. What one sequence leaves behind, layer by layer, and what its next rows need.
  struct Cache {
    std::vector<std::unique_ptr<AttentionLayer::Cache>> layers;
    CacheSizes sizes;
    std::int64_t length = 0;             // tokens held; 0 starts another sequence
    TensorView cos, sin;                 // [capacity, D/2]
    TensorView position, window_first;   // [capacity] i32
    TensorView token, start, x, logits;  // [max_rows] i32 twice, [max_rows, H], [1, V]
    TensorView selected;                 // [max_rows, Hkv, n] i32 of a sparse layer, all in turn
  };
  // Keys and values lie in `kv` alone. Called twice, as allocate_training.
  Cache allocate_cache(Arena& kv, Arena& activations, const CacheSizes& sizes) const;
  void fill_cache_tables(Context& ctx, Cache& cache) const;  // once, after upload_constants
  // Appends 1 … max_rows tokens: logits [1, V] of the last, until the next call. ConfigError beyond the capacity.
  TensorView forward_cached(Context& ctx, Cache& cache, std::span<const std::int32_t> tokens);

  // Called after every block of a forward pass, to look at its attention on the way. Views hold until the next block.
  using AttentionHook = std::function<void(Context& ctx, std::int64_t layer, const AttentionLayer::View& view)>;
  void on_attention(AttentionHook hook) { on_attention_ = std::move(hook); }
  void pin_selection(std::int64_t layer, const TensorView& selected) {  // AttentionLayer::pin_selection
    blocks_[static_cast<std::size_t>(layer)].pin_selection(selected);
  }

  // Floating-point operations of forward and backward that the model needs (recomputation not counted), per sequence of
  // S tokens over all ranks; attention counts visible pairs only. as_dense: with full causal attention in place of
  // sparse.
  double training_flops(std::int64_t tokens, bool as_dense = false);

 private:
  void allocate_common(Arena& arena, const ModelSizes& sizes);
  void rope_tables(Context& ctx, MicroBatch& batch) const;
  TensorView final_norm(Context& ctx, const TensorView& rstd);  // scratch [R, H]
  void forward_blocks(Context& ctx, const MicroBatch& batch);
  std::int64_t head_chunk(std::int64_t rows) const;  // rows of logits held at once
  Parameter& head() { return config_.tie_word_embeddings ? embedding_ : head_; }

  ModelConfig config_;
  Parameter embedding_;
  std::vector<Block> blocks_;
  RmsNorm norm_;
  Parameter head_;  // unless tied

  AttentionHook on_attention_;
  ModelSizes sizes_;
  Recompute policy_ = Recompute::none;
  std::vector<Block::Saved> saved_;
  TensorView last_x_;  // [R, H] output of the last block
  TensorView inv_freq_, cos_, sin_;
};

}  // namespace annulus::model
