// Banded attention forward, plain: tiles of queries in shared memory against tiles of keys, online softmax, all
// arithmetic in fp32 on the ordinary units. Correct for every shape and type; the fast paths of a GPU family come
// before it.
//
// A block holds kWarps · kRows query rows of one head, a warp kRows of them. Scores: a lane owns one of the tile's 32
// keys and reads the warp's queries as broadcasts. Output: a lane owns every 32nd column. A key tile that no row of a
// warp may see is passed over; one that all its rows see whole takes no masks.
#include "attention/cuda/band_kernels.h"
#include "core/cuda/kernel.h"

namespace annulus::attention::cuda::plain {

using namespace annulus::cuda;

namespace {

constexpr int kKeys = kWarp;  // a key tile

template <int kD>
struct Tile {
  static constexpr int kRows = 8;  // queries of a warp
  static constexpr int kWarps = 4;
  static constexpr int kQueries = kRows * kWarps;
  static constexpr int kThreads = kWarp * kWarps;
  static constexpr int kKeyStride = kD + 4;  // in floats: 16-byte reads by 32 lanes hit every bank equally often
  static constexpr int kBytes = (kQueries * kD + kKeys * kKeyStride + kKeys * kD) * static_cast<int>(sizeof(float));
};

struct Params {
  const void *q, *k, *v;
  const std::int32_t *first, *last;
  float *o, *lse;
  void* out;
  bool has_state, packed;
  int tokens, keys, q_heads, kv_heads, dim;
  float scale;
};

// rows × dim of a [.., heads, dim] tensor to shared memory as fp32; rows and columns beyond are zero.
template <class T, int kD, int kThreads>
__device__ void load_tile(float* to, int stride, const T* from, std::int64_t row_stride, int rows, int tile_rows,
                          int dim, bool packed) {
  if (packed) {
    for (int i = threadIdx.x * 4; i < tile_rows * kD; i += kThreads * 4) {
      const int row = i / kD, column = i % kD;
      Pack<T, 4> in;
      Pack<float, 4> out{};
      if (row < rows && column < dim) {
        in = load<4>(from + row * row_stride + column);
#pragma unroll
        for (int j = 0; j < 4; ++j) out.v[j] = to_f32(in.v[j]);
      }
      store<4>(to + row * stride + column, out);
    }
    return;
  }
  for (int i = threadIdx.x; i < tile_rows * kD; i += kThreads) {
    const int row = i / kD, column = i % kD;
    to[row * stride + column] = row < rows && column < dim ? to_f32(from[row * row_stride + column]) : 0.0f;
  }
}

template <class T, int kD>
class Warp {  // the state of one warp's rows
 public:
  static constexpr int kRows = Tile<kD>::kRows;
  static constexpr int kColumns = kD / kWarp;  // of a lane: lane + 32 i

