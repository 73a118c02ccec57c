// Banded attention backward (FlashAttention-2, arXiv 2307.08691), plain: every product in fp32 on the ordinary units.
// Correct for every shape and type; the fast paths of a GPU family come before it.
//
// With s = scale · q·k, p = exp(s − lse), d_p = d_o·v and d_s = scale · p (d_p − delta):
//   d_q[t] += Σ_s d_s k[s],   d_k[s] += Σ_t d_s q[t],   d_v[s] += Σ_t p d_o[t].
// One kernel in two roles, so that every sum has one owner and one order (no atomics): a block owns a tile of rows of
// one side in shared memory and their gradient in registers, and the rows of the other side that the band joins to them
// visit it tile by tile. Where it owns keys, the queries of all G heads of the group visit.
#include "attention/cuda/band_kernels.h"
#include "core/cuda/kernel.h"

namespace annulus::attention::cuda::plain {

using namespace annulus::cuda;

namespace {

enum class Own { queries, keys };

constexpr int kThreads = 256;
constexpr int kGrid = 16;  // threads along each side of a tile of pairs

struct Params {
  const void *q, *k, *v, *d_o;
  const std::int32_t *first, *last;
  const float *lse, *delta;
  float *d_q, *d_k, *d_v;
  bool packed;
  int tokens, keys, q_heads, kv_heads, dim;
  float scale;
};

template <int kD, Own kSide>
struct Shape {
  static constexpr int kOwn = kD <= 128 ? 64 : 32;  // rows of the owned tile
  static constexpr int kVisit = 32;                 // rows of a visiting tile
  static constexpr int kQueries = kSide == Own::queries ? kOwn : kVisit;
  static constexpr int kGradients = kSide == Own::keys ? 2 : 1;
  // Strides in floats: 16-byte reads of 8 rows, and the writes of a warp's pairs, hit every bank once.
  static constexpr int kRow = kD + 4;
  static constexpr int kPairRow = kOwn + 4;
  static constexpr int kFloats = 2 * (kOwn + kVisit) * kRow + kGradients * kVisit * kPairRow + 4 * kQueries;
  static constexpr int kBytes = kFloats * static_cast<int>(sizeof(float));
  // A thread's part of the gradient: kPart rows, kChunks times 4 columns.
  static constexpr int kPart = 4;
  static constexpr int kColumnThreads = kThreads / (kOwn / kPart);
  static constexpr int kChunks = kD / 4 / kColumnThreads;
};

// rows × dim of a [.., heads, dim] tensor to shared memory as fp32; rows and columns beyond are zero.
template <class T, int kD, int kRows>
__device__ void load_tile(float* to, const T* from, std::int64_t row_stride, int rows, int dim, bool packed) {
  constexpr int kStride = kD + 4;
  if (packed) {
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < kRows * kD; i += kThreads * 4) {
      const int row = i / kD, column = i % kD;
      Pack<float, 4> out{};
      if (row < rows && column < dim) {
        const auto in = load<4>(from + row * row_stride + column);
#pragma unroll
        for (int j = 0; j < 4; ++j) out.v[j] = to_f32(in.v[j]);
      }
      store<4>(to + row * kStride + column, out);
    }
    return;
  }
  for (int i = threadIdx.x; i < kRows * kD; i += kThreads) {
    const int row = i / kD, column = i % kD;
    to[row * kStride + column] = row < rows && column < dim ? to_f32(from[row * row_stride + column]) : 0.0f;
  }
}

// The first row t of [0, rows) with bounds[t] >= least; rows where there is none.
__device__ int lower_bound(const std::int32_t* bounds, int rows, std::int64_t least) {
  int low = 0, high = rows;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (bounds[middle] >= least) high = middle;
    else low = middle + 1;
  }
  return low;
}

template <class T, int kD, Own kSide>
class Block {
 public:
  using S = Shape<kD, kSide>;

