// The attention sublayer: projections, q/k norm, RoPE, an attention kind, output projection. One class per kind behind
// one interface; the block knows no kinds. To add one: docs/adding_attention.md.
#pragma once

#include <memory>

#include "attention/attention.h"
#include "model/layers.h"
#include "model/row_cache.h"

namespace annulus::model {

using attention::SequenceBatch;

// Takes memory for saved tensors. Kept fields live until backward; the others are refilled by a forward just before it.
class SavedAllocator {
 public:
  virtual ~SavedAllocator() = default;
  virtual TensorView keep(const char* name, DType dtype, const Shape& shape) = 0;       // activations
  virtual TensorView attention(const char* name, DType dtype, const Shape& shape) = 0;  // attention's output and lse
};

// T new tokens of one sequence, behind those that a cache holds.
struct CachedRows {
  std::int64_t position = 0;        // of the first
  TensorView token, start;          // [1, T] i32: each row's token in the sequence; 0, the first token of its document
  TensorView window_first;          // [1, T] i32: first token that a dense layer's row sees
  TensorView table_cos, table_sin;  // [capacity, D/2] stat: RoPE by position
  TensorView selected;              // [1, T, Hkv, n] i32, for sparse layers to write; empty where there are none

  std::int64_t count() const { return token.dim(1); }
  TensorView cos() const { return table_cos.rows(position, count()); }
  TensorView sin() const { return table_sin.rows(position, count()); }
};

class AttentionLayer {
 public:
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~AttentionLayer() = default;

  virtual std::unique_ptr<Saved> allocate_saved(SavedAllocator& allocator, DType dtype, std::int64_t batch,
                                                std::int64_t local_tokens) const = 0;
  // x [R, H] (the block's norm(x)) -> y [R, H]. Collective over the sequence axis. y may be empty: only Saved is
  // filled; with attention_kept Saved already holds the attention's output and statistics, and the ring is not run
  // again.
  virtual void forward(Context& ctx, const SequenceBatch& sequence, const TensorView& x, const TensorView& y,
                       Saved& saved, bool attention_kept) const = 0;
  // d_x is overwritten.
  virtual void backward(Context& ctx, const SequenceBatch& sequence, const TensorView& d_y, const TensorView& x,
                        const Saved& saved, const TensorView& d_x) const = 0;
  virtual void visit_parameters(const ParameterVisitor& visit) = 0;
  // What the last forward pass left in `saved`, to look at (statistics, tests): empty views for kinds without it.
  struct View {
    TensorView selected;     // [B, T, Hkv, n] i32 (attention/select.h)
    TensorView gate_logits;  // [R, branches · Hq]
  };
  virtual View view(const Saved&) const { return {}; }
  // From now on these blocks [B, T, Hkv, n] are attended to instead of the best ones (empty: choose again). Gradient
  // checks and comparisons of precisions need it: a choice is not continuous. The memory is the caller's.
  virtual void pin_selection(const TensorView&) {}
  // Generation: a forward pass over new tokens of one sequence that keeps what later tokens need of them (K, V). Not
  // collective. Equal to forward()'s rows up to rounding, however the sequence is cut.
  struct Cache {
    virtual ~Cache() = default;
  };
  virtual std::unique_ptr<Cache> allocate_cache(Arena& arena, const CacheSizes& sizes) const = 0;
  // x [T, H] -> y [T, H]; what is needed on the way is taken from ctx.scratch.
  virtual View forward_cached(Context& ctx, const CachedRows& rows, const TensorView& x, const TensorView& y,
                              Cache& cache) const = 0;
  // Floating-point operations of the attention products themselves, forward, per sequence of S tokens (all ranks).
  virtual double attention_flops(std::int64_t tokens) const = 0;
};

// The layer of its kind; parameters are named model.layers.{layer}.self_attn.*
std::unique_ptr<AttentionLayer> make_attention_layer(const ModelConfig& config, std::int64_t layer);
std::unique_ptr<AttentionLayer> make_dense_layer(const std::string& name, const ModelConfig& config);
std::unique_ptr<AttentionLayer> make_nsa_layer(const std::string& name, const ModelConfig& config);

}  // namespace annulus::model
