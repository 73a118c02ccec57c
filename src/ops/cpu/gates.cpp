// gate_forward, gate_backward: NSA's branches, weighted by sigmoids.
#include "core/vector_math.h"
#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {
namespace {

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + vector_exp(-x));
}

}  // namespace

void gate_forward(Context&, const GateForward& args) {
  for_type(args.out, [&](auto type) {
    using T = decltype(type);
    const std::int64_t heads = args.out.dim(1), depth = args.out.dim(2);
    const T* logits = args.logits.as<T>();
    const T *o0 = args.o[0].as<T>(), *o1 = args.o[1].as<T>(), *o2 = args.o[2].as<T>();
    T* out = args.out.as<T>();
    for_rows(args.out.dim(0), 4 * heads * depth, [=](std::int64_t r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const T* logit = logits + r * 3 * heads + h;
        const T g0 = sigmoid(logit[0]), g1 = sigmoid(logit[heads]), g2 = sigmoid(logit[2 * heads]);
        const std::int64_t at = (r * heads + h) * depth;
#pragma omp simd
        for (std::int64_t c = at; c < at + depth; ++c) out[c] = g0 * o0[c] + g1 * o1[c] + g2 * o2[c];
      }
    });
  });
}

void gate_backward(Context&, const GateBackward& args) {
  for_type(args.d_out, [&](auto type) {
    using T = decltype(type);
    const std::int64_t heads = args.d_out.dim(1), depth = args.d_out.dim(2);
    const T *logits = args.logits.as<T>(), *d_out = args.d_out.as<T>();
    T* d_logits = args.d_logits.as<T>();
    for (int b = 0; b < 3; ++b) {
      const T* o = args.o[b].as<T>();
      T* d_o = args.d_o[b].as<T>();
      for_rows(args.d_out.dim(0), 3 * heads * depth, [=](std::int64_t r) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t at = (r * heads + h) * depth, gate = (r * 3 + b) * heads + h;
          const T g = sigmoid(logits[gate]);
          T sum = 0;
#pragma omp simd reduction(+ : sum)
          for (std::int64_t c = at; c < at + depth; ++c) {
            sum += d_out[c] * o[c];
            d_o[c] = g * d_out[c];
          }
          d_logits[gate] = sum * g * (T(1) - g);
        }
      });
    }
  });
}

}  // namespace annulus::ops::cpu
