// Of band_backward_kernel (backward_kernel.cuh): what a block holds in shared memory, and the warps around the
// consumers: one takes tiles of keys, one copies, one brings the rows' statistics, one adds to d_q.
#pragma once

#include "attention/cuda/sm90/backward.h"
#include "attention/cuda/sm90/pipeline.cuh"

namespace annulus::attention::cuda::sm90 {

template <int kD_>
struct BackwardShape {
  static constexpr int kD = kD_;
  static constexpr int kRows = kD == 64 ? 128 : 64, kKeys = kBackwardKeys;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kQueries = 3, kOutputs = 2;  // stages of q with the rows' statistics, and of d_o
  static constexpr int kSlabs = kD / 64;
  static constexpr int kRowSlab = kRows * 128, kKeySlab = kKeys * 128;  // bytes
  static constexpr int kRowBytes = kSlabs * kRowSlab, kKeyBytes = kSlabs * kKeySlab;
  static constexpr int kPairBytes = kRows * kKeys * 2, kGradientBytes = kRows * kD * 4;
  static constexpr int kGradientSlabs = kD / 32;  // of d_q
  // Of all threads no more than the 168 that each starts with, else they wait for each other for ever.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

constexpr int kSomeEmpty = 16;
constexpr int kGradientReady = 4;  // the first of two named barriers: a tile of d_q is written, in turn

struct BackwardTile {  // keys [key0, key0 + kKeys) of one KV head
  int batch, kv_head, key0;
  int top, bottom;  // tiles of query rows that the band may join to them, visited from the top down
  int steps;        // tiles of rows times query heads; < 0: no more tiles
  int some_unseen;  // whether a row may be missing that sees a key of these
};

struct RowStatistics {
  float lse, delta;  // times log2 e, times scale; 0 where a row sees nothing
  int first, last;   // within the keys; first > last beyond the last row
};

template <class S>
struct alignas(1024) BackwardMemory {
  char k[S::kKeyBytes], v[S::kKeyBytes];
  char q[S::kQueries][S::kRowBytes], d_o[S::kOutputs][S::kRowBytes];
  char d_s[2][S::kPairBytes];   // [rows, in stored_row()'s order][keys], slabs of 64 keys
  char d_q[S::kGradientBytes];  // slabs of 32 columns
  float lse[S::kQueries][S::kRows], delta[S::kQueries][S::kRows];
  int first[S::kQueries][S::kRows], last[S::kQueries][S::kRows];
  int flags[S::kQueries];  // bit 2 h + w: consumer w masks half h of the rows; kSomeEmpty: a row sees nothing
  BackwardTile tile[2];
  Barrier tile_full[2], tile_empty[2];
  Barrier kv_full, kv_empty;
  Barrier q_full[S::kQueries], q_empty[S::kQueries];  // full: with the statistics
  Barrier d_o_full[S::kOutputs], d_o_empty[S::kOutputs];
  Barrier d_q_empty;
};

// The first of `rows` rows with bounds[row] >= least, by a warp; `rows` where there is none.
__device__ __forceinline__ int first_row(const std::int32_t* bounds, int rows, int least) {
  int low = 0, high = rows;
  while (low < high) {
    const int step = (high - low) / 33 + 1, at = low + (static_cast<int>(threadIdx.x % 32) + 1) * step - 1;
    const int below = __popc(__ballot_sync(kAllLanes, at < high && bounds[at] < least));
    low += below * step;
    high = min(high, low + step - 1);
  }
  return low;
}

// Takes a tile off the counter. The same keys of all heads of a section follow each other, from the first keys on,
// which most rows see under a causal band. A tile visits every tile of rows from whose first key on, up to whose last
// one, it lies, also where no row sees it: d_q's turns count on that.
template <class S>
__device__ __forceinline__ BackwardTile take_tile(const BackwardParams& p) {
  const int key_tiles = (p.keys + S::kKeys - 1) / S::kKeys;
  BackwardTile tile{0, 0, 0, 0, 0, -1, 0};
  while (true) {
    int index = 0;
    if (threadIdx.x % 32 == 0) index = atomicAdd(p.next_tile, 1);
    index = __shfl_sync(kAllLanes, index, 0);
    if (index >= p.tiles) return tile;
    const int section = index / (key_tiles * p.section_heads) * p.section_heads;
    const int rest = index - section * key_tiles, heads = min(p.section_heads, p.batches * p.kv_heads - section);
    const int kv = section + rest % heads;
    tile.batch = kv / p.kv_heads;
    tile.kv_head = kv % p.kv_heads;
    tile.key0 = rest / heads * S::kKeys;
    const std::int32_t* first = p.first + std::int64_t{tile.batch} * p.tokens;
    const std::int32_t* last = p.last + std::int64_t{tile.batch} * p.tokens;
    const int begin = first_row(last, p.tokens, tile.key0), end = first_row(first, p.tokens, tile.key0 + S::kKeys);
    tile.bottom = begin / S::kRows;
    tile.top = end > 0 ? (end - 1) / S::kRows : -1;
    if (begin == p.tokens || tile.top < tile.bottom) continue;
    tile.steps = (tile.top - tile.bottom + 1) * (p.q_heads / p.kv_heads);
    // All are seen if the first row that sees the last key sees them all.
    const int row = first_row(last, p.tokens, min(tile.key0 + S::kKeys, p.keys) - 1);
    tile.some_unseen = row == p.tokens || first[row] > tile.key0;
    return tile;
  }
}

template <class S>
__device__ __forceinline__ void copy_backward(const BackwardParams& p, BackwardMemory<S>& m) {
  Stage<S::kQueries> query;
  Stage<S::kOutputs> output;
  for (Stage<2> slot;; ++slot.uses) {
    wait(&m.tile_full[slot.index()], slot.parity());
    const BackwardTile& tile = m.tile[slot.index()];
    if (tile.steps < 0) return;
    if (threadIdx.x % 32 == 0) {
      wait(&m.kv_empty, (slot.uses & 1) ^ 1);
      arrive_expecting(&m.kv_full, 2 * S::kKeyBytes);
#pragma unroll
      for (int slab = 0; slab < S::kSlabs; ++slab) {
        copy_box(m.k + slab * S::kKeySlab, &p.k, &m.kv_full, 64 * slab, tile.kv_head, tile.key0, tile.batch);
        copy_box(m.v + slab * S::kKeySlab, &p.v, &m.kv_full, 64 * slab, tile.kv_head, tile.key0, tile.batch);
      }
      const int group = p.q_heads / p.kv_heads;
      for (int i = tile.top; i >= tile.bottom; --i) {
        for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head, ++query.uses, ++output.uses) {
          const std::uint32_t to = query.index(), to_output = output.index();
          wait(&m.q_empty[to], query.parity() ^ 1);
          copy_tile<S::kSlabs>(m.q[to], &p.q, &m.q_full[to], S::kRowSlab, head, i * S::kRows, tile.batch);
          wait(&m.d_o_empty[to_output], output.parity() ^ 1);
          copy_tile<S::kSlabs>(m.d_o[to_output], &p.d_o, &m.d_o_full[to_output], S::kRowSlab, head, i * S::kRows,
                               tile.batch);
        }
      }
    }
    __syncwarp();
    arrive(&m.tile_empty[slot.index()]);
  }
}

__device__ __forceinline__ RowStatistics statistics_of(const BackwardParams& p, int batch, int head, int row) {
  if (row >= p.tokens) return {0, 0, p.keys, -1};
  const std::int64_t bound = std::int64_t{batch} * p.tokens + row;
  const std::int64_t at = (std::int64_t{batch} * p.q_heads + head) * p.tokens + row;
  const int first = p.first[bound], last = min(p.last[bound], p.keys - 1);
  if (first > last) return {0, 0, first, last};
  constexpr float kLog2E = 1.4426950408889634f;
  return {p.lse[at] * kLog2E, p.delta[at] * p.scale, first, last};
}

// Takes tiles and brings their rows' statistics. The next tile is taken when all of the last one's rows are under way:
// a tile taken earlier would keep others waiting, for it and for its turns.
template <class S>
__device__ __forceinline__ void bring_statistics(const BackwardParams& p, BackwardMemory<S>& m) {
  const int lane = threadIdx.x % 32, group = p.q_heads / p.kv_heads;
  Stage<S::kQueries> stage;
  for (Stage<2> slot;; ++slot.uses) {
    const BackwardTile tile = take_tile<S>(p);
    wait(&m.tile_empty[slot.index()], slot.parity() ^ 1);
    if (lane == 0) m.tile[slot.index()] = tile;
    arrive(&m.tile_full[slot.index()]);
    if (tile.steps < 0) return;
    for (int i = tile.top; i >= tile.bottom; --i) {
      for (int g = 0; g < group; ++g, ++stage.uses) {
        const std::uint32_t to = stage.index();
        wait(&m.q_empty[to], stage.parity() ^ 1);
        int flags = 0, least_last = 0;
        for (int row = lane; row < S::kRows; row += 32) {
          const RowStatistics own = statistics_of(p, tile.batch, tile.kv_head * group + g, i * S::kRows + row);
          m.lse[to][row] = own.lse;
          m.delta[to][row] = own.delta;
          m.first[to][row] = own.first;
          m.last[to][row] = own.last;
          if (__any_sync(kAllLanes, own.first > own.last && i * S::kRows + row < p.tokens)) flags |= kSomeEmpty;
          if (row % 64 < 32) {
            least_last = __shfl_sync(kAllLanes, own.last, 0);
            continue;
          }
          const int most_first = __shfl_sync(kAllLanes, own.first, 31);
          for (int w = 0; w < S::kConsumers; ++w) {
            const int key0 = tile.key0 + 64 * w;
            if (most_first > key0 || least_last < key0 + 63) flags |= 1 << (row / 64 * 2 + w);
          }
        }
        if (lane == 0) m.flags[to] = flags;
        arrive(&m.q_full[to]);
      }
    }
  }
}

// Adds tiles of d_q that the consumers have written, one a step; two warps take turns, so that one may wait for its
// adds to end while the other begins. In order: to a tile of d_q the tiles of keys that touch it add one after the
// other. They are also taken in that order, and a block finishes a tile before the next: of the tiles at work the first
// never waits for another, so there is always one that ends.
template <class S>
__device__ __forceinline__ void add_query_gradients(const BackwardParams& p, BackwardMemory<S>& m, std::uint32_t own) {
  const int group = p.q_heads / p.kv_heads;
  const bool leader = threadIdx.x % 32 == 0;
  std::uint32_t uses = 0;
  for (Stage<2> slot;; ++slot.uses) {
    wait(&m.tile_full[slot.index()], slot.parity());
    const BackwardTile& tile = m.tile[slot.index()];
    if (tile.steps < 0) return;
    for (int i = tile.top; i >= tile.bottom; --i) {
      const std::int32_t begin = p.first[std::int64_t{tile.batch} * p.tokens + i * S::kRows];
      const int turn = tile.key0 / S::kKeys - max(begin, 0) / S::kKeys;
      for (int g = 0; g < group; ++g, ++uses) {
        if (uses % 2 != own) continue;
        const int head = tile.kv_head * group + g;
        int* turns = p.turns + (std::int64_t{tile.batch} * p.q_heads + head) * p.query_tiles + i;
        if (leader && p.ordered) {
          while (read_acquire(turns) != turn) {
          }
          fence_async_proxy_global();
        }
        __syncwarp();
        named_sync(kGradientReady + static_cast<int>(own), 128 * S::kConsumers + 32);
        if (!leader) continue;
#pragma unroll
        for (int slab = 0; slab < S::kGradientSlabs; ++slab)
          add_box(&p.d_q, m.d_q + slab * S::kRowSlab, 32 * slab, head, i * S::kRows, tile.batch);
        adds_commit();
        adds_read();
        arrive(&m.d_q_empty);
        if (p.ordered) {
          adds_done();  // and visible to ordinary accesses
          add_release(turns, 1);
        }
      }
    }
    __syncwarp();
    arrive(&m.tile_empty[slot.index()]);
  }
}

}  // namespace annulus::attention::cuda::sm90
