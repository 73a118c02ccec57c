// swiglu_forward, swiglu_backward, silu_forward, silu_backward.
#include "ops/cuda/elementwise.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {
namespace {

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

template <class T>
struct Forward {
  const T *gate, *up;
  T* y;
  template <int N>
  __device__ void run(std::int64_t i) const {
    const Pack<T, N> g = load<N>(gate + i), u = load<N>(up + i);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float x = to_f32(g.v[j]);
      out.v[j] = from_f32<T>(x * sigmoid(x) * to_f32(u.v[j]));
    }
    store<N>(y + i, out);
  }
};

template <class T>
struct Backward {
  const T *d_y, *gate, *up;
  T *d_gate, *d_up;
  template <int N>
  __device__ void run(std::int64_t i) const {
    const Pack<T, N> d = load<N>(d_y + i), g = load<N>(gate + i), u = load<N>(up + i);
    Pack<T, N> out_gate, out_up;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float x = to_f32(g.v[j]), grad = to_f32(d.v[j]), s = sigmoid(x);
      out_gate.v[j] = from_f32<T>(grad * to_f32(u.v[j]) * s * (1 + x * (1 - s)));
      out_up.v[j] = from_f32<T>(grad * x * s);
    }
    store<N>(d_gate + i, out_gate);
    store<N>(d_up + i, out_up);
  }
};

template <class T>
struct Silu {
  const T* x;
  T* y;
  template <int N>
  __device__ void run(std::int64_t i) const {
    const Pack<T, N> in = load<N>(x + i);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float value = to_f32(in.v[j]);
      out.v[j] = from_f32<T>(value * sigmoid(value));
    }
    store<N>(y + i, out);
  }
};

template <class T>
struct SiluGradient {
  const T *d_y, *x;
  T* d_x;
  template <int N>
  __device__ void run(std::int64_t i) const {
    const Pack<T, N> d = load<N>(d_y + i), in = load<N>(x + i);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float value = to_f32(in.v[j]), s = sigmoid(value);
      out.v[j] = from_f32<T>(to_f32(d.v[j]) * s * (1 + value * (1 - s)));
    }
    store<N>(d_x + i, out);
  }
};

}  // namespace

void silu_forward(Context& ctx, const SiluForward& args) {
  with_gpu_type("silu_forward", args.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_elementwise(ctx, args.x.numel(), aligned16(args.x) && aligned16(args.y),
                       Silu<T>{pointer<T>(args.x), pointer<T>(args.y)});
  });
}

void silu_backward(Context& ctx, const SiluBackward& args) {
  with_gpu_type("silu_backward", args.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_elementwise(ctx, args.x.numel(), aligned16(args.d_y) && aligned16(args.x) && aligned16(args.d_x),
                       SiluGradient<T>{pointer<T>(args.d_y), pointer<T>(args.x), pointer<T>(args.d_x)});
  });
}

void swiglu_forward(Context& ctx, const SwigluForward& args) {
  with_gpu_type("swiglu_forward", args.y.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_elementwise(ctx, args.y.numel(), aligned16(args.gate) && aligned16(args.up) && aligned16(args.y),
                       Forward<T>{pointer<T>(args.gate), pointer<T>(args.up), pointer<T>(args.y)});
  });
}

void swiglu_backward(Context& ctx, const SwigluBackward& args) {
  with_gpu_type("swiglu_backward", args.d_y.dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool packed = aligned16(args.d_y) && aligned16(args.gate) && aligned16(args.up) && aligned16(args.d_gate) &&
                        aligned16(args.d_up);
    launch_elementwise(ctx, args.d_y.numel(), packed,
                       Backward<T>{pointer<T>(args.d_y), pointer<T>(args.gate), pointer<T>(args.up),
                                   pointer<T>(args.d_gate), pointer<T>(args.d_up)});
  });
}

}  // namespace annulus::ops::cuda