  __device__ Block(const Params& p, float* shared, int batch, int own0)
      : p_(p), batch_(batch), own0_(own0), own_rows_(min(S::kOwn, (kKeys ? p.keys : p.tokens) - own0)) {
    own_a_ = shared;                            // k or q
    own_b_ = own_a_ + S::kOwn * S::kRow;        // v or d_o
    visit_a_ = own_b_ + S::kOwn * S::kRow;      // q or k
    visit_b_ = visit_a_ + S::kVisit * S::kRow;  // d_o or v
    d_s_ = visit_b_ + S::kVisit * S::kRow;      // [visiting row][owned row]
    p_pairs_ = d_s_ + (S::kGradients - 1) * S::kVisit * S::kPairRow;
    lse_ = d_s_ + S::kGradients * S::kVisit * S::kPairRow;
    delta_ = lse_ + S::kQueries;
    first_ = reinterpret_cast<std::int32_t*>(delta_ + S::kQueries);
    last_ = first_ + S::kQueries;
#pragma unroll
    for (int g = 0; g < S::kGradients; ++g) {
#pragma unroll
      for (int i = 0; i < S::kPart; ++i) {
#pragma unroll
        for (int c = 0; c < 4 * S::kChunks; ++c) gradient_[g][i][c] = 0;
      }
    }
  }

  __device__ void run_keys(int kv_head) {
    const int group = p_.q_heads / p_.kv_heads;
    const std::int32_t *first = p_.first + bound(0), *last = p_.last + bound(0);
    const int begin = lower_bound(last, p_.tokens, own0_);
    const int end = lower_bound(first, p_.tokens, std::int64_t{own0_} + own_rows_);
    if (begin >= end) return;
    load_keys<S::kOwn>(own_a_, own_b_, kv_head, own0_, own_rows_);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int row0 = begin; row0 < end; row0 += S::kVisit) {
        const int rows = min(S::kVisit, end - row0);
        __syncthreads();  // the tile before has been used
        load_queries<S::kVisit>(visit_a_, visit_b_, head, row0, rows);
        __syncthreads();
        visit(own0_, first_[rows - 1] <= own0_ && last_[0] >= own0_ + own_rows_ - 1 && rows == S::kVisit);
      }
    }
    add_gradient<0>(p_.d_k, kv_head);
    add_gradient<1>(p_.d_v, kv_head);
  }

  __device__ void run_queries(int head) {
    // The bounds never decrease: the keys lie between the first row's first and the last row's last one.
    const int from = max(p_.first[bound(own0_)], 0), to = min(p_.last[bound(own0_ + own_rows_ - 1)], p_.keys - 1);
    if (from > to) return;
    const int kv_head = head / (p_.q_heads / p_.kv_heads);
    load_queries<S::kOwn>(own_a_, own_b_, head, own0_, own_rows_);
    for (int key0 = from; key0 <= to; key0 += S::kVisit) {
      const int keys = min(S::kVisit, to - key0 + 1);
      __syncthreads();  // the tile before has been used
      load_keys<S::kVisit>(visit_a_, visit_b_, kv_head, key0, keys);
      __syncthreads();
      visit(key0, first_[own_rows_ - 1] <= key0 && last_[0] >= key0 + keys - 1 && keys == S::kVisit);
    }
    add_gradient<0>(p_.d_q, head);
  }

 private:
  static constexpr bool kKeys = kSide == Own::keys;

  __device__ std::int64_t bound(int row) const { return std::int64_t{batch_} * p_.tokens + row; }

  template <int kRows>
  __device__ void load_queries(float* a, float* b, int head, int row0, int rows) {
    const std::int64_t stride = std::int64_t{p_.q_heads} * p_.dim;
    const std::int64_t offset = bound(row0) * stride + std::int64_t{head} * p_.dim;
    load_tile<T, kD, kRows>(a, static_cast<const T*>(p_.q) + offset, stride, rows, p_.dim, p_.packed);
    load_tile<T, kD, kRows>(b, static_cast<const T*>(p_.d_o) + offset, stride, rows, p_.dim, p_.packed);
    if (threadIdx.x >= kRows) return;
    const int row = threadIdx.x;
    const bool real = row < rows;
    const std::int64_t statistic = (std::int64_t{batch_} * p_.q_heads + head) * p_.tokens + row0 + row;
    first_[row] = real ? p_.first[bound(row0 + row)] : 0;
    last_[row] = real ? min(p_.last[bound(row0 + row)], p_.keys - 1) : -1;
    lse_[row] = real ? p_.lse[statistic] : 0;
    delta_[row] = real ? p_.delta[statistic] : 0;
  }

  template <int kRows>
  __device__ void load_keys(float* a, float* b, int kv_head, int key0, int keys) {
    const std::int64_t stride = std::int64_t{p_.kv_heads} * p_.dim;
    const std::int64_t offset = (std::int64_t{batch_} * p_.keys + key0) * stride + std::int64_t{kv_head} * p_.dim;
    load_tile<T, kD, kRows>(a, static_cast<const T*>(p_.k) + offset, stride, keys, p_.dim, p_.packed);
    load_tile<T, kD, kRows>(b, static_cast<const T*>(p_.v) + offset, stride, keys, p_.dim, p_.packed);
  }

  __device__ bool visible(int own, int other, int key0) const {
    const int query = kKeys ? other : own, key = key0 + (kKeys ? own : other);
    return first_[query] <= key && key <= last_[query];
  }

  // `whole`: every pair of real rows is visible, and no visiting row is missing.
  __device__ void visit(int key0, bool whole) {
    if (whole) {
      pairs<false>(key0);
      __syncthreads();
      add_products<false>(key0);
    } else {
      pairs<true>(key0);
      __syncthreads();
      add_products<true>(key0);
    }
  }

  // p and d_s of all pairs: a thread has rows i + kGrid a of the owned tile and j + kGrid b of the visiting one.
  template <bool kMasked>
  __device__ void pairs(int key0) {
    constexpr int kA = S::kOwn / kGrid, kB = S::kVisit / kGrid;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int i = lane / 8 + 4 * (warp / 2), j = lane % 8 + 8 * (warp % 2);
    float s[kA][kB], d_p[kA][kB];
    dot_products<kA, kB>(own_a_ + i * S::kRow, visit_a_ + j * S::kRow, s);
    dot_products<kA, kB>(own_b_ + i * S::kRow, visit_b_ + j * S::kRow, d_p);
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int b = 0; b < kB; ++b) {
        const int own = i + kGrid * a, other = j + kGrid * b, query = kKeys ? other : own;
        float weight = expf(p_.scale * s[a][b] - lse_[query]);
        float d_score = p_.scale * weight * (d_p[a][b] - delta_[query]);
        if (kMasked && !visible(own, other, key0)) weight = d_score = 0;
        d_s_[other * S::kPairRow + own] = d_score;
        if (kKeys) p_pairs_[other * S::kPairRow + own] = weight;
      }
    }
  }

  template <int kA, int kB>
  __device__ static void dot_products(const float* own, const float* visiting, float (&out)[kA][kB]) {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int b = 0; b < kB; ++b) out[a][b] = 0;
    }
