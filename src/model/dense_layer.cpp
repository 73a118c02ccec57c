// Dense grouped-query attention (arXiv 2305.13245) as a sublayer.
#include <algorithm>
#include <cmath>

#include "model/attention_layer.h"

namespace annulus::model {
namespace {

class DenseLayer : public AttentionLayer {
 public:
  DenseLayer(const std::string& name, const ModelConfig& config);

  std::unique_ptr<AttentionLayer::Saved> allocate_saved(SavedAllocator& allocator, DType dtype, std::int64_t batch,
                                                        std::int64_t local_tokens) const override;
  void forward(Context& ctx, const SequenceBatch& sequence, const TensorView& x, const TensorView& y,
               AttentionLayer::Saved& saved, bool attention_kept) const override;
  void backward(Context& ctx, const SequenceBatch& sequence, const TensorView& d_y, const TensorView& x,
                const AttentionLayer::Saved& saved, const TensorView& d_x) const override;
  void visit_parameters(const ParameterVisitor& visit) override;
  double attention_flops(std::int64_t tokens) const override;
  std::unique_ptr<AttentionLayer::Cache> allocate_cache(Arena& arena, const CacheSizes& sizes) const override;
  View forward_cached(Context& ctx, const CachedRows& rows, const TensorView& x, const TensorView& y,
                      AttentionLayer::Cache& cache) const override;

 private:
  struct Saved : AttentionLayer::Saved {
    TensorView q, kv;               // [B, T, Hq, D], [2, B, T, Hkv, D], rotated
    TensorView q_raw, k_raw;        // before q/k norm
    RmsNorm::Saved q_norm, k_norm;  // [R·Hq], [R·Hkv]
    TensorView out, lse;            // [B, T, Hq, D], [B, Hq, T]
  };
  struct Cache : AttentionLayer::Cache {
    RowCache rows;  // rotated; with a sliding window those that it reaches
  };
  struct Projections {  // of rows: q [.., Hq, D], k, v [.., Hkv, D]; q and k before their norms
    TensorView q, k, v, q_raw, k_raw;
    RmsNorm::Saved q_norm, k_norm;
  };
  void project(Context& ctx, const TensorView& x, const TensorView& cos, const TensorView& sin,
               const Projections& to) const;

