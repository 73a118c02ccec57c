#include "model/transformer.h"

#include <algorithm>

#include "core/device_memory.h"

namespace annulus::model {
namespace {

constexpr std::int64_t kHeadChunkBytes = std::int64_t{64} << 20;  // of logits held at once

}  // namespace

Transformer::Transformer(const ModelConfig& c)
    : config_(c),
      embedding_{.name = "model.embed_tokens.weight", .shape = {c.vocab_size, c.hidden_size}},
      norm_("model.norm", c.hidden_size, c.rms_norm_eps),
      head_{.name = "lm_head.weight", .shape = {c.vocab_size, c.hidden_size}} {
  blocks_.reserve(static_cast<std::size_t>(c.num_hidden_layers));
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) blocks_.emplace_back(c, i);
}

void Transformer::visit_parameters(const ParameterVisitor& visit) {
  visit(embedding_);
  for (auto& block : blocks_) block.visit_parameters(visit);
  norm_.visit_parameters(visit);
  if (!config_.tie_word_embeddings) visit(head_);
}

std::int64_t Transformer::num_parameters() {
  std::int64_t n = 0;
  visit_parameters([&](Parameter& p) { n += p.shape.numel(); });
  return n;
}

void Transformer::allocate_common(Arena& arena, const ModelSizes& sizes) {
  sizes_ = sizes;
  saved_.clear();
  const std::int64_t rows = sizes.batch * sizes.local_tokens, half = config_.head_dim / 2;
  const DType stat = stat_type(sizes.dtype);
  inv_freq_ = arena.allocate("rope frequencies", stat, {half});
  cos_ = arena.allocate("rope cos", stat, {rows, half});
  sin_ = arena.allocate("rope sin", stat, {rows, half});
  last_x_ = arena.allocate("last block output", sizes.dtype, {rows, config_.hidden_size});
}

void Transformer::allocate_training(Arena& arena, const ModelSizes& sizes, Recompute policy) {
  allocate_common(arena, sizes);
  policy_ = policy;
  if (policy == Recompute::none) {
    for (auto& b : blocks_)
      saved_.push_back(b.allocate_saved(arena, arena, policy, sizes.dtype, sizes.batch, sizes.local_tokens));
    return;
  }
  // Recomputed fields of all blocks use the same memory in turn: a block is allocated to learn the size, then each
  // block's shared part is placed over it.
  Arena probe("probe", arena.device());
  Arena discard("kept part", arena.device());
  for (auto& b : blocks_) {
    const Arena::Scope scope(probe);
    (void)b.allocate_saved(discard, probe, policy, sizes.dtype, sizes.batch, sizes.local_tokens);
  }
  const TensorView region = arena.allocate("recomputed", DType::u8, {probe.planned_bytes()});
  for (auto& b : blocks_) {
    Arena shared("recomputed", arena.device(), {[&](std::int64_t) { return region.data; }, [](void*) {}});
    (void)b.allocate_saved(discard, shared, policy, sizes.dtype, sizes.batch, sizes.local_tokens);
    if (arena.committed()) shared.commit();
    saved_.push_back(b.allocate_saved(arena, shared, policy, sizes.dtype, sizes.batch, sizes.local_tokens));
  }
}

void Transformer::allocate_evaluation(Arena& arena, const ModelSizes& sizes) {
  allocate_common(arena, sizes);
  const Shape hidden{sizes.batch * sizes.local_tokens, config_.hidden_size};
  const TensorView x[2] = {arena.allocate("block input 0", sizes.dtype, hidden),
                           arena.allocate("block input 1", sizes.dtype, hidden)};
  // Blocks use the same memory in turn: nothing of one is needed after its forward.
  const std::int64_t begin = arena.used();
  std::int64_t most = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Arena::Scope scope(arena);
    saved_.push_back(
        blocks_[i].allocate_saved(arena, arena, Recompute::none, sizes.dtype, sizes.batch, sizes.local_tokens));
    saved_.back().x = x[i % 2];
    most = std::max(most, arena.used() - begin);
  }
  (void)arena.allocate("blocks in turn", DType::u8, {most});  // kept from what is allocated next
}

void Transformer::upload_constants(Context& ctx) {
  const RopeFrequencies rope = rope_frequencies(config_);
  std::vector<double> values = rope.inv_freq;
  if (inv_freq_.dtype == DType::f64) {
    copy(ctx, host_view(values.data(), inv_freq_.shape), inv_freq_);
  } else {
    std::vector<float> rounded(values.begin(), values.end());
    copy(ctx, host_view(rounded.data(), inv_freq_.shape), inv_freq_);
    synchronize(ctx);
  }
}

void Transformer::rope_tables(Context& ctx, MicroBatch& batch) const {
  ops::rope_table(ctx, {.position = batch.position,
                        .inv_freq = inv_freq_,
                        .cos = cos_,
                        .sin = sin_,
                        .magnitude = rope_frequencies(config_).magnitude});
  batch.sequence.cos = cos_;
  batch.sequence.sin = sin_;
}

