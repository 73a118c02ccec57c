// One transformer block: x += attention(norm(x)); x += mlp(norm(x)).
#pragma once

#include <memory>

#include "model/attention_layer.h"

namespace annulus::model {

// What is kept between forward and backward; the rest is recomputed.
enum class Recompute {
  none,            // everything is kept
  keep_attention,  // the block's input, the attention's output and statistics: the ring never runs twice
  block,           // the block's input only
};
Recompute parse_recompute(const std::string& name);

class Block {
 public:
  struct Saved {
    TensorView x;  // [R, H] the block's input; the next block's x is its output
    TensorView norm1, x_mid, norm2;
    RmsNorm::Saved rstd1, rstd2;
    std::unique_ptr<AttentionLayer::Saved> attention;
    Mlp::Saved mlp;
  };

  Block(const ModelConfig& config, std::int64_t layer);

  // Memory for one block's Saved. `kept` outlives the forward pass; `shared` is memory that all blocks use in turn, or
  // the same arena as `kept` when nothing is recomputed.
  Saved allocate_saved(Arena& kept, Arena& shared, Recompute policy, DType dtype, std::int64_t batch,
                       std::int64_t local_tokens) const;

  void forward(Context& ctx, const SequenceBatch& sequence, Saved& saved, const TensorView& y) const;
  // d_x [R, H]: the gradient of the output on entry, of the input on return.
  void backward(Context& ctx, const SequenceBatch& sequence, Saved& saved, Recompute policy,
                const TensorView& d_x) const;
  void visit_parameters(const ParameterVisitor& visit);
  // Generation (AttentionLayer::forward_cached): x [T, H] becomes the block's output.
  std::unique_ptr<AttentionLayer::Cache> allocate_cache(Arena& arena, const CacheSizes& sizes) const {
    return attention_->allocate_cache(arena, sizes);
  }
  AttentionLayer::View forward_cached(Context& ctx, const CachedRows& rows, const TensorView& x,
                                      AttentionLayer::Cache& cache) const;
  double attention_flops(std::int64_t tokens) const { return attention_->attention_flops(tokens); }
  AttentionLayer::View attention_view(const Saved& saved) const { return attention_->view(*saved.attention); }
  void pin_selection(const TensorView& selected) { attention_->pin_selection(selected); }

 private:
  void fill_saved(Context& ctx, const SequenceBatch& sequence, Saved& saved, const TensorView& y,
                  bool attention_kept) const;

  int layer_;
  std::int64_t hidden_size_, intermediate_size_;
  RmsNorm norm1_;
  std::unique_ptr<AttentionLayer> attention_;
  RmsNorm norm2_;
  Mlp mlp_;
};

}  // namespace annulus::model
