// Of band_forward_kernel (forward_kernel.cuh): what a block holds in shared memory, and the warp that fills it. Tiles
// of queries, with their bounds, and tiles of keys and of values each go through a pipeline of their own: its consumers
// find a stage full by one barrier and give it back by another.
#pragma once

#include <cuda_bf16.h>

#include "attention/cuda/sm90/forward.h"
#include "attention/cuda/sm90/pipeline.cuh"

namespace annulus::attention::cuda::sm90 {

template <int kD_, int kConsumers_, int kStages_, bool kHoldQ_>
struct ForwardShape {
  static constexpr int kD = kD_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr bool kHoldQ = kHoldQ_;          // consumers keep their queries in registers
  static constexpr int kQueries = kHoldQ ? 1 : 2;  // tiles of them in shared memory
  static constexpr int kRows = 64 * kConsumers, kKeys = kForwardKeys;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kSlabs = kD / 64;
  static constexpr int kQSlab = kRows * 128, kKeySlab = kKeys * 128;  // bytes
  static constexpr int kQBytes = kSlabs * kQSlab, kKeyBytes = kSlabs * kKeySlab;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
};

struct ForwardTile {                        // query rows [row0, row0 + kRows) of one head; row0 < 0: no more tiles
  int batch, head, row0, key_from, key_to;  // keys that any row may see, both included
};

template <class S>
struct alignas(1024) ForwardMemory {
  char q[S::kQueries][S::kQBytes];
  char k[S::kStages][S::kKeyBytes], v[S::kStages][S::kKeyBytes];
  int first[2][S::kRows], last[2][S::kRows];  // within the keys; rows beyond the last repeat it
  ForwardTile tile[2];
  Barrier tile_full[2], tile_empty[2];  // full: with its queries
  Barrier q_read;                       // into registers
  Barrier k_full[S::kStages], k_empty[S::kStages], v_full[S::kStages], v_empty[S::kStages];
};

// Tiles with the same rows of all heads that share keys follow each other; of heads whose keys fit the L2 together, the
// last rows, which see most under a causal band, come first.
__device__ __forceinline__ ForwardTile tile_at(const ForwardParams& p, int index, int rows) {
  const int group = p.q_heads / p.kv_heads, all = p.batches * p.kv_heads;
  const int section = index / (p.row_tiles * p.section_heads * group) * p.section_heads;
  const int rest = index - section * p.row_tiles * group, heads = min(p.section_heads, all - section) * group;
  const int kv = section + rest % heads / group;
  return {kv / p.kv_heads, kv % p.kv_heads * group + rest % group, (p.row_tiles - 1 - rest / heads) * rows, 0, -1};
}

template <class S>
__device__ __forceinline__ void load_bounds(const ForwardParams& p, const ForwardTile& tile, int* first, int* last) {
#pragma unroll
  for (int i = 0; i < S::kRows; i += 32) {
    const int row = i + static_cast<int>(threadIdx.x % 32);
    const std::int64_t at = std::int64_t{tile.batch} * p.tokens + min(tile.row0 + row, p.tokens - 1);
    first[row] = max(p.first[at], 0);
    last[row] = min(p.last[at], p.keys - 1);
  }
}

template <class S>
__device__ __forceinline__ void produce(const ForwardParams& p, ForwardMemory<S>& m) {
  const int lane = threadIdx.x % 32;
  Stage<S::kStages> stage;
  for (Stage<2> slot;; ++slot.uses) {
    int index = 0;
    if (lane == 0) index = atomicAdd(p.next_tile, 1);
    index = __shfl_sync(kAllLanes, index, 0);
    const std::uint32_t at = slot.index();
    wait(&m.tile_empty[at], slot.parity() ^ 1);
    if (index >= p.tiles) {
      if (lane == 0) m.tile[at].row0 = -1;
      arrive(&m.tile_full[at]);
      return;
    }
    ForwardTile tile = tile_at(p, index, S::kRows);
    load_bounds<S>(p, tile, m.first[at], m.last[at]);
    __syncwarp();
    if (lane != 0) {
      arrive(&m.tile_full[at]);
    } else {
      tile.key_from = m.first[at][0];
      tile.key_to = m.last[at][S::kRows - 1];
      m.tile[at] = tile;
      if (S::kHoldQ) wait(&m.q_read, (slot.uses & 1) ^ 1);
      copy_tile<S::kSlabs>(m.q[at % S::kQueries], &p.q, &m.tile_full[at], S::kQSlab, tile.head, tile.row0, tile.batch);
      const int kv_head = tile.head / (p.q_heads / p.kv_heads);
      const int stop = tile.key_from <= tile.key_to ? tile.key_from / S::kKeys : tile.key_to;
      for (int j = tile.key_to >> kForwardKeysLog2; j >= stop && tile.key_from <= tile.key_to; --j, ++stage.uses) {
        const std::uint32_t s = stage.index();
        wait(&m.k_empty[s], stage.parity() ^ 1);
        copy_tile<S::kSlabs>(m.k[s], &p.k, &m.k_full[s], S::kKeySlab, kv_head, j * S::kKeys, tile.batch);
        wait(&m.v_empty[s], stage.parity() ^ 1);
        copy_tile<S::kSlabs>(m.v[s], &p.v, &m.v_full[s], S::kKeySlab, kv_head, j * S::kKeys, tile.batch);
      }
    }
    __syncwarp();
  }
}

}  // namespace annulus::attention::cuda::sm90