  __device__ Warp(const Params& p, int batch, int head, int row0) : p_(p), batch_(batch), head_(head), row0_(row0) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top_[r] = -INFINITY;
      sum_[r] = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) o_[r][i] = 0;
      first_[r] = 0;
      last_[r] = -1;
      if (row0 + r >= p.tokens) continue;
      const std::int64_t bound = std::int64_t{batch} * p.tokens + row0 + r;
      first_[r] = max(p.first[bound], 0);
      last_[r] = min(p.last[bound], p.keys - 1);
      if (!p.has_state) continue;
      const float lse = p.lse[state_row(r)];
      if (lse == -INFINITY) continue;
      top_[r] = lse;  // exp(lse − lse) = 1 times the normalised o
      sum_[r] = 1;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (lane + kWarp * i < p.dim) o_[r][i] = p.o[row_offset(r) + lane + kWarp * i];
      }
    }
  }

  // The key tile from key0 on: is any of it visible, is all of it visible to every row?
  __device__ bool sees(int key0) const {
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= first_[r] <= last_[r] && first_[r] < key0 + kKeys && last_[r] >= key0;
    return any;
  }
  __device__ bool sees_all(int key0) const {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all &= first_[r] <= key0 && last_[r] >= key0 + kKeys - 1;
    return all;
  }

  template <bool kMasked>
  __device__ void visit(const float* q, const float* k, const float* v, int key0) {
    const int lane = threadIdx.x % kWarp;
    float s[kRows];
    scores(q, k + lane * Tile<kD>::kKeyStride, s);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      s[r] *= p_.scale;
      if (kMasked && !visible(r, key0 + lane)) s[r] = -INFINITY;
      const float top = fmaxf(top_[r], warp_reduce(s[r], MaxOp{}));
      if (kMasked && top == -INFINITY) {  // nothing yet, and nothing here
        s[r] = 0;
        continue;
      }
      const float keep = expf(top_[r] - top);
      s[r] = expf(s[r] - top);
      sum_[r] = sum_[r] * keep + warp_reduce(s[r], SumOp{});
      top_[r] = top;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) o_[r][i] *= keep;
    }
    for (int key = 0; key < kKeys; ++key) {
      float value[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) value[i] = v[key * kD + lane + kWarp * i];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float weight = __shfl_sync(kAllLanes, s[r], key);
        if (kMasked && !visible(r, key0 + key)) continue;  // 0 times what nobody vouches for may be NaN
#pragma unroll
        for (int i = 0; i < kColumns; ++i) o_[r][i] += weight * value[i];
      }
    }
  }

  __device__ void finish() const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row0_ + r >= p_.tokens) continue;
      const bool seen = first_[r] <= last_[r];  // else carried state stays as it is
      const float over = seen ? (sum_[r] > 0 || sum_[r] != sum_[r] ? 1 / sum_[r] : 0) : 1;
      const bool write_state = seen || !p_.has_state;
      if (write_state && lane == 0) p_.lse[state_row(r)] = sum_[r] == 0 ? -INFINITY : top_[r] + logf(sum_[r]);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = lane + kWarp * i;
        if (column >= p_.dim) continue;
        const float value = o_[r][i] * over;
        if (write_state) p_.o[row_offset(r) + column] = value;
        if (p_.out) static_cast<T*>(p_.out)[row_offset(r) + column] = from_f32<T>(value);
      }
    }
  }

 private:
  __device__ bool visible(int r, int key) const { return key >= first_[r] && key <= last_[r]; }
  __device__ std::int64_t state_row(int r) const {
    return (std::int64_t{batch_} * p_.q_heads + head_) * p_.tokens + row0_ + r;
  }
  __device__ std::int64_t row_offset(int r) const {
    return ((std::int64_t{batch_} * p_.tokens + row0_ + r) * p_.q_heads + head_) * p_.dim;
  }

  __device__ void scores(const float* q, const float* key, float (&s)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) s[r] = 0;
#pragma unroll 4
    for (int d = 0; d < kD; d += 4) {
      const auto b = load<4>(key + d);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const auto a = load<4>(q + r * kD + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) s[r] += a.v[j] * b.v[j];
      }
    }
  }

  const Params& p_;
  int batch_, head_, row0_;
  float o_[kRows][kColumns], top_[kRows], sum_[kRows];
  int first_[kRows], last_[kRows];
};