  std::int64_t heads_, kv_heads_, head_dim_, window_;
  Linear q_proj_, k_proj_, v_proj_;
  std::unique_ptr<RmsNorm> q_norm_, k_norm_;  // null without qk_norm
  Linear o_proj_;
};

DenseLayer::DenseLayer(const std::string& name, const ModelConfig& c)
    : heads_(c.num_attention_heads),
      kv_heads_(c.num_key_value_heads),
      head_dim_(c.head_dim),
      window_(c.sliding_window),
      q_proj_(name + ".q_proj", c.hidden_size, heads_ * head_dim_, c.attention_bias),
      k_proj_(name + ".k_proj", c.hidden_size, kv_heads_ * head_dim_, c.attention_bias),
      v_proj_(name + ".v_proj", c.hidden_size, kv_heads_ * head_dim_, c.attention_bias),
      o_proj_(name + ".o_proj", heads_ * head_dim_, c.hidden_size, false, Init::residual) {
  if (c.qk_norm) {
    q_norm_ = std::make_unique<RmsNorm>(name + ".q_norm", head_dim_, c.rms_norm_eps);
    k_norm_ = std::make_unique<RmsNorm>(name + ".k_norm", head_dim_, c.rms_norm_eps);
  }
}

std::unique_ptr<AttentionLayer::Saved> DenseLayer::allocate_saved(SavedAllocator& allocator, DType dtype,
                                                                  std::int64_t batch, std::int64_t local_tokens) const {
  auto saved = std::make_unique<Saved>();
  const Shape q_shape{batch, local_tokens, heads_, head_dim_};
  const DType stat = stat_type(dtype);
  saved->q = allocator.keep("q", dtype, q_shape);
  saved->kv = allocator.keep("kv", dtype, {2, batch, local_tokens, kv_heads_, head_dim_});
  if (q_norm_) {
    saved->q_raw = allocator.keep("q before norm", dtype, q_shape);
    saved->k_raw = allocator.keep("k before norm", dtype, {batch, local_tokens, kv_heads_, head_dim_});
    saved->q_norm.rstd = allocator.keep("q rstd", stat, {batch * local_tokens * heads_});
    saved->k_norm.rstd = allocator.keep("k rstd", stat, {batch * local_tokens * kv_heads_});
  }
  saved->out = allocator.attention("attention out", dtype, q_shape);
  saved->lse = allocator.attention("attention lse", stat, {batch, heads_, local_tokens});
  return saved;
}

void DenseLayer::project(Context& ctx, const TensorView& x, const TensorView& cos, const TensorView& sin,
                         const Projections& to) const {
  const std::int64_t rows = x.dim(0);
  auto apply = [&](const Linear& linear, const TensorView& into) {
    linear.forward(ctx, x, into.reshape({rows, into.numel() / rows}));
  };
  auto heads = [&](const TensorView& t) { return t.reshape({t.numel() / head_dim_, head_dim_}); };
  apply(q_proj_, q_norm_ ? to.q_raw : to.q);
  apply(k_proj_, k_norm_ ? to.k_raw : to.k);
  apply(v_proj_, to.v);
  if (q_norm_) {
    q_norm_->forward(ctx, heads(to.q_raw), heads(to.q), to.q_norm);
    k_norm_->forward(ctx, heads(to.k_raw), heads(to.k), to.k_norm);
  }
  ops::rope(ctx, {.x = to.q.reshape({rows, heads_, head_dim_}), .cos = cos, .sin = sin});
  ops::rope(ctx, {.x = to.k.reshape({rows, kv_heads_, head_dim_}), .cos = cos, .sin = sin});
}

void DenseLayer::forward(Context& ctx, const SequenceBatch& sequence, const TensorView& x, const TensorView& y,
                         AttentionLayer::Saved& saved_base, bool attention_kept) const {
  auto& s = static_cast<Saved&>(saved_base);
  const std::int64_t rows = sequence.rows();
  project(ctx, x, sequence.cos, sequence.sin,
          {.q = s.q,
           .k = s.kv[0],
           .v = s.kv[1],
           .q_raw = s.q_raw,
           .k_raw = s.k_raw,
           .q_norm = s.q_norm,
           .k_norm = s.k_norm});
  if (!attention_kept) {
    attention::dense_forward(ctx, sequence, {.q = s.q, .kv = s.kv, .out = s.out, .lse = s.lse});
  }
  if (y.shape.rank()) o_proj_.forward(ctx, s.out.reshape({rows, heads_ * head_dim_}), y);
}

void DenseLayer::backward(Context& ctx, const SequenceBatch& sequence, const TensorView& d_y, const TensorView& x,
                          const AttentionLayer::Saved& saved_base, const TensorView& d_x) const {
  const auto& s = static_cast<const Saved&>(saved_base);
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t rows = sequence.rows();
  const DType dtype = s.q.dtype, stat = stat_type(dtype);
  auto heads = [&](const TensorView& t) { return t.reshape({t.numel() / head_dim_, head_dim_}); };
  auto matrix = [&](const TensorView& t) { return t.reshape({rows, t.numel() / rows}); };

  const TensorView d_out = ctx.scratch->allocate("d_attention", dtype, s.out.shape);
  o_proj_.backward(ctx, d_y, matrix(s.out), matrix(d_out), GradMode::overwrite);

  const TensorView d_q = ctx.scratch->allocate("d_q", stat, s.q.shape);
  const TensorView d_kv = ctx.scratch->allocate("d_kv", stat, s.kv.shape);
  attention::dense_backward(
      ctx, sequence, {.q = s.q, .kv = s.kv, .out = s.out, .lse = s.lse, .d_out = d_out, .d_q = d_q, .d_kv = d_kv});

  const TensorView g_q = in_working_type(ctx, "d_q, working type", d_q, dtype);
  const TensorView g_kv = in_working_type(ctx, "d_kv, working type", d_kv, dtype);
  const TensorView g_k = g_kv[0], g_v = g_kv[1];
  ops::rope(ctx,
            {.x = g_q.reshape({rows, heads_, head_dim_}), .cos = sequence.cos, .sin = sequence.sin, .inverse = true});
  ops::rope(
      ctx, {.x = g_k.reshape({rows, kv_heads_, head_dim_}), .cos = sequence.cos, .sin = sequence.sin, .inverse = true});
  if (q_norm_) {
    q_norm_->backward(ctx, heads(g_q), heads(s.q_raw), s.q_norm, heads(g_q), GradMode::overwrite);
    k_norm_->backward(ctx, heads(g_k), heads(s.k_raw), s.k_norm, heads(g_k), GradMode::overwrite);
  }
  q_proj_.backward(ctx, matrix(g_q), x, d_x, GradMode::overwrite);
  k_proj_.backward(ctx, matrix(g_k), x, d_x, GradMode::accumulate);
  v_proj_.backward(ctx, matrix(g_v), x, d_x, GradMode::accumulate);
}

void DenseLayer::visit_parameters(const ParameterVisitor& visit) {
  q_proj_.visit_parameters(visit);
  k_proj_.visit_parameters(visit);
  v_proj_.visit_parameters(visit);
  if (q_norm_) {
    q_norm_->visit_parameters(visit);
    k_norm_->visit_parameters(visit);
  }
  o_proj_.visit_parameters(visit);
}

std::unique_ptr<AttentionLayer::Cache> DenseLayer::allocate_cache(Arena& arena, const CacheSizes& sizes) const {
  auto cache = std::make_unique<Cache>();
  cache->rows = RowCache(arena, "kv cache", sizes, window_, kv_heads_, head_dim_);
  return cache;
}

AttentionLayer::View DenseLayer::forward_cached(Context& ctx, const CachedRows& in, const TensorView& x,
                                                const TensorView& y, AttentionLayer::Cache& cache_base) const {
  RowCache& cache = static_cast<Cache&>(cache_base).rows;
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t rows = in.count();
  const DType dtype = x.dtype, stat = stat_type(dtype);
  const Shape q_shape{1, rows, heads_, head_dim_};
  auto scratch = [&](const char* name, DType type, const Shape& shape) {
    return ctx.scratch->allocate(name, type, shape);
  };
  cache.append(ctx, in.position, rows);
  Projections to{.q = scratch("q", dtype, q_shape),
                 .k = cache.fresh_k(),
                 .v = cache.fresh_v(),
                 .q_raw = {},
                 .k_raw = {},
                 .q_norm = {},
                 .k_norm = {}};
  if (q_norm_) {
    to.q_raw = scratch("q before norm", dtype, q_shape);
    to.k_raw = scratch("k before norm", dtype, {rows, kv_heads_, head_dim_});
    to.q_norm.rstd = scratch("q rstd", stat, {rows * heads_});
    to.k_norm.rstd = scratch("k rstd", stat, {rows * kv_heads_});
  }
  project(ctx, x, in.cos(), in.sin(), to);
  const TensorView first = scratch("first visible row", DType::i32, in.token.shape);
  const TensorView last = scratch("last visible row", DType::i32, in.token.shape);
  attention::band_bounds(ctx, {.global_first = in.window_first,
                               .global_last = in.token,
                               .first = first,
                               .last = last,
                               .chunk = cache.used(),
                               .chunk_begin = {cache.begin(), -1}});
  const TensorView out = scratch("attention out", dtype, q_shape);
  attention::band_forward(ctx, {.q = to.q,
                                .k = cache.k(),
                                .v = cache.v(),
                                .first = first,
                                .last = last,
                                .o = dtype == stat ? out : scratch("attention state", stat, q_shape),
                                .lse = scratch("attention lse", stat, {1, heads_, rows}),
                                .has_state = false,
                                .out = out,
                                .scale = 1 / std::sqrt(static_cast<double>(head_dim_))});
  o_proj_.forward(ctx, out.reshape({rows, heads_ * head_dim_}), y);
  return {};
}

double DenseLayer::attention_flops(std::int64_t tokens) const {
  const double s = static_cast<double>(tokens);
  const double w = window_ > 0 ? std::min(static_cast<double>(window_), s) : s;
  const double pairs = w * (w + 1) / 2 + (s - w) * w;  // visible (query, key) pairs
  return 4 * pairs * static_cast<double>(heads_ * head_dim_);
}

}  // namespace

std::unique_ptr<AttentionLayer> make_dense_layer(const std::string& name, const ModelConfig& config) {
  return std::make_unique<DenseLayer>(name, config);
}

}  // namespace annulus::model
