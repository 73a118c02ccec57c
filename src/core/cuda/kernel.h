// What our kernels share: conversions, 16-byte packs, reductions over a warp and a block in a fixed order, and the
// choice of a template by a tensor's type. For .cu files.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <string>

#include "core/cuda/device.h"

namespace annulus::cuda {

using Bf16 = __nv_bfloat16;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_f32(Bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_f32(float x) {
  if constexpr (std::is_same_v<T, Bf16>) return __float2bfloat16_rn(x);
  else return static_cast<T>(x);
}

// N elements moved at once; N = 1 wherever a row is odd or a pointer is not aligned.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T v[N];
};
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& x) {
  *reinterpret_cast<Pack<T, N>*>(p) = x;
}
constexpr int kPack = 8;

inline bool aligned16(const TensorView& x) { return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0; }
template <class... Views>
bool packable(std::int64_t row, const Views&... views) {  // rows of `row` elements can be moved in packs of kPack
  return row % kPack == 0 && (aligned16(views) && ...);
}

struct SumOp {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct MaxOp {  // symmetric also with NaN, so that every lane ends with the same
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {  // every lane gets the result
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Every thread gets the result; kThreads a multiple of 32. Contains barriers.
template <int kThreads, class T, class Op>
__device__ T block_reduce(T x, Op op) {
  constexpr int kWarps = kThreads / kWarp;
  x = warp_reduce(x, op);
  if constexpr (kWarps > 1) {
    __shared__ T parts[kWarps];
    __syncthreads();  // an earlier reduction's parts have been read
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) x = op(x, parts[i]);
  }
  return x;
}

// f(T{}) with T = float or Bf16; another type is refused by the operation's name.
template <class F>
void with_gpu_type(const char* operation, DType dtype, F&& f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::bf16) return f(Bf16{});
  throw Error(std::string(operation) + " runs on a GPU in float32 and bfloat16, not in " + std::string(name_of(dtype)) +
              (dtype == DType::f64 ? "; precision fp64 needs device = \"cpu\"" : ""));
}

template <class T>
T* pointer(const TensorView& x) {  // null for an empty view
  return static_cast<T*>(x.data);
}

inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {  // grid.x holds 2^31 − 1
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace annulus::cuda
