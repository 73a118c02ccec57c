// cross_entropy: one block a row of logits; maximum and sum in one pass (online), the gradient in a second one.
#include "core/cuda/kernel.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {

using namespace annulus::cuda;

namespace {

constexpr int kThreads = 512;

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(T* logits, const std::int32_t* target, float* loss, std::int32_t* correct,
                         std::int64_t columns, float factor, bool gradient) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t wanted = target[row];
  logits += row * columns;
  if (wanted < 0) {
    if (threadIdx.x == 0) {
      loss[row] = 0;
      if (correct) correct[row] = 0;
    }
    if (gradient) {
      Pack<T, N> zero;
#pragma unroll
      for (int j = 0; j < N; ++j) zero.v[j] = from_f32<T>(0);
      for (std::int64_t i = threadIdx.x * N; i < columns; i += kThreads * N) store<N>(logits + i, zero);
    }
    return;
  }
  float highest = -INFINITY, sum = 0;
  for (std::int64_t i = threadIdx.x * N; i < columns; i += kThreads * N) {
    const auto in = load<N>(logits + i);
    float top = highest;
#pragma unroll
    for (int j = 0; j < N; ++j) top = fmaxf(top, to_f32(in.v[j]));
    if (top > highest) sum *= expf(highest - top);  // 0 · exp(−∞) the first time
    highest = top;
    if (top == -INFINITY) top = 0;  // nothing but −∞ so far: their terms are 0
#pragma unroll
    for (int j = 0; j < N; ++j) sum += expf(to_f32(in.v[j]) - top);
  }
  const float top = block_reduce<kThreads>(highest, MaxOp{});
  // A thread that saw only −∞ has a sum of 0, or NaN where a logit is NaN: it counts as it is.
  const float total = block_reduce<kThreads>(highest == -INFINITY ? sum : sum * expf(highest - top), SumOp{});
  const float at_target = to_f32(logits[wanted]);
  if (threadIdx.x == 0) loss[row] = (top - at_target) + logf(total);
  if (correct) {
    int as_great = 0;  // logits at least the target's: itself, and which others
    for (std::int64_t i = threadIdx.x * N; i < columns; i += kThreads * N) {
      const auto in = load<N>(logits + i);
#pragma unroll
      for (int j = 0; j < N; ++j) as_great += to_f32(in.v[j]) >= at_target;
    }
    as_great = block_reduce<kThreads>(as_great, SumOp{});
    if (threadIdx.x == 0) correct[row] = as_great == 1;
  }
  if (!gradient) return;
  __syncthreads();  // the target's logit has been read
  const float over_total = factor / total;
  for (std::int64_t i = threadIdx.x * N; i < columns; i += kThreads * N) {
    const auto in = load<N>(logits + i);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float share = expf(to_f32(in.v[j]) - top) * over_total;
      out.v[j] = from_f32<T>(i + j == wanted ? share - factor : share);
    }
    store<N>(logits + i, out);
  }
}

}  // namespace

void cross_entropy(Context& ctx, const CrossEntropy& args) {
  with_gpu_type("cross_entropy", args.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t columns = args.logits.dim(1);
    if (args.logits.numel() == 0) return;
    const auto launch = [&](auto pack) {
      cross_entropy_kernel<T, pack()><<<static_cast<unsigned>(args.logits.dim(0)), kThreads, 0, stream_of(ctx)>>>(
          pointer<T>(args.logits), args.target.as<std::int32_t>(), args.loss.as<float>(),
          args.correct.data ? args.correct.as<std::int32_t>() : nullptr, columns, static_cast<float>(args.scale),
          args.gradient);
      ANNULUS_CUDA_LAUNCHED("cross_entropy");
    };
    if (packable(columns, args.logits)) launch(std::integral_constant<int, kPack>{});
    else launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace annulus::ops::cuda