#pragma unroll 4
    for (int d = 0; d < kD; d += 4) {
      Pack<float, 4> x[kA], y[kB];
#pragma unroll
      for (int a = 0; a < kA; ++a) x[a] = load<4>(own + kGrid * a * S::kRow + d);
#pragma unroll
      for (int b = 0; b < kB; ++b) y[b] = load<4>(visiting + kGrid * b * S::kRow + d);
#pragma unroll
      for (int a = 0; a < kA; ++a) {
#pragma unroll
        for (int b = 0; b < kB; ++b) {
#pragma unroll
          for (int c = 0; c < 4; ++c) out[a][b] += x[a].v[c] * y[b].v[c];
        }
      }
    }
  }

  __device__ static int part_row() { return threadIdx.x / S::kColumnThreads * S::kPart; }
  __device__ static int part_column(int chunk) {
    return (threadIdx.x % S::kColumnThreads + chunk * S::kColumnThreads) * 4;
  }

  // gradient[own][column] += Σ_visiting pair · row.
  template <bool kMasked>
  __device__ void add_products(int key0) {
#pragma unroll 2
    for (int other = 0; other < S::kVisit; ++other) {
      bool seen[S::kPart];  // 0 times what nobody vouches for may be NaN
#pragma unroll
      for (int i = 0; i < S::kPart; ++i) seen[i] = !kMasked || visible(part_row() + i, other, key0);
#pragma unroll
      for (int g = 0; g < S::kGradients; ++g) {
        const auto weight = load<4>((g == 0 ? d_s_ : p_pairs_) + other * S::kPairRow + part_row());
        const float* row = (g == 0 ? visit_a_ : visit_b_) + other * S::kRow;
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
          const auto x = load<4>(row + part_column(chunk));
#pragma unroll
          for (int i = 0; i < S::kPart; ++i) {
            if (!seen[i]) continue;
#pragma unroll
            for (int c = 0; c < 4; ++c) gradient_[g][i][4 * chunk + c] += weight.v[i] * x.v[c];
          }
        }
      }
    }
  }

  template <int kG>
  __device__ void add_gradient(float* to, int head) const {
    const int heads = kKeys ? p_.kv_heads : p_.q_heads, all_rows = kKeys ? p_.keys : p_.tokens;
#pragma unroll
    for (int i = 0; i < S::kPart; ++i) {
      const int own = part_row() + i;
      if (own >= own_rows_) continue;
      const std::int64_t row = std::int64_t{batch_} * all_rows + own0_ + own;
      float* out = to + (row * heads + head) * p_.dim;
#pragma unroll
      for (int chunk = 0; chunk < S::kChunks; ++chunk) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = part_column(chunk) + c;
          if (column < p_.dim) out[column] += gradient_[kG][i][4 * chunk + c];
        }
      }
    }
  }

  const Params& p_;
  int batch_, own0_, own_rows_;
  float *own_a_, *own_b_, *visit_a_, *visit_b_, *d_s_, *p_pairs_, *lse_, *delta_;
  std::int32_t *first_, *last_;                              // of the queries in shared memory
  float gradient_[S::kGradients][S::kPart][4 * S::kChunks];  // d_k and d_v, or d_q
};