template <class T, int kD>
__global__ void __launch_bounds__(Tile<kD>::kThreads) band_forward_kernel(const __grid_constant__ Params p) {
  using Shape = Tile<kD>;
  extern __shared__ float4 shared[];
  float* q = reinterpret_cast<float*>(shared);
  float* k = q + Shape::kQueries * kD;
  float* v = k + kKeys * Shape::kKeyStride;

  const int batch = blockIdx.z, head = blockIdx.y, kv_head = head / (p.q_heads / p.kv_heads);
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // a causal band's longest rows first
  const int begin = tile * Shape::kQueries, rows = min(Shape::kQueries, p.tokens - begin);
  const std::int64_t q_stride = std::int64_t{p.q_heads} * p.dim, kv_stride = std::int64_t{p.kv_heads} * p.dim;
  const T* q_from = static_cast<const T*>(p.q) + (std::int64_t{batch} * p.tokens + begin) * q_stride + head * p.dim;
  const std::int64_t kv_offset = std::int64_t{batch} * p.keys * kv_stride + kv_head * p.dim;
  load_tile<T, kD, Shape::kThreads>(q, kD, q_from, q_stride, rows, Shape::kQueries, p.dim, p.packed);

  const int warp = threadIdx.x / kWarp;
  Warp<T, kD> state(p, batch, head, begin + warp * Shape::kRows);
  // The bounds never decrease: the block's keys lie between its first row's first and its last row's last one.
  const std::int64_t bound = std::int64_t{batch} * p.tokens + begin;
  const int from = max(p.first[bound], 0) / kKeys * kKeys, to = min(p.last[bound + rows - 1], p.keys - 1);
  for (int key0 = from; key0 <= to; key0 += kKeys) {
    __syncthreads();  // the tile before has been used, and q is there
    const int keys = min(kKeys, p.keys - key0);
    const std::int64_t offset = kv_offset + key0 * kv_stride;
    load_tile<T, kD, Shape::kThreads>(k, Shape::kKeyStride, static_cast<const T*>(p.k) + offset, kv_stride, keys, kKeys,
                                      p.dim, p.packed);
    load_tile<T, kD, Shape::kThreads>(v, kD, static_cast<const T*>(p.v) + offset, kv_stride, keys, kKeys, p.dim,
                                      p.packed);
    __syncthreads();
    const float* warp_q = q + warp * Shape::kRows * kD;
    if (state.sees_all(key0)) state.template visit<false>(warp_q, k, v, key0);
    else if (state.sees(key0)) state.template visit<true>(warp_q, k, v, key0);
  }
  state.finish();
}

template <class T, int kD>
void launch(const Context& ctx, const Params& p, int batches) {
  using Shape = Tile<kD>;
  const auto kernel = band_forward_kernel<T, kD>;
  ANNULUS_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes));
  const dim3 grid(blocks_for(p.tokens, Shape::kQueries), static_cast<unsigned>(p.q_heads),
                  static_cast<unsigned>(batches));
  kernel<<<grid, Shape::kThreads, Shape::kBytes, stream_of(ctx)>>>(p);
  ANNULUS_CUDA_LAUNCHED("band_forward");
}

}  // namespace

void band_forward(Context& ctx, const BandForward& args) {
  const std::int64_t dim = args.q.dim(3);
  ANNULUS_CHECK(dim <= 256, "band_forward on a GPU takes head dimensions up to 256, not " + std::to_string(dim));
  const bool packed = dim % 4 == 0 && aligned16(args.q) && aligned16(args.k) && aligned16(args.v);
  with_gpu_type("band_forward", args.q.dtype, [&](auto tag) {
    using T = decltype(tag);
    const Params p{args.q.data,
                   args.k.data,
                   args.v.data,
                   args.first.as<std::int32_t>(),
                   args.last.as<std::int32_t>(),
                   args.o.as<float>(),
                   args.lse.as<float>(),
                   args.out.data,
                   args.has_state,
                   packed,
                   static_cast<int>(args.q.dim(1)),
                   static_cast<int>(args.k.dim(1)),
                   static_cast<int>(args.q.dim(2)),
                   static_cast<int>(args.k.dim(2)),
                   static_cast<int>(dim),
                   static_cast<float>(args.scale)};
    const int batches = static_cast<int>(args.q.dim(0));
    if (dim <= 64) launch<T, 64>(ctx, p, batches);
    else if (dim <= 128) launch<T, 128>(ctx, p, batches);
    else launch<T, 256>(ctx, p, batches);
  });
}

}  // namespace annulus::attention::cuda::plain
