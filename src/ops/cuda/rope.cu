// rope_table, rope. Angles, sine and cosine in fp32 at full accuracy (no fast intrinsics: angles reach the number of
// tokens).
#include "core/cuda/kernel.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {

using namespace annulus::cuda;

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    table_kernel(const std::int32_t* position, const float* inv_freq, float* cosine, float* sine, std::int64_t n,
                 int half, float magnitude) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float angle = static_cast<float>(position[i / half]) * inv_freq[i % half];
  cosine[i] = cosf(angle) * magnitude;
  sine[i] = sinf(angle) * magnitude;
}

// One thread rotates N pairs of one head.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(T* x, const float* cosine, const float* sine, std::int64_t n, int heads, int half, float direction,
                std::int64_t table_stride) {
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i >= n) return;
  const std::int64_t head = i / half, entry = head / heads * table_stride * half + i % half;
  T* low = x + head * 2 * half + i % half;
  T* high = low + half;
  const auto a = load<N>(low), b = load<N>(high);
  const auto c = load<N>(cosine + entry), s = load<N>(sine + entry);
  Pack<T, N> out_low, out_high;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float p = to_f32(a.v[j]), q = to_f32(b.v[j]), sign_s = direction * s.v[j];
    out_low.v[j] = from_f32<T>(p * c.v[j] - q * sign_s);
    out_high.v[j] = from_f32<T>(q * c.v[j] + p * sign_s);
  }
  store<N>(low, out_low);
  store<N>(high, out_high);
}

template <class T, int N>
void launch_rope(const Context& ctx, const Rope& args) {
  const std::int64_t pairs = args.x.numel() / 2;
  rope_kernel<T, N><<<blocks_for(pairs, kThreads * N), kThreads, 0, stream_of(ctx)>>>(
      pointer<T>(args.x), pointer<float>(args.cos), pointer<float>(args.sin), pairs, static_cast<int>(args.x.dim(1)),
      static_cast<int>(args.x.dim(2) / 2), args.inverse ? -1.0f : 1.0f, args.table_stride);
  ANNULUS_CUDA_LAUNCHED("rope");
}

}  // namespace

void rope_table(Context& ctx, const RopeTable& args) {
  with_gpu_type("rope_table", args.cos.dtype, [](auto) {});
  const std::int64_t n = args.cos.numel();
  if (n == 0) return;
  table_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream_of(ctx)>>>(
      args.position.as<std::int32_t>(), args.inv_freq.as<float>(), args.cos.as<float>(), args.sin.as<float>(), n,
      static_cast<int>(args.inv_freq.numel()), static_cast<float>(args.magnitude));
  ANNULUS_CUDA_LAUNCHED("rope_table");
}

void rope(Context& ctx, const Rope& args) {
  with_gpu_type("rope", args.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (args.x.numel() == 0) return;
    if (packable(args.x.dim(2) / 2, args.x, args.cos, args.sin)) launch_rope<T, kPack>(ctx, args);
    else launch_rope<T, 1>(ctx, args);
  });
}

}  // namespace annulus::ops::cuda
