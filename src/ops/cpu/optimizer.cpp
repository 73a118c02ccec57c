// clip_factor, adamw.
#include <cmath>
#include <limits>

#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {
namespace {

// One pass over param, m, v and grad; `from` holds the value to start from, the master where there is one.
template <class T>
void update(const AdamW& args, T clip, const T* from, T* master) {
  T* param = args.param.as<T>();
  T* m = args.m.as<T>();
  T* v = args.v.as<T>();
  const T* grad = args.grad.as<T>();
  const T beta1 = static_cast<T>(args.beta1), beta2 = static_cast<T>(args.beta2), eps = static_cast<T>(args.eps);
  const T rest1 = static_cast<T>(1 - args.beta1), rest2 = static_cast<T>(1 - args.beta2);
  const T keep = static_cast<T>(1 - args.lr * args.weight_decay),
          step = static_cast<T>(args.lr / args.bias_correction1);
  const T unbias2 = static_cast<T>(1 / args.bias_correction2);
  for_ranges(args.param.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const T g = grad[i] * clip;
      const T m1 = beta1 * m[i] + rest1 * g;
      const T v1 = beta2 * v[i] + rest2 * (g * g);
      const T p = from[i] * keep - step * m1 / (std::sqrt(v1 * unbias2) + eps);
      m[i] = m1;
      v[i] = v1;
      param[i] = p;
      if (master) master[i] = p;
    }
  });
}

}  // namespace

void clip_factor(Context&, const ClipFactor& args) {
  const double norm = std::sqrt(*args.sum_squares.as<double>());
  double factor = args.max_norm > 0 ? std::min(1.0, args.max_norm / (norm + 1e-6)) : 1.0;
  if (!std::isfinite(norm) || !std::isfinite(*args.loss.as<double>()))
    factor = std::numeric_limits<double>::quiet_NaN();
  *args.norm.as<double>() = norm;
  *args.factor.as<double>() = factor;
}

void adamw(Context&, const AdamW& args) {
  const double clip = *args.clip_factor.as<double>();
  if (!std::isfinite(clip)) return;
  for_type(args.param, [&](auto type) {
    using T = decltype(type);
    T* param = args.param.as<T>();
    T* master = args.master.data ? args.master.as<T>() : param;
    update<T>(args, static_cast<T>(clip), master, master == param ? nullptr : master);
  });
}

}  // namespace annulus::ops::cpu
