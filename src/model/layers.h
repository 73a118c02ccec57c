// The small layers: Linear, RmsNorm, the gated MLP, and the frequencies of RoPE. A layer is forward(…, Saved*),
// backward(…, const Saved&, mode) and visit_parameters(visitor); what backward reads lies in Saved, and who keeps or
// refills it is the block's policy. R rows, all tensors contiguous; weights are [out, in].
// backward adds weight gradients to the parameters' `gradient` and writes (or adds, by mode) the gradient of the input.
#pragma once

#include <string>

#include "model/config.h"
#include "model/parameter.h"
#include "ops/ops.h"

namespace annulus::model {

using ops::GradMode;

// A stat tensor as the working type: itself where the two are one, else a copy in scratch.
TensorView in_working_type(Context& ctx, const char* name, const TensorView& t, DType working);

class Linear {
 public:
  Linear(const std::string& name, std::int64_t in, std::int64_t out, bool bias, Init init = Init::normal);
  void forward(Context& ctx, const TensorView& x, const TensorView& y) const;  // x [R, in] -> y [R, out]
  void backward(Context& ctx, const TensorView& d_y, const TensorView& x, const TensorView& d_x, GradMode mode) const;
  void visit_parameters(const ParameterVisitor& visit);

 private:
  Parameter weight_;
  Parameter bias_;  // no name: none
};

class RmsNorm {
 public:
  struct Saved {
    TensorView rstd;  // [R] stat
  };
  RmsNorm(const std::string& name, std::int64_t size, double eps);
  void forward(Context& ctx, const TensorView& x, const TensorView& y, const Saved& saved) const;  // [R, size]
  void backward(Context& ctx, const TensorView& d_y, const TensorView& x, const Saved& saved, const TensorView& d_x,
                GradMode mode) const;
  void visit_parameters(const ParameterVisitor& visit) { visit(weight_); }

 private:
  Parameter weight_;
  double eps_;
};

// down(silu(gate(x)) ∘ up(x)).
class Mlp {
 public:
  struct Saved {
    TensorView gate, up, act;  // [R, I]
  };
  Mlp(const std::string& name, const ModelConfig& config);
  // y may be empty: then only Saved is filled (recomputation).
  void forward(Context& ctx, const TensorView& x, const TensorView& y, const Saved& saved) const;
  // Overwrites saved.gate and saved.up.
  void backward(Context& ctx, const TensorView& d_y, const TensorView& x, const Saved& saved,
                const TensorView& d_x) const;
  void visit_parameters(const ParameterVisitor& visit);

 private:
  Linear gate_, up_, down_;
};

// Inverse frequencies [D/2] and the magnitude of cos and sin, with scaling, as HuggingFace defines them
// (modeling_rope_utils; YaRN: arXiv 2309.00071).
struct RopeFrequencies {
  std::vector<double> inv_freq;
  double magnitude = 1;
};
RopeFrequencies rope_frequencies(const ModelConfig& config);

}  // namespace annulus::model
