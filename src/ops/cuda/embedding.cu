// embedding_forward, embedding_backward.
#include "core/cuda/kernel.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {

using namespace annulus::cuda;

namespace {

constexpr int kThreads = 256;

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const std::int32_t* token, const T* w, T* y, std::int64_t packs, std::int64_t packs_per_row) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= packs) return;
  const std::int64_t row = i / packs_per_row, column = i % packs_per_row;
  store<N>(y + i * N, load<N>(w + (token[row] * packs_per_row + column) * N));
}

// A block of the first row that holds a token adds up all its rows, in ascending order: no atomics, and a fixed order.
// It finds them by scanning the tokens, which lie in L2: rows · distinct tokens · 4 bytes, small beside a training
// step.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const std::int32_t* token, const T* d_y, float* d_w, int rows, std::int64_t columns) {
  const int first = blockIdx.x, wanted = token[first];
  for (int begin = 0; begin < first; begin += kThreads) {
    const int r = begin + static_cast<int>(threadIdx.x);
    if (__syncthreads_or(r < first && token[r] == wanted)) return;  // an earlier block's work
  }
  const std::int64_t column = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  const bool inside = column < columns;
  Pack<float, N> sum{};
  if (inside) sum = load<N>(d_w + wanted * columns + column);
  __shared__ unsigned matches[kThreads / kWarp];
  for (int begin = first; begin < rows; begin += kThreads) {
    const int r = begin + static_cast<int>(threadIdx.x);
    const unsigned mine = __ballot_sync(kAllLanes, r < rows && token[r] == wanted);
    if (threadIdx.x % kWarp == 0) matches[threadIdx.x / kWarp] = mine;
    __syncthreads();
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      for (unsigned left = matches[warp]; left && inside; left &= left - 1) {
        const std::int64_t row = begin + warp * kWarp + __ffs(static_cast<int>(left)) - 1;
        const auto grad = load<N>(d_y + row * columns + column);
#pragma unroll
        for (int j = 0; j < N; ++j) sum.v[j] += to_f32(grad.v[j]);
      }
    }
    __syncthreads();
  }
  if (inside) store<N>(d_w + wanted * columns + column, sum);
}

}  // namespace

void embedding_forward(Context& ctx, const EmbeddingForward& args) {
  with_gpu_type("embedding_forward", args.w.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t columns = args.w.dim(1);
    const auto launch = [&](auto pack) {
      const std::int64_t packs = args.y.numel() / pack();
      if (packs == 0) return;
      forward_kernel<T, pack()><<<blocks_for(packs, kThreads), kThreads, 0, stream_of(ctx)>>>(
          args.token.as<std::int32_t>(), pointer<T>(args.w), pointer<T>(args.y), packs, columns / pack());
      ANNULUS_CUDA_LAUNCHED("embedding_forward");
    };
    if (packable(columns, args.w, args.y)) launch(std::integral_constant<int, kPack>{});
    else launch(std::integral_constant<int, 1>{});
  });
}

void embedding_backward(Context& ctx, const EmbeddingBackward& args) {
  with_gpu_type("embedding_backward", args.d_y.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t columns = args.d_y.dim(1);
    if (args.d_y.numel() == 0) return;
    const auto launch = [&](auto pack) {
      const dim3 grid(static_cast<unsigned>(args.d_y.dim(0)), blocks_for(columns, kThreads * pack()));
      backward_kernel<T, pack()><<<grid, kThreads, 0, stream_of(ctx)>>>(args.token.as<std::int32_t>(),
                                                                        pointer<T>(args.d_y), pointer<float>(args.d_w),
                                                                        static_cast<int>(args.d_y.dim(0)), columns);
      ANNULUS_CUDA_LAUNCHED("embedding_backward");
    };
    if (packable(columns, args.d_y, args.d_w)) launch(std::integral_constant<int, kPack>{});
    else launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace annulus::ops::cuda
