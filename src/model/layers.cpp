#include "model/layers.h"

namespace annulus::model {

TensorView in_working_type(Context& ctx, const char* name, const TensorView& t, DType working) {
  if (t.dtype == working) return t;
  const TensorView y = ctx.scratch->allocate(name, working, t.shape);
  ops::cast(ctx, {.x = t, .y = y});
  return y;
}

Linear::Linear(const std::string& name, std::int64_t in, std::int64_t out, bool bias, Init init)
    : weight_{.name = name + ".weight", .shape = {out, in}, .init = init} {
  if (bias) bias_ = {.name = name + ".bias", .shape = {out}, .init = Init::zeros};
}

void Linear::forward(Context& ctx, const TensorView& x, const TensorView& y) const {
  ops::matmul(ctx, {.a = x, .b = Weight(ctx, weight_), .c = y, .transpose_b = true});
  if (!bias_.name.empty()) ops::add_bias(ctx, {.x = y, .bias = Weight(ctx, bias_)});
}

void Linear::backward(Context& ctx, const TensorView& d_y, const TensorView& x, const TensorView& d_x,
                      GradMode mode) const {
  ops::matmul(ctx, {.a = d_y, .b = Weight(ctx, weight_), .c = d_x, .mode = mode});
  ops::matmul(ctx, {.a = d_y, .b = x, .c = weight_.gradient, .transpose_a = true, .mode = GradMode::accumulate});
  if (!bias_.name.empty()) ops::add_bias_backward(ctx, {.d_y = d_y, .d_bias = bias_.gradient});
}

void Linear::visit_parameters(const ParameterVisitor& visit) {
  visit(weight_);
  if (!bias_.name.empty()) visit(bias_);
}

RmsNorm::RmsNorm(const std::string& name, std::int64_t size, double eps)
    : weight_{.name = name + ".weight", .shape = {size}, .init = Init::ones}, eps_(eps) {}

void RmsNorm::forward(Context& ctx, const TensorView& x, const TensorView& y, const Saved& saved) const {
  ops::rms_norm_forward(ctx, {.x = x, .w = Weight(ctx, weight_), .y = y, .rstd = saved.rstd, .eps = eps_});
}

void RmsNorm::backward(Context& ctx, const TensorView& d_y, const TensorView& x, const Saved& saved,
                       const TensorView& d_x, GradMode mode) const {
  ops::rms_norm_backward(ctx, {.d_y = d_y,
                               .x = x,
                               .w = Weight(ctx, weight_),
                               .rstd = saved.rstd,
                               .d_x = d_x,
                               .d_w = weight_.gradient,
                               .mode = mode});
}

Mlp::Mlp(const std::string& name, const ModelConfig& config)
    : gate_(name + ".gate_proj", config.hidden_size, config.intermediate_size, false),
      up_(name + ".up_proj", config.hidden_size, config.intermediate_size, false),
      down_(name + ".down_proj", config.intermediate_size, config.hidden_size, false, Init::residual) {}

void Mlp::forward(Context& ctx, const TensorView& x, const TensorView& y, const Saved& saved) const {
  gate_.forward(ctx, x, saved.gate);
  up_.forward(ctx, x, saved.up);
  ops::swiglu_forward(ctx, {.gate = saved.gate, .up = saved.up, .y = saved.act});
  if (y.shape.rank()) down_.forward(ctx, saved.act, y);
}

void Mlp::backward(Context& ctx, const TensorView& d_y, const TensorView& x, const Saved& saved,
                   const TensorView& d_x) const {
  const Arena::Scope scope(*ctx.scratch);
  const TensorView d_act = ctx.scratch->allocate("d_act", saved.act.dtype, saved.act.shape);
  down_.backward(ctx, d_y, saved.act, d_act, GradMode::overwrite);
  ops::swiglu_backward(ctx, {.d_y = d_act, .gate = saved.gate, .up = saved.up, .d_gate = saved.gate, .d_up = saved.up});
  gate_.backward(ctx, saved.gate, x, d_x, GradMode::overwrite);
  up_.backward(ctx, saved.up, x, d_x, GradMode::accumulate);
}

void Mlp::visit_parameters(const ParameterVisitor& visit) {
  gate_.visit_parameters(visit);
  up_.visit_parameters(visit);
  down_.visit_parameters(visit);
}

}  // namespace annulus::model
