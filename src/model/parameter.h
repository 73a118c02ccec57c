// Parameters: named weights and their gradients, as views into flat buffers that the optimiser shards.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/context.h"

namespace annulus::model {

enum class Init { normal, residual, ones, zeros };  // N(0, 0.02); N(0, 0.02/√(2·layers)); 1; 0

struct Parameter {
  std::string name;  // spec/model.md: HuggingFace's where it has one
  Shape shape;
  Init init = Init::normal;
  double uses_per_token = 1;  // products with a row, of a matrix: what floating-point operations are counted by
  TensorView value{};         // working type
  TensorView gradient{};      // stat; empty when the model only evaluates

  // Layers see a weight only between acquire and release, so that sharded weights can be gathered here later. Today
  // every rank holds whole working weights and both are free.
  const TensorView& acquire(Context&) const { return value; }
  void release(Context&) const {}
  bool decays() const { return shape.rank() >= 2; }
};

using ParameterVisitor = std::function<void(Parameter&)>;

// Scoped use of a parameter's value.
class Weight {
 public:
  Weight(Context& ctx, const Parameter& parameter) : ctx_(ctx), parameter_(parameter), view_(parameter.acquire(ctx)) {}
  ~Weight() { parameter_.release(ctx_); }
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;
  operator const TensorView&() const { return view_; }  // NOLINT: a weight is used as its view

 private:
  Context& ctx_;
  const Parameter& parameter_;
  TensorView view_;
};

}  // namespace annulus::model