void Transformer::forward_blocks(Context& ctx, const MicroBatch& in) {
  MicroBatch batch = in;
  ctx.at(Phase::forward);
  rope_tables(ctx, batch);
  ops::embedding_forward(ctx, {.token = batch.token, .w = Weight(ctx, embedding_), .y = saved_[0].x});
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].forward(ctx, batch.sequence, saved_[i], i + 1 < blocks_.size() ? saved_[i + 1].x : last_x_);
    if (on_attention_) on_attention_(ctx, static_cast<std::int64_t>(i), blocks_[i].attention_view(saved_[i]));
  }
}

TensorView Transformer::final_norm(Context& ctx, const TensorView& rstd) {
  const TensorView n = ctx.scratch->allocate("final norm", last_x_.dtype, last_x_.shape);
  norm_.forward(ctx, last_x_, n, {rstd});
  return n;
}

std::int64_t Transformer::head_chunk(std::int64_t rows) const {
  const std::int64_t row_bytes = config_.vocab_size * static_cast<std::int64_t>(size_of(sizes_.dtype));
  return std::min(rows, std::max<std::int64_t>(64, kHeadChunkBytes / row_bytes / 64 * 64));
}

void Transformer::forward_backward(Context& ctx, const MicroBatch& in, double scale, const TensorView& loss_sum) {
  forward_blocks(ctx, in);
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t rows = last_x_.dim(0), chunk = head_chunk(rows);
  const DType dtype = sizes_.dtype, stat = stat_type(dtype);
  const TensorView rstd = ctx.scratch->allocate("final rstd", stat, {rows});
  const TensorView d_x = ctx.scratch->allocate("d_x", dtype, last_x_.shape);
  {
    const Arena::Scope head_scope(*ctx.scratch);
    ctx.at(Phase::loss);
    const TensorView n = final_norm(ctx, rstd);
    const TensorView losses = ctx.scratch->allocate("losses", stat, {rows});
    const TensorView logits = ctx.scratch->allocate("logits", dtype, {chunk, config_.vocab_size});
    const Weight w(ctx, head());
    for (std::int64_t row = 0; row < rows; row += chunk) {
      const std::int64_t count = std::min(chunk, rows - row);
      const TensorView part = n.rows(row, count), z = logits.rows(0, count);
      ops::matmul(ctx, {.a = part, .b = w, .c = z, .transpose_b = true});
      ops::cross_entropy(
          ctx, {.logits = z, .target = in.target.rows(row, count), .loss = losses.rows(row, count), .scale = scale});
      ops::matmul(ctx, {.a = z, .b = part, .c = head().gradient, .transpose_a = true, .mode = GradMode::accumulate});
      ops::matmul(ctx, {.a = z, .b = w, .c = part});  // the chunk's gradient takes the place of its input
    }
    ops::sum(ctx, {.x = losses, .result = loss_sum, .mode = GradMode::accumulate});
    norm_.backward(ctx, n, last_x_, {rstd}, d_x, GradMode::overwrite);
  }
  MicroBatch batch = in;
  batch.sequence.cos = cos_;
  batch.sequence.sin = sin_;
  for (std::size_t i = blocks_.size(); i-- > 0;) blocks_[i].backward(ctx, batch.sequence, saved_[i], policy_, d_x);
  ctx.at(Phase::backward);
  ops::embedding_backward(ctx, {.token = in.token, .d_y = d_x, .d_w = embedding_.gradient});
}

void Transformer::forward_losses(Context& ctx, const MicroBatch& in, const TensorView& losses,
                                 const TensorView& correct) {
  forward_blocks(ctx, in);
  const Arena::Scope scope(*ctx.scratch);
  ctx.at(Phase::loss);
  const std::int64_t rows = last_x_.dim(0), chunk = head_chunk(rows);
  const TensorView n = final_norm(ctx, ctx.scratch->allocate("final rstd", stat_type(sizes_.dtype), {rows}));
  const TensorView logits = ctx.scratch->allocate("logits", sizes_.dtype, {chunk, config_.vocab_size});
  const Weight w(ctx, head());
  for (std::int64_t row = 0; row < rows; row += chunk) {
    const std::int64_t count = std::min(chunk, rows - row);
    const TensorView z = logits.rows(0, count);
    ops::matmul(ctx, {.a = n.rows(row, count), .b = w, .c = z, .transpose_b = true});
    ops::cross_entropy(ctx, {.logits = z,
                             .target = in.target.rows(row, count),
                             .loss = losses.rows(row, count),
                             .correct = correct.rows(row, count),
                             .scale = 1,
                             .gradient = false});
  }
}

void Transformer::forward_logits(Context& ctx, const MicroBatch& in, const TensorView& logits) {
  forward_blocks(ctx, in);
  const Arena::Scope scope(*ctx.scratch);
  const TensorView n = final_norm(ctx, ctx.scratch->allocate("final rstd", stat_type(sizes_.dtype), {last_x_.dim(0)}));
  ops::matmul(ctx, {.a = n, .b = Weight(ctx, head()), .c = logits, .transpose_b = true});
}

