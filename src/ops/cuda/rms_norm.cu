// rms_norm_forward, rms_norm_backward: statistics in fp32. A row is one warp's work up to 512 columns (the heads of q/k
// norm), one block's beyond.
#include "core/cuda/kernel.h"
#include "ops/cuda/column_sum.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {
namespace {

constexpr int kBlock = 256;
constexpr std::int64_t kWarpColumns = 512;

// kThreads (32 or kBlock) threads share a row, in strides of kThreads packs.
template <int kThreads, class T>
__device__ __forceinline__ T row_sum(T x) {
  if constexpr (kThreads == kWarp) return warp_reduce(x, SumOp{});
  else return block_reduce<kThreads>(x, SumOp{});
}

template <int kThreads>
__device__ __forceinline__ std::int64_t row_of_thread() {
  constexpr int kRows = kBlock / kThreads;
  return std::int64_t{blockIdx.x} * kRows + threadIdx.x / kThreads;
}

template <class T, int kThreads, int N>
__global__ void __launch_bounds__(kBlock)
    forward_kernel(const T* x, const T* w, T* y, float* rstd, std::int64_t rows, int columns, float eps) {
  const std::int64_t row = row_of_thread<kThreads>();
  if (row >= rows) return;  // a whole warp or block at once
  const int lane = threadIdx.x % kThreads;
  x += row * columns;
  y += row * columns;
  float sum = 0;
  for (int i = lane * N; i < columns; i += kThreads * N) {
    const auto in = load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += to_f32(in.v[j]) * to_f32(in.v[j]);
  }
  sum = row_sum<kThreads>(sum);
  const float r = 1 / sqrtf(sum / static_cast<float>(columns) + eps);
  if (lane == 0) rstd[row] = r;
  for (int i = lane * N; i < columns; i += kThreads * N) {  // x again: out of L1 or L2
    const auto in = load<N>(x + i), weight = load<N>(w + i);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = from_f32<T>(to_f32(in.v[j]) * r * to_f32(weight.v[j]));
    store<N>(y + i, out);
  }
}

// With g = d_y ∘ w and x̂ = x · rstd: d_x = rstd · (g − x̂ · mean(g ∘ x̂)).
template <class T, int kThreads, int N>
__global__ void __launch_bounds__(kBlock) backward_kernel(const T* d_y, const T* x, const T* w, const float* rstd,
                                                          T* d_x, std::int64_t rows, int columns, bool accumulate) {
  const std::int64_t row = row_of_thread<kThreads>();
  if (row >= rows) return;
  const int lane = threadIdx.x % kThreads;
  x += row * columns;
  d_y += row * columns;
  d_x += row * columns;
  const float r = rstd[row];
  float dot = 0;
  for (int i = lane * N; i < columns; i += kThreads * N) {
    const auto in = load<N>(x + i), grad = load<N>(d_y + i), weight = load<N>(w + i);
#pragma unroll
    for (int j = 0; j < N; ++j) dot += to_f32(grad.v[j]) * to_f32(weight.v[j]) * (to_f32(in.v[j]) * r);
  }
  const float mean = row_sum<kThreads>(dot) / static_cast<float>(columns);
  for (int i = lane * N; i < columns; i += kThreads * N) {
    const auto in = load<N>(x + i), grad = load<N>(d_y + i), weight = load<N>(w + i);
    Pack<T, N> out;
    if (accumulate) out = load<N>(d_x + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float value = r * (to_f32(grad.v[j]) * to_f32(weight.v[j]) - to_f32(in.v[j]) * r * mean);
      out.v[j] = from_f32<T>(accumulate ? to_f32(out.v[j]) + value : value);
    }
    store<N>(d_x + i, out);
  }
}

template <class T>
struct WeightGradient {  // what row r, column c adds to d_w
  const T *d_y, *x;
  const float* rstd;
  std::int64_t columns;
  __device__ float operator()(std::int64_t r, std::int64_t c) const {
    return to_f32(d_y[r * columns + c]) * (to_f32(x[r * columns + c]) * rstd[r]);
  }
};

template <class F>
void with_row_shape(std::int64_t columns, bool packed, F&& f) {  // f(threads, pack) as integral constants
  using std::integral_constant;
  const auto with_pack = [&](auto threads) {
    if (packed) f(threads, integral_constant<int, kPack>{});
    else f(threads, integral_constant<int, 1>{});
  };
  if (columns <= kWarpColumns) with_pack(integral_constant<int, kWarp>{});
  else with_pack(integral_constant<int, kBlock>{});
}

}  // namespace

void rms_norm_forward(Context& ctx, const RmsNormForward& args) {
  const std::int64_t rows = args.x.dim(0), columns = args.x.dim(1);
  with_gpu_type("rms_norm_forward", args.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (args.x.numel() == 0) return;
    with_row_shape(columns, packable(columns, args.x, args.w, args.y), [&](auto threads, auto pack) {
      forward_kernel<T, threads(), pack()><<<blocks_for(rows, kBlock / threads()), kBlock, 0, stream_of(ctx)>>>(
          pointer<T>(args.x), pointer<T>(args.w), pointer<T>(args.y), pointer<float>(args.rstd), rows,
          static_cast<int>(columns), static_cast<float>(args.eps));
      ANNULUS_CUDA_LAUNCHED("rms_norm_forward");
    });
  });
}

void rms_norm_backward(Context& ctx, const RmsNormBackward& args) {
  const std::int64_t rows = args.x.dim(0), columns = args.x.dim(1);
  with_gpu_type("rms_norm_backward", args.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (args.x.numel() == 0) return;
    // d_w first: d_x may take d_y's place.
    add_column_sums(ctx, rows, columns, pointer<float>(args.d_w),
                    WeightGradient<T>{pointer<T>(args.d_y), pointer<T>(args.x), pointer<float>(args.rstd), columns});
    with_row_shape(columns, packable(columns, args.x, args.d_y, args.w, args.d_x), [&](auto threads, auto pack) {
      backward_kernel<T, threads(), pack()><<<blocks_for(rows, kBlock / threads()), kBlock, 0, stream_of(ctx)>>>(
          pointer<T>(args.d_y), pointer<T>(args.x), pointer<T>(args.w), pointer<float>(args.rstd), pointer<T>(args.d_x),
          rows, static_cast<int>(columns), args.mode == GradMode::accumulate);
      ANNULUS_CUDA_LAUNCHED("rms_norm_backward");
    });
  });
}

}  // namespace annulus::ops::cuda
