// sum, sum_squares (two stages, fixed order, f64), clip_factor, add_bias_backward.
#include "core/cuda/kernel.h"
#include "ops/cuda/column_sum.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks =
    1024;  // of the first stage; chosen by the length alone, so that any GPU gives the same bits

template <class T, bool kSquare, int N>
__device__ __forceinline__ double terms(const T* x) {
  const auto in = load<N>(x);
  double sum = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const double value = to_f32(in.v[j]);
    sum += kSquare ? value * value : value;
  }
  return sum;
}

template <class T, bool kSquare>
__global__ void __launch_bounds__(kThreads)
    partial_sum_kernel(const T* x, std::int64_t n, bool packed, double* partial) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x,
                     threads = std::int64_t{gridDim.x} * kThreads;
  double sum = 0;
  std::int64_t tail = 0;
  if (packed) {
    tail = n / kPack * kPack;
    for (std::int64_t i = thread * kPack; i < tail; i += threads * kPack) sum += terms<T, kSquare, kPack>(x + i);
  }
  for (std::int64_t i = tail + thread; i < n; i += threads) sum += terms<T, kSquare, 1>(x + i);
  sum = block_reduce<kThreads>(sum, SumOp{});
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* partial, int count, double* result, bool accumulate) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = block_reduce<kThreads>(sum, SumOp{});
  if (threadIdx.x == 0) *result = accumulate ? *result + sum : sum;
}

template <bool kSquare>
void launch_sum(const char* operation, const Context& ctx, const TensorView& x, const TensorView& result,
                GradMode mode) {
  const std::int64_t n = x.numel();
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>((n + 2047) / 2048, 1, kMaxBlocks));
  auto* partial = static_cast<double*>(ctx.cuda->workspace);
  with_gpu_type(operation, x.dtype, [&](auto tag) {
    using T = decltype(tag);
    partial_sum_kernel<T, kSquare><<<blocks, kThreads, 0, stream_of(ctx)>>>(pointer<T>(x), n, aligned16(x), partial);
  });
  ANNULUS_CUDA_LAUNCHED("a sum");
  total_kernel<<<1, kThreads, 0, stream_of(ctx)>>>(partial, static_cast<int>(blocks), pointer<double>(result),
                                                   mode == GradMode::accumulate);
  ANNULUS_CUDA_LAUNCHED("a sum");
}

__global__ void clip_factor_kernel(const double* sum_squares, const double* loss, double* norm, double* factor,
                                   double max_norm) {
  const double length = sqrt(*sum_squares);
  *norm = length;
  if (!isfinite(length) || !isfinite(*loss)) *factor = nan("");
  else *factor = max_norm == 0 ? 1 : fmin(1.0, max_norm / (length + 1e-6));
}

template <class T>
struct BiasGradient {
  const T* d_y;
  std::int64_t columns;
  __device__ float operator()(std::int64_t r, std::int64_t c) const { return to_f32(d_y[r * columns + c]); }
};

}  // namespace

void sum(Context& ctx, const Sum& args) { launch_sum<false>("sum", ctx, args.x, args.result, args.mode); }

void sum_squares(Context& ctx, const SumSquares& args) {
  launch_sum<true>("sum_squares", ctx, args.x, args.result, args.mode);
}

void clip_factor(Context& ctx, const ClipFactor& args) {
  clip_factor_kernel<<<1, 1, 0, stream_of(ctx)>>>(args.sum_squares.as<double>(), args.loss.as<double>(),
                                                  args.norm.as<double>(), args.factor.as<double>(), args.max_norm);
  ANNULUS_CUDA_LAUNCHED("clip_factor");
}

void add_bias_backward(Context& ctx, const AddBiasBackward& args) {
  with_gpu_type("add_bias_backward", args.d_y.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t columns = args.d_bias.numel();
    add_column_sums(ctx, columns == 0 ? 0 : args.d_y.numel() / columns, columns, pointer<float>(args.d_bias),
                    BiasGradient<T>{pointer<T>(args.d_y), columns});
  });
}

}  // namespace annulus::ops::cuda
