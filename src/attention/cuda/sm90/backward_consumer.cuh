// Of band_backward_kernel (backward_kernel.cuh): a consumer warpgroup, which owns 64 keys of every tile.
#pragma once

#include "attention/cuda/sm90/backward_producer.cuh"

namespace annulus::attention::cuda::sm90 {

template <class S>
class BackwardConsumer {
 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& p, BackwardMemory<S>& m)
      : p_(p), m_(m), group_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)), thread_(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    for (Stage<2> slot;; ++slot.uses) {
      wait(&m_.tile_full[slot.index()], slot.parity());
      const BackwardTile& tile = m_.tile[slot.index()];
      const int steps = uniform(tile.steps);
      if (steps < 0) break;
      wait(&m_.kv_full, slot.uses & 1);
      if (tile.some_unseen != 0) [[unlikely]]
        scrub_keys(tile);
      work(tile, steps);
      arrive(&m_.tile_empty[slot.index()]);
    }
  }

 private:
  static constexpr int kHalves = S::kRows / 64;  // of a tile of rows, one after the other
  using Pairs = float[32];                       // of the 64 keys with 64 rows, in a thread
  using Packed = std::uint32_t[16];

  using RowSums = float[S::kD / 2];  // of 64 keys or rows, in a thread

  __device__ __forceinline__ void work(const BackwardTile& tile, int steps) {
    RowSums d_k, d_v;
    Pairs s[kHalves], d_q;
#pragma unroll
    for (int i = 0; i < S::kD / 2; ++i) d_k[i] = d_v[i] = 0;
    hold(d_k);
    hold(d_v);
    const int key0 = uniform(tile.key0) + 64 * group_;
    step(s, d_k, d_v, begin_step(s[0]), key0);
    for (int left = steps - 1; left > 0; --left) {  // ptxas wants no product under way where a loop begins anew
      query_gradient(d_q);
      end_step();
      const int flags = begin_step(s[0]);
      wait(&m_.d_q_empty, (output_.uses & 1) ^ 1);
      mma_wait<1>();
      write_query_gradient(d_q);
      step(s, d_k, d_v, flags, key0);
    }
    query_gradient(d_q);
    end_step();
    wait(&m_.d_q_empty, (output_.uses & 1) ^ 1);
    mma_wait<0>();
    release(&m_.kv_empty);
    write_query_gradient(d_q);
    add_gradient(p_.d_k, d_k, tile, key0);
    add_gradient(p_.d_v, d_v, tile, key0);
  }

  // From Sᵀ of its first half, which is under way, to dS in shared memory. dP runs under the exponentials, dV and Sᵀ of
  // the next half under the gradients of the scores, dK while they are exchanged; dQ and Sᵀ of the next step while dQ
  // is written out. What is read from shared memory is asked for before a wait.
  __device__ __forceinline__ void step(Pairs (&s)[kHalves], RowSums& d_k, RowSums& d_v, int flags, int key0) {
    const std::uint32_t row = query_.index(), output = output_.index();
    Pairs d_p;
    Packed weights, gradients[kHalves];
    wait(&m_.d_o_full[output], output_.parity());
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row0 = 64 * half;
      const bool in_part = (flags >> (2 * half + group_) & 1) != 0;
      pair_products(d_p, m_.v, m_.d_o[output], half);
      float2 of_rows[8];
      load_of_rows(of_rows, m_.lse[row] + row0);
      mma_wait<1>();
      hold(s[half]);
      if (in_part) [[unlikely]]
        mask(s[half], -INFINITY, row, row0, key0);
      weigh(s[half], of_rows);
      pack(s[half], weights);
      if ((flags & kSomeEmpty) != 0) [[unlikely]]
        scrub_rows(row, output);
      add_row_products(d_v, weights, m_.d_o[output], half);
      load_of_rows(of_rows, m_.delta[row] + row0);
      mma_wait<1>();
      hold(d_p);
      if (half + 1 < kHalves) pair_products(s[half + 1], m_.k, m_.q[row], half + 1);
      if (in_part) [[unlikely]]
        mask(d_p, 0, row, row0, key0);
      differentiate(s[half], d_p, of_rows);
      pack(d_p, gradients[half]);
      store_pairs(gradients[half], half);
      add_row_products(d_k, gradients[half], m_.q[row], half);
    }
    fence_async_proxy();
    named_sync(1, 128 * S::kConsumers);
    mma_wait<0>();
    hold(d_k);
    hold(d_v);
  }

  // Its rows are of no use any more.
  __device__ __forceinline__ void end_step() {
    release(&m_.q_empty[query_.index()]);
    release(&m_.d_o_empty[output_.index()]);
    ++query_.uses;
  }

  // Issues Sᵀ of the step's first half; its flags.
  __device__ __forceinline__ int begin_step(Pairs& s) const {
    const std::uint32_t row = query_.index();
    wait(&m_.q_full[row], query_.parity());
    const int flags = m_.flags[row];
    pair_products(s, m_.k, m_.q[row], 0);
    return uniform(flags);
  }

  // [64 keys x 64 rows] = keys · rowsᵀ, of k and q or of v and d_o.
  __device__ __forceinline__ void pair_products(Pairs& d, const char* keys, const char* rows, int half) const {
    const std::uint64_t a = descriptor_of_columns(shared_address(keys) + 64 * 128 * group_);
    const std::uint64_t b = descriptor_of_columns(shared_address(rows) + 64 * 128 * half);
    hold(d);
    mma_fence();
#pragma unroll
    for (int step = 0; step < S::kD / 16; ++step) {
      const int inside = step % 4 * 32, slab = step / 4;
      mma_shared<0>(d, advance(a, slab * S::kKeySlab + inside), advance(b, slab * S::kRowSlab + inside), step > 0);
    }
    mma_commit();
  }

  // [64 keys x D] += pairs · rows.
  __device__ __forceinline__ void add_row_products(RowSums& d, Packed& pairs, const char* rows, int half) const {
    const std::uint64_t b = descriptor_of_rows(shared_address(rows) + 64 * 128 * half, S::kRowSlab);
    hold(d);
    hold(pairs);
    mma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) mma_registers<1>(d, pairs + 4 * step, advance(b, step * 2048), 1);
    mma_commit();
  }

  // This consumer's half of d_q = dS · K: 64 rows and 64 columns. Of 128 columns it has 64, else of 128 rows.
  __device__ __forceinline__ void query_gradient(Pairs& d) const {
    constexpr bool kByColumns = S::kD == 128;
    const std::uint64_t a =
        descriptor_of_columns(shared_address(m_.d_s[output_.uses & 1]) + (kByColumns ? 0 : 64 * 128 * group_));
    const std::uint64_t b =
        descriptor_of_rows(shared_address(m_.k) + (kByColumns ? S::kKeySlab * group_ : 0), S::kKeySlab);
    hold(d);
    mma_fence();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
      mma_shared<1>(d, advance(a, step / 4 * S::kRowSlab + step % 4 * 32), advance(b, step * 2048), step > 0);
    mma_commit();
  }

  __device__ __forceinline__ int own_key(int r) const { return thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * r; }

  __device__ __forceinline__ void mask(Pairs& x, float value, std::uint32_t row, int row0, int key0) const {
    const int* first = m_.first[row] + row0 + 2 * (thread_ % 4);
    const int* last = m_.last[row] + row0 + 2 * (thread_ % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int2 from = *reinterpret_cast<const int2*>(first + 8 * j),
                 to = *reinterpret_cast<const int2*>(last + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = key0 + own_key(r);
        if (key < from.x || key > to.x) x[4 * j + 2 * r] = value;
        if (key < from.y || key > to.y) x[4 * j + 2 * r + 1] = value;
      }
    }
  }

  // Values of the rows whose pairs this thread has.
  __device__ __forceinline__ void load_of_rows(float2 (&x)[8], const float* from) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = *reinterpret_cast<const float2*>(from + 2 * (thread_ % 4) + 8 * j);
  }

  // Scores become weights.
  __device__ __forceinline__ void weigh(Pairs& s, const float2 (&lse)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        s[4 * j + r] = exp2_fast(fmaf(s[4 * j + r], p_.scale_log2, -lse[j].x));
        s[4 * j + r + 1] = exp2_fast(fmaf(s[4 * j + r + 1], p_.scale_log2, -lse[j].y));
      }
    }
  }

  // d_p becomes scale · weight · (d_p − delta).
  __device__ __forceinline__ void differentiate(const Pairs& weight, Pairs& d_p, const float2 (&delta)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const int i = 4 * j + r;
        d_p[i] = weight[i] * fmaf(d_p[i], p_.scale, -delta[j].x);
        d_p[i + 1] = weight[i + 1] * fmaf(d_p[i + 1], p_.scale, -delta[j].y);
      }
    }
  }

  __device__ __forceinline__ static void pack(const Pairs& s, Packed& packed) {
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  // Row i of eight lies at stored_row(i) in d_s, so that row i of the product is query row product_row(i): with these
  // eight threads' pairs of d_q, written at once, fall into different banks.
  __device__ __forceinline__ static int stored_row(int i) { return i % 2 * 4 + i / 2; }
  __device__ __forceinline__ static int product_row(int i) { return i < 4 ? 2 * i : 2 * i - 7; }

  __device__ __forceinline__ void store_pairs(const Packed& gradients, int half) const {
    const int warp = thread_ / 32, lane = thread_ % 32;
    const int row = lane / 16 * 8 + stored_row(lane % 8), keys = 2 * warp + lane / 8 % 2;  // of 16, 8 keys each
    const std::uint32_t to = shared_address(m_.d_s[output_.uses & 1]) + S::kRowSlab * group_ + (64 * half + row) * 128 +
                             ((keys ^ (row % 8)) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_tiles_transposed(to + 2048 * i, gradients + 4 * i);
  }

  __device__ __forceinline__ void write_query_gradient(Pairs& d_q) {
    hold(d_q);
    constexpr bool kByColumns = S::kD == 128;
    const int row = thread_ / 32 * 16 + product_row(thread_ % 32 / 4) + (kByColumns ? 0 : 64 * group_);
    const std::uint32_t to = shared_address(m_.d_q) + (kByColumns ? 2 * S::kRowSlab * group_ : 0) + row * 128 +
                             (thread_ % 4 * 8 ^ row % 8 * 16);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t at = (to ^ (j % 4 * 32)) + j / 4 * S::kRowSlab;
      store_pair(at, d_q[4 * j], d_q[4 * j + 1]);
      store_pair(at + 1024, d_q[4 * j + 2], d_q[4 * j + 3]);
    }
    fence_async_proxy();
    named_arrive(kGradientReady + static_cast<int>(output_.uses % 2), 128 * S::kConsumers + 32);
    ++output_.uses;
  }

  // No other block adds to these keys.
  __device__ __forceinline__ void add_gradient(float* to, const RowSums& d, const BackwardTile& tile, int key0) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = key0 + own_key(r);
      if (key >= p_.keys) continue;
      float* row =
          to + ((std::int64_t{tile.batch} * p_.keys + key) * p_.kv_heads + tile.kv_head) * S::kD + 2 * (thread_ % 4);
#pragma unroll
      for (int j = 0; j < S::kD / 8; ++j) add_pair(row + 8 * j, d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
    }
  }

  // What nobody vouches for counts 0 times, and 0 times NaN is NaN: keys that no row sees become 0 …
  __device__ __forceinline__ void scrub_keys(const BackwardTile& tile) const {
    const int row = 64 * group_ + thread_ / 2, key = tile.key0 + row;  // two threads a key
    const std::int32_t* first = p_.first + std::int64_t{tile.batch} * p_.tokens;
    int low = 0, high = p_.tokens;  // the first row that begins after the key
    while (low < high) {
      const int middle = (low + high) / 2;
      if (first[middle] > key) high = middle;
      else low = middle + 1;
    }
    if (low == 0 || p_.last[std::int64_t{tile.batch} * p_.tokens + low - 1] < key) {
#pragma unroll
      for (int slab = 0; slab < S::kSlabs; ++slab) {
        auto* line = reinterpret_cast<uint4*>(m_.k + slab * S::kKeySlab + row * 128) + thread_ % 2 * 4;
        for (int i = 0; i < 4; ++i) line[i] = uint4{};
      }
    }
    fence_async_proxy();  // the barrier before the first product with all keys follows
  }

  // … and rows that see no key.
  __device__ __forceinline__ void scrub_rows(std::uint32_t query, std::uint32_t output) const {
    for (int row = thread_; row < S::kRows; row += 128) {
      if (m_.first[query][row] <= m_.last[query][row]) continue;
#pragma unroll
      for (int slab = 0; slab < S::kSlabs; ++slab) {
        auto* q = reinterpret_cast<uint4*>(m_.q[query] + slab * S::kRowSlab + row * 128);
        auto* d_o = reinterpret_cast<uint4*>(m_.d_o[output] + slab * S::kRowSlab + row * 128);
        for (int i = 0; i < 8; ++i) q[i] = d_o[i] = uint4{};
      }
    }
    fence_async_proxy();
    named_sync(2 + group_, 128);
  }

  const BackwardParams& p_;
  BackwardMemory<S>& m_;
  const int group_, thread_;
  Stage<S::kQueries> query_;   // the step whose scores come next
  Stage<S::kOutputs> output_;  // the step whose d_q is not written yet
};

}  // namespace annulus::attention::cuda::sm90
