// gate_forward, gate_backward: a warp a row and head.
#include "core/cuda/kernel.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {

using namespace annulus::cuda;

namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kWarp;  // rows of [R · Hq] a block takes

template <class T>
struct Branches {
  const T* o[3];
  T* d_o[3];
};

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* logits, Branches<T> branches, T* out, std::int64_t rows, int heads, int depth) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRows + threadIdx.x / kWarp;
  if (row >= rows) return;
  const T* logit = logits + row / heads * 3 * heads + row % heads;
  const float g0 = sigmoid(to_f32(logit[0])), g1 = sigmoid(to_f32(logit[heads])),
              g2 = sigmoid(to_f32(logit[2 * heads]));
  for (int c = threadIdx.x % kWarp; c < depth; c += kWarp) {
    const std::int64_t i = row * depth + c;
    out[i] = from_f32<T>(g0 * to_f32(branches.o[0][i]) + g1 * to_f32(branches.o[1][i]) + g2 * to_f32(branches.o[2][i]));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(const T* d_out, const T* logits, Branches<T> branches,
                                                            T* d_logits, std::int64_t rows, int heads, int depth) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRows + threadIdx.x / kWarp;
  if (row >= rows) return;
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    const std::int64_t gate = (row / heads * 3 + b) * heads + row % heads;
    const float g = sigmoid(to_f32(logits[gate]));
    float sum = 0;
    for (int c = threadIdx.x % kWarp; c < depth; c += kWarp) {
      const std::int64_t i = row * depth + c;
      const float d = to_f32(d_out[i]);
      sum += d * to_f32(branches.o[b][i]);
      branches.d_o[b][i] = from_f32<T>(g * d);
    }
    sum = warp_reduce(sum, SumOp{});
    if (threadIdx.x % kWarp == 0) d_logits[gate] = from_f32<T>(sum * g * (1 - g));
  }
}

}  // namespace

void gate_forward(Context& ctx, const GateForward& args) {
  with_gpu_type("gate_forward", args.out.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t rows = args.out.dim(0) * args.out.dim(1);
    if (args.out.numel() == 0) return;
    const Branches<T> branches{{pointer<T>(args.o[0]), pointer<T>(args.o[1]), pointer<T>(args.o[2])}, {}};
    forward_kernel<T><<<blocks_for(rows, kRows), kThreads, 0, stream_of(ctx)>>>(
        pointer<T>(args.logits), branches, pointer<T>(args.out), rows, static_cast<int>(args.out.dim(1)),
        static_cast<int>(args.out.dim(2)));
    ANNULUS_CUDA_LAUNCHED("gate_forward");
  });
}

void gate_backward(Context& ctx, const GateBackward& args) {
  with_gpu_type("gate_backward", args.d_out.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t rows = args.d_out.dim(0) * args.d_out.dim(1);
    if (args.d_out.numel() == 0) return;
    const Branches<T> branches{{pointer<T>(args.o[0]), pointer<T>(args.o[1]), pointer<T>(args.o[2])},
                               {pointer<T>(args.d_o[0]), pointer<T>(args.d_o[1]), pointer<T>(args.d_o[2])}};
    backward_kernel<T><<<blocks_for(rows, kRows), kThreads, 0, stream_of(ctx)>>>(
        pointer<T>(args.d_out), pointer<T>(args.logits), branches, pointer<T>(args.d_logits), rows,
        static_cast<int>(args.d_out.dim(1)), static_cast<int>(args.d_out.dim(2)));
    ANNULUS_CUDA_LAUNCHED("gate_backward");
  });
}

}  // namespace annulus::ops::cuda
