#include "model/block.h"

namespace annulus::model {
namespace {

class ArenaAllocator : public SavedAllocator {
 public:
  ArenaAllocator(Arena& kept, Arena& shared, Recompute policy)
      : activations_(policy == Recompute::none ? kept : shared),
        attention_(policy == Recompute::block ? shared : kept) {}
  TensorView keep(const char* name, DType dtype, const Shape& shape) override {
    return activations_.allocate(name, dtype, shape);
  }
  TensorView attention(const char* name, DType dtype, const Shape& shape) override {
    return attention_.allocate(name, dtype, shape);
  }

 private:
  Arena& activations_;
  Arena& attention_;
};

}  // namespace

Recompute parse_recompute(const std::string& name) {
  if (name == "none") return Recompute::none;
  if (name == "keep_attention") return Recompute::keep_attention;
  if (name == "block") return Recompute::block;
  throw ConfigError(fmt::format("train.recompute = \"{}\"; expected none, keep_attention or block", name));
}

Block::Block(const ModelConfig& c, std::int64_t layer)
    : layer_(static_cast<int>(layer)),
      hidden_size_(c.hidden_size),
      intermediate_size_(c.intermediate_size),
      norm1_("model.layers." + std::to_string(layer) + ".input_layernorm", c.hidden_size, c.rms_norm_eps),
      attention_(make_attention_layer(c, layer)),
      norm2_("model.layers." + std::to_string(layer) + ".post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
      mlp_("model.layers." + std::to_string(layer) + ".mlp", c) {}

Block::Saved Block::allocate_saved(Arena& kept, Arena& shared, Recompute policy, DType dtype, std::int64_t batch,
                                   std::int64_t local_tokens) const {
  const std::int64_t rows = batch * local_tokens;
  const Shape hidden{rows, hidden_size_}, inner{rows, intermediate_size_};
  ArenaAllocator allocator(kept, shared, policy);
  Saved s;
  s.x = kept.allocate("block input", dtype, hidden);
  s.norm1 = allocator.keep("norm 1", dtype, hidden);
  s.rstd1.rstd = allocator.keep("norm 1 rstd", stat_type(dtype), {rows});
  s.attention = attention_->allocate_saved(allocator, dtype, batch, local_tokens);
  s.x_mid = allocator.keep("after attention", dtype, hidden);
  s.norm2 = allocator.keep("norm 2", dtype, hidden);
  s.rstd2.rstd = allocator.keep("norm 2 rstd", stat_type(dtype), {rows});
  s.mlp.gate = allocator.keep("mlp gate", dtype, inner);
  s.mlp.up = allocator.keep("mlp up", dtype, inner);
  s.mlp.act = allocator.keep("mlp act", dtype, inner);
  return s;
}

void Block::fill_saved(Context& ctx, const SequenceBatch& sequence, Saved& s, const TensorView& y,
                       bool attention_kept) const {
  norm1_.forward(ctx, s.x, s.norm1, s.rstd1);
  attention_->forward(ctx, sequence, s.norm1, s.x_mid, *s.attention, attention_kept);
  ops::add(ctx, {.a = s.x, .b = s.x_mid, .y = s.x_mid});
  norm2_.forward(ctx, s.x_mid, s.norm2, s.rstd2);
  mlp_.forward(ctx, s.norm2, y, s.mlp);
  if (y.shape.rank()) ops::add(ctx, {.a = s.x_mid, .b = y, .y = y});
}

void Block::forward(Context& ctx, const SequenceBatch& sequence, Saved& saved, const TensorView& y) const {
  ctx.at(Phase::forward, layer_);
  fill_saved(ctx, sequence, saved, y, false);
}

void Block::backward(Context& ctx, const SequenceBatch& sequence, Saved& s, Recompute policy,
                     const TensorView& d_x) const {
  ctx.at(Phase::backward, layer_);
  if (policy != Recompute::none) fill_saved(ctx, sequence, s, {}, policy == Recompute::keep_attention);
  const Arena::Scope scope(*ctx.scratch);
  const TensorView d_norm = ctx.scratch->allocate("d_norm", d_x.dtype, d_x.shape);
  mlp_.backward(ctx, d_x, s.norm2, s.mlp, d_norm);
  norm2_.backward(ctx, d_norm, s.x_mid, s.rstd2, d_x, GradMode::accumulate);
  attention_->backward(ctx, sequence, d_x, s.norm1, *s.attention, d_norm);
  norm1_.backward(ctx, d_norm, s.x, s.rstd1, d_x, GradMode::accumulate);
}

AttentionLayer::View Block::forward_cached(Context& ctx, const CachedRows& in, const TensorView& x,
                                           AttentionLayer::Cache& cache) const {
  ctx.at(Phase::forward, layer_);
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t rows = in.count();
  const TensorView norm = ctx.scratch->allocate("norm", x.dtype, x.shape);
  const TensorView delta = ctx.scratch->allocate("sublayer output", x.dtype, x.shape);
  const RmsNorm::Saved rstd{ctx.scratch->allocate("norm rstd", stat_type(x.dtype), {rows})};
  norm1_.forward(ctx, x, norm, rstd);
  const AttentionLayer::View view = attention_->forward_cached(ctx, in, norm, delta, cache);
  ops::add(ctx, {.a = x, .b = delta, .y = x});
  norm2_.forward(ctx, x, norm, rstd);
  auto inner = [&](const char* name) { return ctx.scratch->allocate(name, x.dtype, {rows, intermediate_size_}); };
  mlp_.forward(ctx, norm, delta, {.gate = inner("mlp gate"), .up = inner("mlp up"), .act = inner("mlp act")});
  ops::add(ctx, {.a = x, .b = delta, .y = x});
  return view;
}

void Block::visit_parameters(const ParameterVisitor& visit) {
  norm1_.visit_parameters(visit);
  attention_->visit_parameters(visit);
  norm2_.visit_parameters(visit);
  mlp_.visit_parameters(visit);
}

}  // namespace annulus::model
