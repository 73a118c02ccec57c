// Of band_forward_kernel (forward_kernel.cuh): a consumer warpgroup, which attends with 64 rows of every tile.
#pragma once

#include "attention/cuda/sm90/forward_producer.cuh"

namespace annulus::attention::cuda::sm90 {

// Statistics of the thread's two rows: weights are exp2(scale_log2 · q·k − offset) with offset = scale_log2 · top, and
// no score is much greater than top; `sum` is over the thread's own columns.
struct RowState {
  float top[2], offset[2], sum[2];
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

__device__ __forceinline__ float own_max(const float (&s)[64], int r) {
  float top[4] = {s[2 * r], s[2 * r + 1], s[4 + 2 * r], s[5 + 2 * r]};
#pragma unroll
  for (int i = 8; i < 64; i += 8) {
    top[0] = fmaxf(top[0], s[i + 2 * r]);
    top[1] = fmaxf(top[1], s[i + 2 * r + 1]);
    top[2] = fmaxf(top[2], s[i + 4 + 2 * r]);
    top[3] = fmaxf(top[3], s[i + 5 + 2 * r]);
  }
  return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}

// Where a thread of the warp has a score that would weigh more than 2^kGrowth, the tops of all its rows rise to their
// greatest scores: true, and `keep` is what earlier sums and outputs are worth now.
constexpr float kGrowth = 8;

__device__ __forceinline__ bool raise(const float (&s)[64], RowState& state, float scale_log2, float (&keep)[2]) {
  const float best[2] = {own_max(s, 0), own_max(s, 1)};
  const float growth = fmaxf(best[0] - state.top[0], best[1] - state.top[1]);  // NaN, of −∞ − −∞, is no growth
  if (!__any_sync(kAllLanes, growth * scale_log2 > kGrowth)) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = fmaxf(quad_max(best[r]), state.top[r]);
    const bool seen = top != -INFINITY;
    keep[r] = seen ? exp2_fast((state.top[r] - top) * scale_log2) : 1.0f;
    state.top[r] = top;
    state.offset[r] = seen ? top * scale_log2 : 0.0f;
    state.sum[r] *= keep[r];
  }
  return true;
}

// Scores become weights.
__device__ __forceinline__ void weigh(float (&s)[64], RowState& state, float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum[2] = {state.sum[r], 0.0f};
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[i + 2 * r + c];
        x = exp2_fast(fmaf(x, scale_log2, -state.offset[r]));
        sum[c] += x;
      }
    }
    state.sum[r] = sum[0] + sum[1];
  }
}

