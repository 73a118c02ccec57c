// rms_norm_forward, rms_norm_backward: a row is read from memory once and found in the cache the second time.
#include <cmath>

#include "ops/cpu/column_sums.h"
#include "ops/workspace.h"

namespace annulus::ops::cpu {
namespace {

template <class T>
void forward(const RmsNormForward& args) {
  const std::int64_t h = args.x.dim(1);
  const T* x = args.x.as<T>();
  const T* w = args.w.as<T>();
  T* y = args.y.as<T>();
  T* rstd = args.rstd.as<T>();
  const T eps = static_cast<T>(args.eps);
  for_rows(args.x.dim(0), h, [=](std::int64_t r) {
    const T* in = x + r * h;
    T* out = y + r * h;
    T squares = 0;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t j = 0; j < h; ++j) squares += in[j] * in[j];
    const T s = T(1) / std::sqrt(squares / static_cast<T>(h) + eps);
    rstd[r] = s;
#pragma omp simd
    for (std::int64_t j = 0; j < h; ++j) out[j] = in[j] * s * w[j];
  });
}

// With x̂ = x · rstd: d_x = rstd · (d_y w − x̂ · mean(d_y w x̂)), d_w = Σ_rows d_y x̂.
template <class T, bool accumulate>
void backward(const RmsNormBackward& args, T* partials) {
  const std::int64_t h = args.x.dim(1);
  const T* d_y = args.d_y.as<T>();
  const T* x = args.x.as<T>();
  const T* w = args.w.as<T>();
  const T* rstd = args.rstd.as<T>();
  T* d_x = args.d_x.as<T>();
  add_column_sums(args.x.dim(0), h, partials, args.d_w.as<T>(), [=](std::int64_t r, T* d_w) {
    const T* g = d_y + r * h;
    const T* in = x + r * h;
    T* out = d_x + r * h;
    const T s = rstd[r];
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (std::int64_t j = 0; j < h; ++j) dot += g[j] * w[j] * in[j];
    const T c = dot * s * s * s / static_cast<T>(h);
#pragma omp simd
    for (std::int64_t j = 0; j < h; ++j) {
      const T d = g[j];
      d_w[j] += d * (in[j] * s);
      const T through = d * w[j] * s - in[j] * c;
      out[j] = accumulate ? out[j] + through : through;
    }
  });
}

}  // namespace

void rms_norm_forward(Context&, const RmsNormForward& args) {
  for_type(args.x, [&](auto type) { forward<decltype(type)>(args); });
}

void rms_norm_backward(Context& ctx, const RmsNormBackward& args) {
  const Workspace workspace(ctx, "rms_norm_backward", workspace_bytes(args));
  for_type(args.x, [&](auto type) {
    using T = decltype(type);
    if (args.mode == GradMode::accumulate) {
      backward<T, true>(args, workspace.as<T>());
    } else {
      backward<T, false>(args, workspace.as<T>());
    }
  });
}

}  // namespace annulus::ops::cpu
