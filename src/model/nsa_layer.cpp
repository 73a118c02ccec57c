// Native sparse attention (arXiv 2502.11089, spec/nsa.md) as a sublayer: projections, compression, gates around the
// three branches of attention/nsa.h.
#include "model/nsa_layer.h"

#include <algorithm>

namespace annulus::model {

using attention::kCompressed;
using attention::kNumBranches;
using attention::kSelected;
using attention::kWindow;

NsaLayer::NsaLayer(const std::string& name, const ModelConfig& c)
    : heads_(c.num_attention_heads),
      kv_heads_(c.num_key_value_heads),
      head_dim_(c.head_dim),
      shape_(c.nsa.shape()),
      shared_(c.nsa.kv == "shared"),
      rope_after_(c.nsa.rope == "after"),
      q_proj_(name + ".q_proj", c.hidden_size, heads_ * head_dim_, c.attention_bias),
      compress_k_(name + ".cmp_k", c.nsa, kv_heads_, head_dim_),
      compress_v_(name + ".cmp_v", c.nsa, kv_heads_, head_dim_),
      gate_(name + ".gate", c.hidden_size, kNumBranches * heads_, true),
      o_proj_(name + ".o_proj", heads_ * head_dim_, c.hidden_size, false, Init::residual) {
  const std::vector<std::string> prefixes =
      shared_ ? std::vector<std::string>{"."} : std::vector<std::string>{".cmp_", ".slc_", ".win_"};
  for (const auto& prefix : prefixes) {
    k_proj_.emplace_back(name + prefix + "k_proj", c.hidden_size, kv_heads_ * head_dim_, c.attention_bias);
    v_proj_.emplace_back(name + prefix + "v_proj", c.hidden_size, kv_heads_ * head_dim_, c.attention_bias);
  }
  if (c.qk_norm) {
    q_norm_ = std::make_unique<RmsNorm>(name + ".q_norm", head_dim_, c.rms_norm_eps);
    k_norm_ = std::make_unique<RmsNorm>(name + ".k_norm", head_dim_, c.rms_norm_eps);
  }
}

std::unique_ptr<AttentionLayer::Saved> NsaLayer::allocate_saved(SavedAllocator& allocator, DType dtype,
                                                                std::int64_t batch, std::int64_t local_tokens) const {
  auto saved = std::make_unique<Saved>();
  const Shape q_shape{batch, local_tokens, heads_, head_dim_}, k_shape{batch, local_tokens, kv_heads_, head_dim_};
  const DType stat = stat_type(dtype);
  saved->q = allocator.keep("q", dtype, q_shape);
  if (q_norm_) {
    saved->q_raw = allocator.keep("q before norm", dtype, q_shape);
    saved->q_norm.rstd = allocator.keep("q rstd", stat, {batch * local_tokens * heads_});
  }
  saved->pairs.resize(k_proj_.size());
  for (Pair& p : saved->pairs) {
    p.kv = allocator.keep("kv", dtype, {2, batch, local_tokens, kv_heads_, head_dim_});
    if (!k_norm_) continue;
    p.k_raw = allocator.keep("k before norm", dtype, k_shape);
    p.k_norm.rstd = allocator.keep("k rstd", stat, {batch * local_tokens * kv_heads_});
  }
  if (shared_ && rope_after_) saved->plain_k = allocator.keep("k before RoPE", dtype, k_shape);
  saved->logits = allocator.keep("gate logits", dtype, {batch * local_tokens, kNumBranches * heads_});
  saved->compressed =
      allocator.attention("compressed kv", dtype, {2 * batch * (local_tokens / shape_.stride) * kv_heads_ * head_dim_});
  for (int b = 0; b < kNumBranches; ++b) {
    saved->out[b] = allocator.attention("branch out", dtype, q_shape);
    saved->lse[b] = allocator.attention("branch lse", stat, {batch, heads_, local_tokens});
  }
  saved->selected =
      allocator.attention("selected blocks", DType::i32, {batch, local_tokens, kv_heads_, shape_.select_count});
  return saved;
}

TensorView NsaLayer::compressed_view(const Saved& s, const attention::LocalBlocks& local) const {
  const std::int64_t batch = s.q.dim(0);
  return s.compressed.rows(0, 2 * batch * local.rows() * kv_heads_ * head_dim_)
      .reshape({2, batch, local.rows(), kv_heads_, head_dim_});
}

void NsaLayer::rotate(Context& ctx, const SequenceBatch& sequence, const TensorView& x, bool inverse) const {
  const std::int64_t rows = sequence.rows();
  ops::rope(ctx, {.x = x.reshape({rows, x.numel() / rows / head_dim_, head_dim_}),
                  .cos = sequence.cos,
                  .sin = sequence.sin,
                  .inverse = inverse});
}

// k [B, chunks · N, Hkv, D]: every block at the position of its first token.
void NsaLayer::rotate_blocks(Context& ctx, const SequenceBatch& sequence, const attention::LocalBlocks& local,
                             const TensorView& k, bool inverse) const {
  if (local.per_chunk == 0) return;
  const std::int64_t tokens = sequence.local_tokens(), chunk = sequence.layout->chunk();
  const std::int64_t table_rows = (local.per_chunk - 1) * shape_.stride + 1;
  for (std::int64_t b = 0; b < sequence.batch; ++b) {
    for (std::int64_t slot = 0; slot < local.chunks; ++slot) {
      const std::int64_t row = b * tokens + slot * chunk;
      ops::rope(ctx, {.x = k[b].rows(slot * local.per_chunk, local.per_chunk),
                      .cos = sequence.cos.rows(row, table_rows),
                      .sin = sequence.sin.rows(row, table_rows),
                      .inverse = inverse,
                      .table_stride = shape_.stride});
    }
  }
}

void NsaLayer::project(Context& ctx, const SequenceBatch& sequence, const TensorView& x, Saved& s) const {
  auto apply = [&](const Linear& linear, const TensorView& into) {
    linear.forward(ctx, x, into.reshape({sequence.rows(), into.numel() / sequence.rows()}));
  };
  apply(q_proj_, q_norm_ ? s.q_raw : s.q);
  if (q_norm_) q_norm_->forward(ctx, heads(s.q_raw), heads(s.q), s.q_norm);
  rotate(ctx, sequence, s.q, false);
  for (std::size_t i = 0; i < s.pairs.size(); ++i) {
    const Pair& p = s.pairs[i];
    const TensorView k = p.kv[0];
    apply(k_proj_[i], k_norm_ ? p.k_raw : k);
    apply(v_proj_[i], p.kv[1]);
    if (k_norm_) k_norm_->forward(ctx, heads(p.k_raw), heads(k), p.k_norm);
    if (s.plain_k.shape.rank()) ops::cast(ctx, {.x = k, .y = s.plain_k});
    const bool of_compression_only = !shared_ && i == kCompressed;
    if (!(of_compression_only && rope_after_)) rotate(ctx, sequence, k, false);
  }
  gate_.forward(ctx, x, s.logits);
}

namespace {

// Halos of compression's K and V: nothing on one rank, or where blocks do not overlap.
struct CompressionHalo {
  TensorView k, v;
  CompressionHalo(Context& ctx, const SequenceBatch& sequence, std::int64_t count, const TensorView& model,
                  DType dtype) {
    if (sequence.layout->ranks() == 1 || count == 0) return;
    for (auto* view : {&k, &v}) {
      *view = ctx.scratch->allocate("compression halo", dtype, {model.dim(0), 2, count, model.dim(2), model.dim(3)});
    }
  }
  explicit operator bool() const { return k.shape.rank() > 0; }
};

}  // namespace

void NsaLayer::compress(Context& ctx, const SequenceBatch& sequence, const Saved& s) const {
  const Arena::Scope scope(*ctx.scratch);
  const auto local = attention::local_blocks(shape_, *sequence.layout, sequence.mesh->coordinate("sequence"));
  const TensorView k = compression_k(s), v = pair(s, kCompressed).kv[1];
  const std::int64_t count = shape_.block - shape_.stride;
  const CompressionHalo halo(ctx, sequence, count, k, k.dtype);
  if (halo) attention::fetch_halo(ctx, sequence, attention::HaloSide::behind, count, k, v, halo.k, halo.v);
  const TensorView out = compressed_view(s, local);
  const Shape blocks{sequence.batch, local.chunks, local.per_chunk, kv_heads_, head_dim_};
  compress_k_.forward(ctx, local, k, halo.k, out[0].reshape(blocks));
  compress_v_.forward(ctx, local, v, halo.v, out[1].reshape(blocks));
  if (rope_after_) rotate_blocks(ctx, sequence, local, out[0], false);
}

// Adds to d_k and d_v [B, T, Hkv, D] (stat). d_compressed is overwritten.
void NsaLayer::compress_backward(Context& ctx, const SequenceBatch& sequence, const Saved& s,
                                 const TensorView& d_compressed, const TensorView& d_k, const TensorView& d_v) const {
  const Arena::Scope scope(*ctx.scratch);
  const auto local = attention::local_blocks(shape_, *sequence.layout, sequence.mesh->coordinate("sequence"));
  const TensorView k = compression_k(s), v = pair(s, kCompressed).kv[1];
  const std::int64_t count = shape_.block - shape_.stride;
  const CompressionHalo halo(ctx, sequence, count, k, k.dtype), d_halo(ctx, sequence, count, d_k, d_k.dtype);
  if (halo) {
    attention::fetch_halo(ctx, sequence, attention::HaloSide::behind, count, k, v, halo.k, halo.v);
    ops::fill(ctx, {.y = d_halo.k, .value = 0});
    ops::fill(ctx, {.y = d_halo.v, .value = 0});
  }
  if (rope_after_) rotate_blocks(ctx, sequence, local, d_compressed[0], true);
  const Shape blocks{sequence.batch, local.chunks, local.per_chunk, kv_heads_, head_dim_};
  compress_k_.backward(ctx, local, d_compressed[0].reshape(blocks), k, halo.k, d_k, d_halo.k);
  compress_v_.backward(ctx, local, d_compressed[1].reshape(blocks), v, halo.v, d_v, d_halo.v);
  if (halo) attention::return_halo(ctx, sequence, attention::HaloSide::behind, count, d_halo.k, d_halo.v, d_k, d_v);
}

void NsaLayer::forward(Context& ctx, const SequenceBatch& sequence, const TensorView& x, const TensorView& y,
                       AttentionLayer::Saved& saved_base, bool attention_kept) const {
  auto& s = static_cast<Saved&>(saved_base);
  project(ctx, sequence, x, s);
  if (!attention_kept) {
    compress(ctx, sequence, s);
    const auto local = attention::local_blocks(shape_, *sequence.layout, sequence.mesh->coordinate("sequence"));
    const bool pinned = pinned_.shape.rank() > 0;
    if (pinned) ops::cast(ctx, {.x = pinned_, .y = s.selected});
    attention::nsa_forward(ctx, sequence,
                           {.shape = shape_,
                            .q = s.q,
                            .compressed = compressed_view(s, local),
                            .kv_selected = pair(s, kSelected).kv,
                            .kv_window = pair(s, kWindow).kv,
                            .out = {s.out[0], s.out[1], s.out[2]},
                            .lse = {s.lse[0], s.lse[1], s.lse[2]},
                            .selected = s.selected,
                            .selection_given = pinned});
  }
  if (!y.shape.rank()) return;
  const Arena::Scope scope(*ctx.scratch);
  const TensorView out = ctx.scratch->allocate("gated attention", s.q.dtype, {sequence.rows(), heads_, head_dim_});
  gate(ctx, s, out);
  o_proj_.forward(ctx, out.reshape({sequence.rows(), heads_ * head_dim_}), y);
}

void NsaLayer::gate(Context& ctx, const Saved& s, const TensorView& out) const {
  const Shape shape{s.logits.dim(0), heads_, head_dim_};
  ops::gate_forward(ctx, {.logits = s.logits,
                          .o = {s.out[0].reshape(shape), s.out[1].reshape(shape), s.out[2].reshape(shape)},
                          .out = out});
}

void NsaLayer::backward(Context& ctx, const SequenceBatch& sequence, const TensorView& d_y, const TensorView& x,
                        const AttentionLayer::Saved& saved_base, const TensorView& d_x) const {
  const auto& s = static_cast<const Saved&>(saved_base);
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t rows = sequence.rows();
  const DType dtype = s.q.dtype, stat = stat_type(dtype);
  const Shape by_head{rows, heads_, head_dim_};
  auto scratch = [&](const char* name, DType type, const Shape& shape) {
    return ctx.scratch->allocate(name, type, shape);
  };
  const Gradients g{.q = scratch("d_q", stat, s.q.shape),
                    .kv = {scratch("d_kv compressed", stat, pair(s, kCompressed).kv.shape),
                           scratch("d_kv selected", stat, pair(s, kSelected).kv.shape),
                           scratch("d_kv window", stat, pair(s, kWindow).kv.shape)}};
  {
    const Arena::Scope branches(*ctx.scratch);
    const TensorView d_out = scratch("d_attention", dtype, by_head), out = scratch("gated attention", dtype, by_head);
    const TensorView d_logits = scratch("d_gate", dtype, s.logits.shape);
    TensorView d_branch[kNumBranches];
    for (auto& d : d_branch) d = scratch("d_branch", dtype, s.q.shape);
    gate(ctx, s, out);
    o_proj_.backward(ctx, d_y, out.reshape({rows, heads_ * head_dim_}), d_out.reshape({rows, heads_ * head_dim_}),
                     GradMode::overwrite);
    ops::gate_backward(
        ctx, {.d_out = d_out,
              .logits = s.logits,
              .o = {s.out[0].reshape(by_head), s.out[1].reshape(by_head), s.out[2].reshape(by_head)},
              .d_logits = d_logits,
              .d_o = {d_branch[0].reshape(by_head), d_branch[1].reshape(by_head), d_branch[2].reshape(by_head)}});
    gate_.backward(ctx, d_logits, x, d_x, GradMode::overwrite);
    attend_backward(ctx, sequence, s, d_branch, g);
  }
  project_backward(ctx, sequence, s, x, g, d_x);
}

void NsaLayer::attend_backward(Context& ctx, const SequenceBatch& sequence, const Saved& s,
                               const TensorView (&d_out)[3], const Gradients& g) const {
  const auto local = attention::local_blocks(shape_, *sequence.layout, sequence.mesh->coordinate("sequence"));
  const TensorView compressed = compressed_view(s, local);
  const TensorView d_compressed = ctx.scratch->allocate("d_compressed", g.q.dtype, compressed.shape);
  attention::nsa_backward(ctx, sequence,
                          {.shape = shape_,
                           .q = s.q,
                           .compressed = compressed,
                           .kv_selected = pair(s, kSelected).kv,
                           .kv_window = pair(s, kWindow).kv,
                           .out = {s.out[0], s.out[1], s.out[2]},
                           .lse = {s.lse[0], s.lse[1], s.lse[2]},
                           .selected = s.selected,
                           .d_out = {d_out[0], d_out[1], d_out[2]},
                           .d_q = g.q,
                           .d_compressed = d_compressed,
                           .d_kv_selected = g.kv[kSelected],
                           .d_kv_window = g.kv[kWindow]});
  const TensorView& d_kv = g.kv[kCompressed];
  ops::fill(ctx, {.y = d_kv, .value = 0});
  compress_backward(ctx, sequence, s, d_compressed, d_kv[0], d_kv[1]);
}

// From gradients of what the branches read to gradients of what was projected, in kv[0] where all share one pair.
void NsaLayer::join_pairs(Context& ctx, const SequenceBatch& sequence, const Gradients& g) const {
  if (!shared_) {
    if (!rope_after_) rotate(ctx, sequence, g.kv[kCompressed][0], true);
    rotate(ctx, sequence, g.kv[kSelected][0], true);
    rotate(ctx, sequence, g.kv[kWindow][0], true);
    return;
  }
  const TensorView &sum = g.kv[kCompressed], &rotated = g.kv[kSelected];
  ops::add(ctx, {.a = rotated, .b = g.kv[kWindow], .y = rotated});
  if (rope_after_) rotate(ctx, sequence, rotated[0], true);
  ops::add(ctx, {.a = sum, .b = rotated, .y = sum});
  if (!rope_after_) rotate(ctx, sequence, sum[0], true);
}

void NsaLayer::project_backward(Context& ctx, const SequenceBatch& sequence, const Saved& s, const TensorView& x,
                                const Gradients& g, const TensorView& d_x) const {
  const DType dtype = s.q.dtype;
  auto matrix = [&](const TensorView& t) { return t.reshape({sequence.rows(), t.numel() / sequence.rows()}); };
  rotate(ctx, sequence, g.q, true);
  join_pairs(ctx, sequence, g);
  const TensorView g_q = in_working_type(ctx, "d_q, working type", g.q, dtype);
  if (q_norm_) q_norm_->backward(ctx, heads(g_q), heads(s.q_raw), s.q_norm, heads(g_q), GradMode::overwrite);
  q_proj_.backward(ctx, matrix(g_q), x, d_x, GradMode::accumulate);
  for (std::size_t i = 0; i < s.pairs.size(); ++i) {
    const Arena::Scope scope(*ctx.scratch);
    const Pair& p = s.pairs[i];
    const TensorView g_kv = in_working_type(ctx, "d_kv, working type", g.kv[i], dtype);
    const TensorView g_k = g_kv[0];
    if (k_norm_) k_norm_->backward(ctx, heads(g_k), heads(p.k_raw), p.k_norm, heads(g_k), GradMode::overwrite);
    k_proj_[i].backward(ctx, matrix(g_k), x, d_x, GradMode::accumulate);
    v_proj_[i].backward(ctx, matrix(g_kv[1]), x, d_x, GradMode::accumulate);
  }
}

void NsaLayer::visit_parameters(const ParameterVisitor& visit) {
  q_proj_.visit_parameters(visit);
  for (std::size_t i = 0; i < k_proj_.size(); ++i) {
    k_proj_[i].visit_parameters(visit);
    v_proj_[i].visit_parameters(visit);
  }
  if (q_norm_) {
    q_norm_->visit_parameters(visit);
    k_norm_->visit_parameters(visit);
  }
  compress_k_.visit_parameters(visit);
  compress_v_.visit_parameters(visit);
  gate_.visit_parameters(visit);
  o_proj_.visit_parameters(visit);
}

AttentionLayer::View NsaLayer::view(const AttentionLayer::Saved& saved_base) const {
  const auto& s = static_cast<const Saved&>(saved_base);
  return {.selected = s.selected, .gate_logits = s.logits};
}

double NsaLayer::attention_flops(std::int64_t tokens) const {
  // Visible (query, key) pairs of the branches, of one document; scores are counted as the compressed attention's.
  const double s = static_cast<double>(tokens), d = static_cast<double>(shape_.stride);
  auto capped = [s](std::int64_t keys) {  // Σ_t min(t + 1, keys)
    const double w = std::min(static_cast<double>(keys), s);
    return w * (w + 1) / 2 + (s - w) * w;
  };
  const double blocks = static_cast<double>(shape_.num_blocks(tokens));  // block i is seen by tokens − (i·d + l − 1)
  const double compressed = blocks * (s - static_cast<double>(shape_.block) + 1) - d * blocks * (blocks - 1) / 2;
  const double pairs = compressed + capped(shape_.select_count * shape_.select_block) + capped(shape_.window);
  return 4 * pairs * static_cast<double>(heads_ * head_dim_);
}

std::unique_ptr<AttentionLayer> make_nsa_layer(const std::string& name, const ModelConfig& config) {
  return std::make_unique<NsaLayer>(name, config);
}

}  // namespace annulus::model
