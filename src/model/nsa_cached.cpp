// Generation with native sparse attention: what NsaLayer keeps of a sequence, and a pass over its new tokens.
#include "attention/nsa_cached.h"

#include "core/device_memory.h"
#include "model/nsa_layer.h"

namespace annulus::model {

using attention::kCompressed;
using attention::kNumBranches;
using attention::kSelected;

std::unique_ptr<AttentionLayer::Cache> NsaLayer::allocate_cache(Arena& arena, const CacheSizes& sizes) const {
  auto cache = std::make_unique<Cache>();
  cache->all = RowCache(arena, "kv cache", sizes, 0, kv_heads_, head_dim_);
  if (!shared_) cache->window = RowCache(arena, "window kv cache", sizes, shape_.window, kv_heads_, head_dim_);
  // A block that is not full covers fewer than l tokens: what a window of l keeps.
  if (!compresses_all()) cache->open = RowCache(arena, "open blocks", sizes, shape_.block, kv_heads_, head_dim_);
  cache->compressed =
      arena.allocate("compressed kv cache", sizes.dtype, {2, shape_.num_blocks(sizes.capacity), kv_heads_, head_dim_});
  return cache;
}

void NsaLayer::project_cached(Context& ctx, const CachedRows& in, const TensorView& x, Cache& cache) const {
  const std::int64_t rows = in.count();
  auto rotate_rows = [&](const TensorView& k) { ops::rope(ctx, {.x = k, .cos = in.cos(), .sin = in.sin()}); };
  for (std::size_t i = 0; i < k_proj_.size(); ++i) {
    const Arena::Scope scope(*ctx.scratch);
    const bool of_compression_only = !shared_ && i == kCompressed;
    RowCache& to = of_compression_only ? cache.open : shared_ || i == kSelected ? cache.all : cache.window;
    to.append(ctx, in.position, rows);
    const TensorView k = to.fresh_k(), v = to.fresh_v();  // [T, Hkv, D]
    const TensorView raw = k_norm_ ? ctx.scratch->allocate("k before norm", k.dtype, k.shape) : k;
    k_proj_[i].forward(ctx, x, raw.reshape({rows, kv_heads_ * head_dim_}));
    v_proj_[i].forward(ctx, x, v.reshape({rows, kv_heads_ * head_dim_}));
    if (k_norm_) {
      k_norm_->forward(ctx, heads(raw), heads(k),
                       {ctx.scratch->allocate("k rstd", stat_type(k.dtype), {rows * kv_heads_})});
    }
    if (shared_ && rope_after_) {  // compression reads K before RoPE
      cache.open.append(ctx, in.position, rows);
      copy(ctx, k, cache.open.fresh_k());
      copy(ctx, v, cache.open.fresh_v());
    }
    if (!(of_compression_only && rope_after_)) rotate_rows(k);
  }
}

// The blocks that the new tokens fill.
void NsaLayer::compress_cached(Context& ctx, const CachedRows& in, Cache& cache) const {
  const std::int64_t before = shape_.num_blocks(in.position);
  const std::int64_t filled = shape_.num_blocks(in.position + in.count()) - before;
  if (filled == 0) return;
  const RowCache& from = compresses_all() ? cache.all : cache.open;
  const std::int64_t first = before * shape_.stride - from.begin();
  const std::int64_t covered = (filled - 1) * shape_.stride + shape_.block;
  const attention::LocalBlocks blocks{
      .block = shape_.block, .stride = shape_.stride, .per_chunk = filled, .num_blocks = {filled, 0}};
  const Shape shape{1, 1, filled, kv_heads_, head_dim_};
  const TensorView k = cache.compressed[0].rows(before, filled), v = cache.compressed[1].rows(before, filled);
  compress_k_.forward(ctx, blocks, from.rows(0, first, covered), {}, k.reshape(shape));
  compress_v_.forward(ctx, blocks, from.rows(1, first, covered), {}, v.reshape(shape));
  if (!rope_after_) return;
  const std::int64_t table_rows = (filled - 1) * shape_.stride + 1;  // every block at the position of its first token
  ops::rope(ctx, {.x = k,
                  .cos = in.table_cos.rows(before * shape_.stride, table_rows),
                  .sin = in.table_sin.rows(before * shape_.stride, table_rows),
                  .table_stride = shape_.stride});
}

AttentionLayer::View NsaLayer::forward_cached(Context& ctx, const CachedRows& in, const TensorView& x,
                                              const TensorView& y, AttentionLayer::Cache& cache_base) const {
  auto& cache = static_cast<Cache&>(cache_base);
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t rows = in.count();
  const DType dtype = x.dtype;
  const Shape q_shape{1, rows, heads_, head_dim_}, by_head{rows, heads_, head_dim_};
  auto scratch = [&](const char* name, const Shape& shape) { return ctx.scratch->allocate(name, dtype, shape); };
  const TensorView q = scratch("q", q_shape);
  {
    const Arena::Scope norm(*ctx.scratch);
    const TensorView raw = q_norm_ ? scratch("q before norm", q_shape) : q;
    q_proj_.forward(ctx, x, raw.reshape({rows, heads_ * head_dim_}));
    if (q_norm_) {
      q_norm_->forward(ctx, heads(raw), heads(q), {ctx.scratch->allocate("q rstd", stat_type(dtype), {rows * heads_})});
    }
  }
  ops::rope(ctx, {.x = q.reshape(by_head), .cos = in.cos(), .sin = in.sin()});
  project_cached(ctx, in, x, cache);
  compress_cached(ctx, in, cache);
  const std::int64_t blocks = shape_.num_blocks(in.position + rows);
  const Shape compressed{1, blocks, kv_heads_, head_dim_};
  const RowCache& window = shared_ ? cache.all : cache.window;
  const TensorView out[kNumBranches] = {scratch("branch out", q_shape), scratch("branch out", q_shape),
                                        scratch("branch out", q_shape)};
  attention::nsa_cached_forward(ctx, {.shape = shape_,
                                      .position = in.position,
                                      .q = q,
                                      .token = in.token,
                                      .start = in.start,
                                      .compressed_k = cache.compressed[0].rows(0, blocks).reshape(compressed),
                                      .compressed_v = cache.compressed[1].rows(0, blocks).reshape(compressed),
                                      .k = cache.all.k(),
                                      .v = cache.all.v(),
                                      .window_k = window.k(),
                                      .window_v = window.v(),
                                      .window_begin = window.begin(),
                                      .out = {out[0], out[1], out[2]},
                                      .selected = in.selected});
  const TensorView logits = scratch("gate logits", {rows, kNumBranches * heads_});
  gate_.forward(ctx, x, logits);
  const TensorView gated = scratch("gated attention", by_head);
  ops::gate_forward(ctx, {.logits = logits,
                          .o = {out[0].reshape(by_head), out[1].reshape(by_head), out[2].reshape(by_head)},
                          .out = gated});
  o_proj_.forward(ctx, gated.reshape({rows, heads_ * head_dim_}), y);
  return {.selected = in.selected, .gate_logits = {}};
}

}  // namespace annulus::model
