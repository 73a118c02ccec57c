// swiglu_forward, swiglu_backward, silu_forward, silu_backward: silu(g) = g · σ(g), σ(g) = 1/(1 + e^−g).
#include "core/vector_math.h"
#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {

void swiglu_forward(Context&, const SwigluForward& args) {
  for_type(args.gate, [&](auto type) {
    using T = decltype(type);
    const T* gate = args.gate.as<T>();
    const T* up = args.up.as<T>();
    T* y = args.y.as<T>();
    for_ranges(args.gate.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        const T g = gate[i];
        y[i] = g / (T(1) + vector_exp(-g)) * up[i];
      }
    });
  });
}

void swiglu_backward(Context&, const SwigluBackward& args) {
  for_type(args.gate, [&](auto type) {
    using T = decltype(type);
    const T* d_y = args.d_y.as<T>();
    const T* gate = args.gate.as<T>();
    const T* up = args.up.as<T>();
    T* d_gate = args.d_gate.as<T>();
    T* d_up = args.d_up.as<T>();
    for_ranges(args.gate.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        const T g = gate[i], u = up[i], d = d_y[i];
        const T sigma = T(1) / (T(1) + vector_exp(-g));
        d_up[i] = d * (g * sigma);
        d_gate[i] = d * u * sigma * (T(1) + g * (T(1) - sigma));
      }
    });
  });
}

void silu_forward(Context&, const SiluForward& args) {
  for_type(args.x, [&](auto type) {
    using T = decltype(type);
    const T* x = args.x.as<T>();
    T* y = args.y.as<T>();
    for_ranges(args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        const T value = x[i];
        y[i] = value / (T(1) + vector_exp(-value));
      }
    });
  });
}

void silu_backward(Context&, const SiluBackward& args) {
  for_type(args.x, [&](auto type) {
    using T = decltype(type);
    const T* d_y = args.d_y.as<T>();
    const T* x = args.x.as<T>();
    T* d_x = args.d_x.as<T>();
    for_ranges(args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        const T value = x[i], d = d_y[i];
        const T sigma = T(1) / (T(1) + vector_exp(-value));
        d_x[i] = d * sigma * (T(1) + value * (T(1) - sigma));
      }
    });
  });
}

}  // namespace annulus::ops::cpu
