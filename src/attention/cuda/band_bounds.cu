// band_bounds, band_delta.
#include <algorithm>
#include <bit>

#include "attention/band.h"
#include "core/cuda/kernel.h"

namespace annulus::attention::cuda {

using namespace annulus::cuda;

namespace {

constexpr int kThreads = 256;

struct Chunks {
  std::int64_t size, begin[2];
  __device__ std::int32_t rows_before(std::int64_t token) const {
    std::int64_t rows = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (begin[c] >= 0) rows += min(max(token - begin[c], std::int64_t{0}), size);
    }
    return static_cast<std::int32_t>(rows);
  }
};

__global__ void __launch_bounds__(kThreads)
    bounds_kernel(const std::int32_t* global_first, const std::int32_t* global_last, std::int32_t* first,
                  std::int32_t* last, std::int64_t n, Chunks chunks) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  first[i] = chunks.rows_before(global_first[i]);
  last[i] = chunks.rows_before(std::int64_t{global_last[i]} + 1) - 1;
}

// `lanes` threads, a power of two, for each row and head, which are rows of d_o and o.
template <int kWidth, class T, class O>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(const T* d_o, const O* o, float* delta, std::int64_t n, int tokens, int heads, int dim, int lanes) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, i = thread / lanes;
  float sum = 0;
  if (i < n) {
    for (int c = static_cast<int>(thread % lanes) * kWidth; c < dim; c += lanes * kWidth) {
      const auto x = load<kWidth>(d_o + i * dim + c);
      const auto y = load<kWidth>(o + i * dim + c);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += to_f32(x.v[j]) * to_f32(y.v[j]);
    }
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  const std::int64_t head = i % heads, row = i / heads, batch = row / tokens, token = row % tokens;
  if (i < n && thread % lanes == 0) delta[(batch * heads + head) * tokens + token] = sum;
}

}  // namespace

void band_bounds(Context& ctx, const BandBounds& args) {
  const std::int64_t n = args.first.numel();
  if (n == 0) return;
  const Chunks chunks{args.chunk, {args.chunk_begin[0], args.chunk_begin[1]}};
  bounds_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream_of(ctx)>>>(
      args.global_first.as<std::int32_t>(), args.global_last.as<std::int32_t>(), args.first.as<std::int32_t>(),
      args.last.as<std::int32_t>(), n, chunks);
  ANNULUS_CUDA_LAUNCHED("band_bounds");
}

void band_delta(Context& ctx, const BandDelta& args) {
  const std::int64_t n = args.delta.numel();
  if (n == 0) return;
  const int dim = static_cast<int>(args.d_o.dim(3));
  const bool packed = packable(dim, args.d_o, args.o);
  const int lanes =
      packed ? static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(dim / kPack, kWarp)))) : kWarp;
  with_gpu_type("band_delta", args.d_o.dtype, [&](auto tag) {
    with_gpu_type("band_delta", args.o.dtype, [&](auto o_tag) {
      using T = decltype(tag);
      using O = decltype(o_tag);
      const auto kernel = packed ? delta_kernel<kPack, T, O> : delta_kernel<1, T, O>;
      kernel<<<blocks_for(n, kThreads / lanes), kThreads, 0, stream_of(ctx)>>>(
          pointer<const T>(args.d_o), pointer<const O>(args.o), args.delta.as<float>(), n,
          static_cast<int>(args.d_o.dim(1)), static_cast<int>(args.d_o.dim(2)), dim, lanes);
      ANNULUS_CUDA_LAUNCHED("band_delta");
    });
  });
}

}  // namespace annulus::attention::cuda