template <class S>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const ForwardParams& p, ForwardMemory<S>& m)
      : p_(p), m_(m), group_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)), thread_(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    for (Stage<2> slot;; ++slot.uses) {
      slot_ = slot.index();
      wait(&m_.tile_full[slot_], slot.parity());
      if (uniform(m_.tile[slot_].row0) < 0) break;
      work();
    }
  }

 private:
  static constexpr int kOut = S::kD / 2;  // floats of o in a thread

  __device__ __forceinline__ int own_row(int r) const {
    return 64 * group_ + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * r;
  }

  __device__ __forceinline__ void work() {
    const ForwardTile& tile = m_.tile[slot_];
    const int *first = m_.first[slot_], *last = m_.last[slot_];
    const int begin = 64 * group_, end = begin + 63;
    const int key_from = uniform(tile.key_from), key_to = uniform(tile.key_to);
    const int own_from = uniform(first[begin]), own_to = uniform(last[end]);
    whole_from_ = (uniform(first[end]) + S::kKeys - 1) / S::kKeys;
    whole_to_ = (uniform(last[begin]) + 1) / S::kKeys - 1;
    const int tiles = key_from <= key_to ? key_to / S::kKeys - key_from / S::kKeys + 1 : 0;
    int above = tiles, mine = 0;  // tiles before this consumer's, and its own
    if (uniform(tile.row0) + begin < p_.tokens && own_from <= own_to) {
      above = key_to / S::kKeys - own_to / S::kKeys;
      mine = own_to / S::kKeys - own_from / S::kKeys + 1;
    }
    RowState state{{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
    float o[kOut];
    skip(above);
    if (mine > 0) {
      attend(o, state, own_to / S::kKeys, mine);
    } else {
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] = 0;
      if (S::kHoldQ) release(&m_.q_read);
    }
    skip(tiles - above - mine);
    finish(o, state);
    arrive(&m_.tile_empty[slot_]);
  }

  __device__ __forceinline__ void await(Barrier* full, Stage<S::kStages> at) const {
    wait(full + at.index(), at.parity());
  }

  __device__ __forceinline__ void skip(int tiles) {
    for (; tiles > 0; --tiles, ++keys_.uses) {
      await(m_.k_full, keys_);  // else two arrivals could fall into one phase
      release(&m_.k_empty[keys_.index()]);
      await(m_.v_full, keys_);
      release(&m_.v_empty[keys_.index()]);
    }
  }

  // Key tiles j, j − 1, … (`count` of them). The exponentials of a tile end a pass of the loop and the wait for the
  // products beside them begins the next: within one block of code the compiler would move the wait before them.
  __device__ __forceinline__ void attend(float (&o)[kOut], RowState& state, int j, int count) {
    float s[64], keep[2] = {1, 1};
    std::uint32_t weights[32], q[S::kHoldQ ? S::kD / 4 : 1];
    if constexpr (S::kHoldQ) {
      load_queries(q);
      release(&m_.q_read);
    }
    await(m_.k_full, keys_);
    scores(s, q);
    mma_wait<0>();
    bool rises = turn_to_weights(s, state, j, keep);
    for (int i = 1; i < count; ++i) {
      --j;
      if (!keys_there_) await(m_.k_full, keys_);
      if (!values_there_) await(m_.v_full, scored(1));
      settle(o, s, weights, i > 1, rises && i > 1, keep);
      scores(s, q);
      add_values(o, weights, i > 1);
      mma_wait<1>();
      rises = turn_to_weights(s, state, j, keep);
    }
    settle(o, s, weights, count > 1, rises && count > 1, keep);
    if (!values_there_) await(m_.v_full, scored(1));
    add_values(o, weights, count > 1);
    mma_wait<0>();
    hold(o);
    release(&m_.v_empty[scored(1).index()]);
  }

  // The tile scored `back` before the one to be scored next.
  __device__ __forceinline__ Stage<S::kStages> scored(std::uint32_t back) const { return {keys_.uses - back}; }

  // The scores of tile j are there: its keys are free, its scores become weights, its values fit for them.
  __device__ __forceinline__ bool turn_to_weights(float (&s)[64], RowState& state, int j, float (&keep)[2]) {
    hold(s);
    release(&m_.k_empty[keys_.index()]);
    ++keys_.uses;
    const bool in_part = j < whole_from_ || j > whole_to_;
    if (in_part) [[unlikely]]
      mask(s, j);
    const bool rises = raise(s, state, p_.scale_log2, keep);
    keys_there_ = has_ended(m_.k_full + keys_.index(), keys_.parity());  // known by the end of the exponentials
    values_there_ = has_ended(m_.v_full + scored(1).index(), scored(1).parity());
    weigh(s, state, p_.scale_log2);
    if (in_part) [[unlikely]]
      scrub(j);
    return rises;
  }

  // Ends the products with the weights before, if they are pending, and puts o and the next weights in place.
  __device__ __forceinline__ void settle(float (&o)[kOut], float (&s)[64], std::uint32_t (&weights)[32], bool pending,
                                         bool rises, const float (&keep)[2]) {
    hold(s);
    mma_wait<0>();
    hold(o);
    hold(s);
    if (pending) release(&m_.v_empty[scored(2).index()]);
    pack(s, weights);
    if (rises) {
#pragma unroll
      for (int e = 0; e < kOut; ++e) o[e] *= keep[e / 2 % 2];
    }
    hold(o);
    hold(weights);
  }

  template <int kWords>
  __device__ __forceinline__ void load_queries(std::uint32_t (&q)[kWords]) const {
    const int row = 64 * group_ + thread_ / 32 * 16 + thread_ % 16, half = thread_ % 32 / 16;
    const std::uint32_t line = shared_address(m_.q[slot_ % S::kQueries]) + row * 128;
#pragma unroll
    for (int step = 0; step < S::kD / 16; ++step)
      load_tiles(q + 4 * step, line + step / 4 * S::kQSlab + ((step % 4 * 2 + half) ^ (row % 8)) * 16);
  }

  template <int kWords>
  __device__ __forceinline__ void scores(float (&s)[64], const std::uint32_t (&q)[kWords]) const {
    const std::uint64_t queries = descriptor_of_columns(shared_address(m_.q[slot_ % S::kQueries]) + 64 * 128 * group_);
    const std::uint64_t keys = descriptor_of_columns(shared_address(m_.k[keys_.index()]));
    hold(s);
    mma_fence();
#pragma unroll
    for (int step = 0; step < S::kD / 16; ++step) {
      const int inside = step % 4 * 32, slab = step / 4;
      const std::uint64_t k = advance(keys, slab * S::kKeySlab + inside);
      if constexpr (S::kHoldQ) mma_registers<0>(s, q + 4 * step, k, step > 0);
      else mma_shared<0>(s, advance(queries, slab * S::kQSlab + inside), k, step > 0);
    }
    mma_commit();
  }

  __device__ __forceinline__ void add_values(float (&o)[kOut], const std::uint32_t (&weights)[32], int add) const {
    const std::uint64_t values = descriptor_of_rows(shared_address(m_.v[scored(1).index()]), S::kKeySlab);
    mma_fence();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step) {
      mma_registers<1>(o, weights + 4 * step, advance(values, step * 2048), step > 0 ? 1 : add);
    }
    mma_commit();
  }

  __device__ __forceinline__ static void pack(const float (&s)[64], std::uint32_t (&weights)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void mask(float (&s)[64], int j) const {
    const int column0 = j * S::kKeys + 2 * (thread_ % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = m_.first[slot_][own_row(r)] - column0, last = m_.last[slot_][own_row(r)] - column0;
#pragma unroll
      for (int i = 2 * r; i < 64; i += i % 2 ? 3 : 1) {
        const int column = 8 * (i / 4) + i % 2;
        if (column < first || column > last) s[i] = -INFINITY;
      }
    }
  }

  // Values that no row of the tile sees count 0 times, and 0 times NaN is NaN: they become 0. Each consumer does so for
  // itself; those that others see are left alone.
  __device__ __forceinline__ void scrub(int j) const {
    const int *first = m_.first[slot_], *last = m_.last[slot_];
    const int from = j * S::kKeys, to = min(from + S::kKeys, p_.keys) - 1;
    if (first[S::kRows - 1] <= from && last[S::kRows - 1] >= to) return;  // the last row sees all of them
    if (first[0] <= from && last[0] >= to) return;
    await(m_.v_full, scored(1));
    const int key = from + thread_;
    int row = -1;  // the last one whose first key is not after this: none sees further
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
      if (row + step < S::kRows && first[row + step] <= key) row += step;
    }
    if (row < 0 || last[row] < key) {
#pragma unroll
      for (int slab = 0; slab < S::kSlabs; ++slab) {
        auto* line = reinterpret_cast<uint4*>(m_.v[scored(1).index()] + slab * S::kKeySlab + thread_ * 128);
#pragma unroll
        for (int i = 0; i < 8; ++i) line[i] = uint4{};
      }
    }
    fence_async_proxy();
    named_sync(1 + group_, 128);
  }

  __device__ __forceinline__ void finish(float (&o)[kOut], const RowState& state) const {
    const ForwardTile tile = m_.tile[slot_];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.row0 + own_row(r);
      const float sum = quad_sum(state.sum[r]);
      // The weights had scale_log2 · top rounded in them: what was lost comes back out of the logarithm.
      const float lost = fmaf(state.top[r], p_.scale_log2, -state.offset[r]);
      float over = sum == 0 ? 0.0f : 1 / sum;
      float lse = sum == 0 ? -INFINITY : fmaf(state.top[r], p_.scale, logf(sum) - kLn2 * lost);
      if (row >= p_.tokens) continue;  // after the quad's sum; a quad shares its rows
      float old_weight = 0;
      const std::int64_t statistic = (std::int64_t{tile.batch} * p_.q_heads + tile.head) * p_.tokens + row;
      const std::int64_t at = ((std::int64_t{tile.batch} * p_.tokens + row) * p_.q_heads + tile.head) * S::kD;
      const bool seen = m_.first[slot_][own_row(r)] <= m_.last[slot_][own_row(r)];
      if (p_.has_state) {
        const float old = p_.lse[statistic];
        if (!seen) {
          over = 0, old_weight = 1;
        } else if (old != -INFINITY) {
          const float top = fmaxf(lse, old), part = expf(lse - top), old_part = expf(old - top);
          over *= part / (part + old_part);
          old_weight = old_part / (part + old_part);
          lse = top + logf(part + old_part);
        }
      }
      const bool write_state = seen || !p_.has_state;
      if (write_state && thread_ % 4 == 0) p_.lse[statistic] = lse;
      write_row(o, r, at, over, old_weight, write_state);
    }
  }

  // o of row r, two columns in every eight: over · o + old_weight · what the state holds.
  __device__ __forceinline__ void write_row(float (&o)[kOut], int r, std::int64_t at, float over, float old_weight,
                                            bool write_state) const {
    const int c = thread_ % 4;
    auto* state = reinterpret_cast<float2*>(p_.o + at) + c;
#pragma unroll
    for (int j = 0; j < S::kD / 8; j += 4) {
      float2 x[4];
      std::uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = {o[4 * (j + i) + 2 * r] * over, o[4 * (j + i) + 2 * r + 1] * over};
        if (old_weight != 0) {
          const float2 old = state[4 * (j + i)];
          x[i].x += old_weight * old.x;
          x[i].y += old_weight * old.y;
        }
        if (write_state) state[4 * (j + i)] = x[i];
        packed[i] = pack_bf16(x[i].x, x[i].y);
      }
      if (p_.out) *reinterpret_cast<uint4*>(p_.out + at + 8 * (j + c)) = transpose_quad(packed, c);
    }
  }

  // Lane c of a quad gets word i of every lane, from words x of its own: the 16 bytes of block c.
  __device__ __forceinline__ static uint4 transpose_quad(const std::uint32_t (&x)[4], int c) {
    const unsigned quad = 0xfu << (threadIdx.x % 32 / 4 * 4);
    std::uint32_t a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // with the neighbour: blocks of the own parity
      const std::uint32_t other = __shfl_xor_sync(quad, c % 2 ? x[i] : x[i + 1], 1);
      a[i] = c % 2 ? other : x[i];
      a[i + 1] = c % 2 ? x[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // with the lane two on
      const std::uint32_t other = __shfl_xor_sync(quad, c / 2 ? a[i] : a[i + 2], 2);
      b[i] = c / 2 ? other : a[i];
      b[i + 2] = c / 2 ? a[i + 2] : other;
    }
    return {b[0], b[1], b[2], b[3]};
  }

  static constexpr float kLn2 = 0.6931471805599453f;

  const ForwardParams& p_;
  ForwardMemory<S>& m_;
  const int group_, thread_;
  std::uint32_t slot_ = 0;
  Stage<S::kStages> keys_;  // the tile to be scored next
  bool keys_there_ = false, values_there_ = false;
  int whole_from_ = 0, whole_to_ = -1;  // key tiles that all of this consumer's rows see whole
};

}  // namespace annulus::attention::cuda::sm90
