// adamw: one fused update of parameter, master, m and v. Arithmetic in fp32.
#include "ops/cuda/elementwise.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {
namespace {

template <class T>
struct Update {
  T* param;
  float *master, *m, *v;  // master null: the parameter itself, in fp32
  const float* grad;
  const double* clip_factor;
  float beta1, rest1, beta2, rest2, eps, keep, step, unbias2;

  template <int N>
  __device__ void run(std::int64_t i) const {
    const auto clip = static_cast<float>(*clip_factor);
    if (!isfinite(clip)) return;
    const Pack<float, N> g = load<N>(grad + i);
    Pack<float, N> mean = load<N>(m + i), square = load<N>(v + i), weight;
    if (master) weight = load<N>(master + i);
    else {
      const Pack<T, N> in = load<N>(param + i);
#pragma unroll
      for (int j = 0; j < N; ++j) weight.v[j] = to_f32(in.v[j]);
    }
    Pack<T, N> rounded;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float clipped = g.v[j] * clip;
      mean.v[j] = beta1 * mean.v[j] + rest1 * clipped;
      square.v[j] = beta2 * square.v[j] + rest2 * (clipped * clipped);
      weight.v[j] = weight.v[j] * keep - step * mean.v[j] / (sqrtf(square.v[j] * unbias2) + eps);
      rounded.v[j] = from_f32<T>(weight.v[j]);
    }
    store<N>(m + i, mean);
    store<N>(v + i, square);
    if (master) store<N>(master + i, weight);
    store<N>(param + i, rounded);
  }
};

}  // namespace

void adamw(Context& ctx, const AdamW& args) {
  with_gpu_type("adamw", args.param.dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool has_master = args.master.data && args.master.data != args.param.data;
    const bool packed = aligned16(args.param) && (!has_master || aligned16(args.master)) && aligned16(args.m) &&
                        aligned16(args.v) && aligned16(args.grad);
    Update<T> update{pointer<T>(args.param),
                     has_master ? args.master.as<float>() : nullptr,
                     args.m.as<float>(),
                     args.v.as<float>(),
                     args.grad.as<float>(),
                     args.clip_factor.as<double>(),
                     static_cast<float>(args.beta1),
                     static_cast<float>(1 - args.beta1),
                     static_cast<float>(args.beta2),
                     static_cast<float>(1 - args.beta2),
                     static_cast<float>(args.eps),
                     static_cast<float>(1 - args.lr * args.weight_decay),
                     static_cast<float>(args.lr / args.bias_correction1),
                     static_cast<float>(1 / args.bias_correction2)};
    launch_elementwise(ctx, args.param.numel(), packed, update);
  });
}

}  // namespace annulus::ops::cuda