Transformer::Cache Transformer::allocate_cache(Arena& kv, Arena& activations, const CacheSizes& sizes) const {
  Cache cache;
  cache.sizes = sizes;
  const std::int64_t half = config_.head_dim / 2;
  const DType stat = stat_type(sizes.dtype);
  for (const auto& block : blocks_) cache.layers.push_back(block.allocate_cache(kv, sizes));
  cache.cos = activations.allocate("rope cos", stat, {sizes.capacity, half});
  cache.sin = activations.allocate("rope sin", stat, {sizes.capacity, half});
  cache.position = activations.allocate("positions", DType::i32, {sizes.capacity});
  cache.window_first = activations.allocate("first visible token", DType::i32, {sizes.capacity});
  cache.token = activations.allocate("tokens", DType::i32, {sizes.max_rows});
  cache.start = activations.allocate("document start", DType::i32, {sizes.max_rows});  // arenas are zero-filled
  cache.x = activations.allocate("block input", sizes.dtype, {sizes.max_rows, config_.hidden_size});
  cache.logits = activations.allocate("logits", sizes.dtype, {1, config_.vocab_size});
  if (config_.has_nsa()) {
    cache.selected = activations.allocate("selected blocks", DType::i32,
                                          {sizes.max_rows, config_.num_key_value_heads, config_.nsa.select_count});
  }
  return cache;
}

void Transformer::fill_cache_tables(Context& ctx, Cache& cache) const {
  std::vector<std::int32_t> position, first;
  for (std::int64_t t = 0; t < cache.sizes.capacity; ++t) {
    position.push_back(static_cast<std::int32_t>(t));
    const std::int64_t window = config_.sliding_window;
    first.push_back(static_cast<std::int32_t>(window > 0 ? std::max<std::int64_t>(0, t - window + 1) : 0));
  }
  copy(ctx, host_view(position.data(), {cache.sizes.capacity}), cache.position);
  copy(ctx, host_view(first.data(), {cache.sizes.capacity}), cache.window_first);
  ops::rope_table(ctx, {.position = cache.position,
                        .inv_freq = inv_freq_,
                        .cos = cache.cos,
                        .sin = cache.sin,
                        .magnitude = rope_frequencies(config_).magnitude});
  synchronize(ctx);
}

TensorView Transformer::forward_cached(Context& ctx, Cache& cache, std::span<const std::int32_t> tokens) {
  const auto rows = static_cast<std::int64_t>(tokens.size());
  ANNULUS_CHECK(rows >= 1 && rows <= cache.sizes.max_rows, "{} tokens are appended at once; at most {}", rows,
                cache.sizes.max_rows);
  ANNULUS_CHECK(cache.length + rows <= cache.sizes.capacity, "{} tokens behind {} of a cache for {}", rows,
                cache.length, cache.sizes.capacity);
  ctx.at(Phase::forward);
  CachedRows in{.position = cache.length,
                .token = cache.position.rows(cache.length, rows).reshape({1, rows}),
                .start = cache.start.rows(0, rows).reshape({1, rows}),
                .window_first = cache.window_first.rows(cache.length, rows).reshape({1, rows}),
                .table_cos = cache.cos,
                .table_sin = cache.sin,
                .selected = {}};
  if (cache.selected.shape.rank()) {
    const TensorView selected = cache.selected.rows(0, rows);
    in.selected = selected.reshape({1, rows, selected.dim(1), selected.dim(2)});
  }
  const TensorView token = cache.token.rows(0, rows), x = cache.x.rows(0, rows);
  copy(ctx, host_view(const_cast<std::int32_t*>(tokens.data()), {rows}), token);
  ops::embedding_forward(ctx, {.token = token, .w = Weight(ctx, embedding_), .y = x});
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const AttentionLayer::View view = blocks_[i].forward_cached(ctx, in, x, *cache.layers[i]);
    if (on_attention_) on_attention_(ctx, static_cast<std::int64_t>(i), view);
  }
  cache.length += rows;
  const Arena::Scope scope(*ctx.scratch);
  const TensorView last = x.rows(rows - 1, 1);
  const TensorView norm = ctx.scratch->allocate("final norm", x.dtype, last.shape);
  norm_.forward(ctx, last, norm, {ctx.scratch->allocate("final rstd", stat_type(x.dtype), {1})});
  ops::matmul(ctx, {.a = norm, .b = Weight(ctx, head()), .c = cache.logits, .transpose_b = true});
  return cache.logits;
}

double Transformer::training_flops(std::int64_t tokens, bool as_dense) {
  double matrices = 0;  // an untied embedding is a gather
  visit_parameters([&](Parameter& p) {
    if (p.shape.rank() == 2 && (&p != &embedding_ || config_.tie_word_embeddings)) {
      matrices += static_cast<double>(p.shape.numel()) * p.uses_per_token;
    }
  });
  double attention = 0;
  const double causal = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const bool dense_instead = as_dense && config_.kind(i) != AttentionKind::dense;
    attention += dense_instead ? 4 * causal * static_cast<double>(config_.num_attention_heads * config_.head_dim)
                               : blocks_[static_cast<std::size_t>(i)].attention_flops(tokens);
  }
  return 6 * matrices * static_cast<double>(tokens) + 3.5 * attention;
}

}  // namespace annulus::model
