// Checks of the arguments of attention's operations: what is wrong, with which operation and tensor.
#pragma once

#include "core/context.h"

namespace annulus::attention {

class Checker {
 public:
  Checker(const Context& ctx, const char* operation) : ctx_(ctx), operation_(operation) {}

  void tensor(const char* name, const TensorView& x, DType dtype, const Shape& wanted) const {
    if (x.shape != wanted || x.dtype != dtype) fail(name, x, fmt::format("{} {}", name_of(dtype), wanted.str()));
    if (x.device != ctx_.device) fail(name, x, "a tensor on the context's device");
    if (!ctx_.planning && !x.data && x.numel() > 0) fail(name, x, "memory (is its arena committed?)");
  }

  // q [B, T, Hq, D] of a working type; k and v [B, S, Hkv, D] of the same; bounds [B, T].
  template <class Args>
  void inputs(const Args& args) const {
    working(args.q);
    if (args.q.shape.rank() != 4) fail("q", args.q, "[B, T, Hq, D]");
    if (args.k.shape.rank() != 4) fail("k", args.k, "[B, S, Hkv, D]");
    tensor("q", args.q, args.q.dtype, args.q.shape);
    tensor("k", args.k, args.q.dtype, {args.q.dim(0), args.k.dim(1), args.k.dim(2), args.q.dim(3)});
    tensor("v", args.v, args.q.dtype, args.k.shape);
    if (args.k.dim(2) < 1 || args.q.dim(2) % args.k.dim(2) != 0)
      fail("k", args.k, "KV heads that divide the query heads");
    tensor("first", args.first, DType::i32, {args.q.dim(0), args.q.dim(1)});
    tensor("last", args.last, DType::i32, args.first.shape);
    ANNULUS_CHECK(args.scale > 0, "operation {}: scale is {}, expected > 0", operation_, args.scale);
  }

  void working(const TensorView& x, const char* name = "q") const {
    if (x.dtype == DType::f32 || x.dtype == DType::f64) return;
    if (x.dtype == DType::bf16 && ctx_.device == DeviceKind::cuda) return;
    fail(name, x, "float32 or float64, or bfloat16 on cuda");
  }

  [[noreturn]] void fail(const char* name, const TensorView& x, std::string_view expected) const {
    throw Error(fmt::format("operation {}: {} is {} {} on {}, expected {}", operation_, name, name_of(x.dtype),
                            x.shape.str(), x.device == DeviceKind::cpu ? "cpu" : "cuda", expected));
  }

 private:
  const Context& ctx_;
  const char* operation_;
};

inline Shape statistics_of(const TensorView& q) { return {q.dim(0), q.dim(2), q.dim(1)}; }  // lse, delta

}  // namespace annulus::attention