template <class T, int kD, Own kSide>
__global__ void __launch_bounds__(kThreads, 1) band_backward_kernel(const __grid_constant__ Params p) {
  extern __shared__ float4 shared[];
  constexpr int kOwn = Shape<kD, kSide>::kOwn;
  // The longest first: in a causal band the first keys, and the last queries.
  const int tile = static_cast<int>(kSide == Own::keys ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  Block<T, kD, kSide> block(p, reinterpret_cast<float*>(shared), static_cast<int>(blockIdx.z), tile * kOwn);
  if constexpr (kSide == Own::keys) block.run_keys(static_cast<int>(blockIdx.y));
  else block.run_queries(static_cast<int>(blockIdx.y));
}

template <class T, int kD, Own kSide>
void launch(const Context& ctx, const Params& p, int batches) {
  using S = Shape<kD, kSide>;
  const auto kernel = band_backward_kernel<T, kD, kSide>;
  ANNULUS_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes));
  const int rows = kSide == Own::keys ? p.keys : p.tokens, heads = kSide == Own::keys ? p.kv_heads : p.q_heads;
  const dim3 grid(blocks_for(rows, S::kOwn), static_cast<unsigned>(heads), static_cast<unsigned>(batches));
  kernel<<<grid, kThreads, S::kBytes, stream_of(ctx)>>>(p);
  ANNULUS_CUDA_LAUNCHED("band_backward");
}

template <class T, int kD>
void launch_both(const Context& ctx, const Params& p, int batches) {
  launch<T, kD, Own::keys>(ctx, p, batches);
  launch<T, kD, Own::queries>(ctx, p, batches);
}

}  // namespace

void band_backward(Context& ctx, const BandBackward& args) {
  const std::int64_t dim = args.q.dim(3);
  ANNULUS_CHECK(dim <= 256, "band_backward on a GPU takes head dimensions up to 256, not " + std::to_string(dim));
  const bool packed =
      dim % 4 == 0 && aligned16(args.q) && aligned16(args.k) && aligned16(args.v) && aligned16(args.d_o);
  with_gpu_type("band_backward", args.q.dtype, [&](auto tag) {
    using T = decltype(tag);
    const Params p{args.q.data,
                   args.k.data,
                   args.v.data,
                   args.d_o.data,
                   args.first.as<std::int32_t>(),
                   args.last.as<std::int32_t>(),
                   args.lse.as<float>(),
                   args.delta.as<float>(),
                   args.d_q.as<float>(),
                   args.d_k.as<float>(),
                   args.d_v.as<float>(),
                   packed,
                   static_cast<int>(args.q.dim(1)),
                   static_cast<int>(args.k.dim(1)),
                   static_cast<int>(args.q.dim(2)),
                   static_cast<int>(args.k.dim(2)),
                   static_cast<int>(dim),
                   static_cast<float>(args.scale)};
    const int batches = static_cast<int>(args.q.dim(0));
    if (dim <= 64) launch_both<T, 64>(ctx, p, batches);
    else if (dim <= 128) launch_both<T, 128>(ctx, p, batches);
    else launch_both<T, 256>(ctx, p, batches);
  });
}

}  // namespace annulus::attention::cuda::plain
