// Strips: how the CPU kernels cut banded attention into pieces.
//
// The G query heads that share a KV head are extra query rows: row r of a (sequence, KV head) pair is token r / G, head
// r % G of the group. A strip is kStripWidth consecutive rows, kept transposed so that rows lie along vector lanes: row
// statistics and masks then need no operation across lanes, and K and V are read a scalar at a time. Keys are
// taken in tiles of kTileKeys whose edges are multiples of it, so that what a strip computes does not depend on the
// strips beside it or on the number of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/band.h"
#include "attention/cpu/micro_kernel.h"
#include "core/vector_math.h"

namespace annulus::attention::cpu {

inline constexpr std::int64_t kTileKeys = 96;       // a multiple of every group of rows in micro_kernel.h
inline constexpr std::int64_t kMaxBlockStrips = 4;  // strips that go over the keys together, for reuse in the L2 cache

template <class T>
inline constexpr int kStripWidth = kStripVectors* kLanes<T>;

// e^x for loops over lanes. One product where vector_exp reduces in two steps: arguments here are differences of
// logits, which carry an error of their own size times eps already.
template <class T>
inline T exp_of(T x) {
  return vector_exp2(x * static_cast<T>(1.4426950408889634074));
}

// Sizes of one call, and where its rows lie.
struct BandShape {
  std::int64_t batch, queries, keys, query_heads, kv_heads, group, depth;

  BandShape(const TensorView& q, const TensorView& k)
      : batch(q.dim(0)),
        queries(q.dim(1)),
        keys(k.dim(1)),
        query_heads(q.dim(2)),
        kv_heads(k.dim(2)),
        group(query_heads / std::max<std::int64_t>(kv_heads, 1)),
        depth(q.dim(3)) {}

  std::int64_t pairs() const { return batch * kv_heads; }      // independent problems: (sequence, KV head)
  std::int64_t rows() const { return queries * group; }        // query rows of one pair
  std::int64_t kv_stride() const { return kv_heads * depth; }  // between key rows
  std::int64_t kv_offset(std::int64_t pair) const {
    return (pair / kv_heads) * keys * kv_stride() + (pair % kv_heads) * depth;
  }
  std::int64_t query_offset(std::int64_t pair, std::int64_t row) const {  // in q, o, d_o, d_q
    const std::int64_t token = pair / kv_heads * queries + row / group;
    return (token * query_heads + pair % kv_heads * group + row % group) * depth;
  }
  std::int64_t stat_offset(std::int64_t pair, std::int64_t row) const {  // in lse, delta
    return (pair / kv_heads * query_heads + pair % kv_heads * group + row % group) * queries + row / group;
  }
  std::int64_t bound_offset(std::int64_t pair, std::int64_t row) const {
    return pair / kv_heads * queries + row / group;
  }
};

// Threads of a call: one where a fork and join would cost more than they gain. Needs no data, so that a dry run agrees.
inline int threads_of(const BandShape& shape) {
  constexpr double kParallelProducts = 1 << 20;
  const double products =
      static_cast<double>(shape.pairs() * shape.rows() * shape.keys) * static_cast<double>(shape.depth);
  return products < kParallelProducts ? 1 : omp_get_max_threads();
}

struct KeyRange {
  std::int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// The keys a row sees, cut to the buffer: bounds may point outside.
inline KeyRange visible_keys(const std::int32_t* first, const std::int32_t* last, std::int64_t index,
                             std::int64_t keys) {
  return {std::max<std::int64_t>(first[index], 0), std::min<std::int64_t>(std::int64_t{last[index]} + 1, keys)};
}

// Rows [begin, begin + count) of a pair and what they see. Lanes beyond count see nothing.
template <class T>
struct Strip {
  using Index = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;  // as wide as T, for masks
  static constexpr int kWidth = kStripWidth<T>;

  alignas(64) Index first[kWidth];
  alignas(64) Index last[kWidth];
  KeyRange runs[kWidth];  // what any row sees, ascending, disjoint and not adjacent: keys between runs are never read
  int num_runs = 0;
  std::int64_t pair = 0, begin = 0, count = 0;
  KeyRange common{0, 0};  // what every row sees

  int vectors() const { return static_cast<int>((count + kLanes<T> - 1) / kLanes<T>); }
  bool sees_nothing(std::int64_t row) const { return first[row] > last[row]; }
  KeyRange hull() const { return num_runs > 0 ? KeyRange{runs[0].begin, runs[num_runs - 1].end} : KeyRange{0, 0}; }

  void set(const BandShape& shape, const std::int32_t* first_key, const std::int32_t* last_key, std::int64_t pair_index,
           std::int64_t strip_index) {
    pair = pair_index;
    begin = strip_index * kWidth;
    count = std::min<std::int64_t>(kWidth, shape.rows() - begin);
    num_runs = 0;
    common = {0, shape.keys};
    for (std::int64_t x = 0; x < kWidth; ++x) {
      const KeyRange seen = x < count
                                ? visible_keys(first_key, last_key, shape.bound_offset(pair, begin + x), shape.keys)
                                : KeyRange{0, 0};
      if (x < count) common = {std::max(common.begin, seen.begin), std::min(common.end, seen.end)};
      first[x] = static_cast<Index>(seen.empty() ? 1 : seen.begin);
      last[x] = static_cast<Index>(seen.empty() ? 0 : seen.end - 1);
      if (seen.empty()) continue;
      if (num_runs > 0 && seen.begin <= runs[num_runs - 1].end) {
        runs[num_runs - 1].end = std::max(runs[num_runs - 1].end, seen.end);
      } else {
        runs[num_runs++] = seen;
      }
    }
  }

  // visit(piece, partial) for what the strip sees in the keys of `tile`; `partial`: some row does not see all of it.
  template <class Visit>
  void for_pieces(const KeyRange& tile, const Visit& visit) const {
    for (int i = 0; i < num_runs && runs[i].begin < tile.end; ++i) {
      const KeyRange piece{std::max(runs[i].begin, tile.begin), std::min(runs[i].end, tile.end)};
      if (!piece.empty()) visit(piece, piece.begin < common.begin || piece.end > common.end);
    }
  }
};

// The keys of a tile, cut to `within`.
inline KeyRange tile_keys(std::int64_t tile, const KeyRange& within) {
  return {std::max(tile * kTileKeys, within.begin), std::min((tile + 1) * kTileKeys, within.end)};
}

// A tile's key and value rows, `stride` apart. Rows close together are read where they are. Others are copied for the
// strips of a unit: a power of two of bytes apart they would share a few sets of the L1 cache, and with many KV heads
// they lie on as many pages as there are rows.
template <class T>
struct KeyTile {
  static constexpr std::int64_t kInPlaceBytes = 256;

  const T *k, *v;
  std::int64_t begin, stride;

  static bool in_place(const BandShape& shape) {
    return shape.kv_stride() * static_cast<std::int64_t>(sizeof(T)) <= kInPlaceBytes;
  }
  static std::int64_t stride_of(const BandShape& shape) {  // of copies: an odd number of cache lines
    constexpr std::int64_t kLine = 64 / sizeof(T);
    return ((shape.depth + kLine - 1) / kLine | 1) * kLine;
  }
  static std::int64_t size(const BandShape& shape) {  // elements of memory
    return in_place(shape) ? 0 : 2 * kTileKeys * stride_of(shape);
  }

  KeyTile(const BandShape& shape, const T* k_rows, const T* v_rows, std::int64_t pair, const KeyRange& keys, T* memory)
      : begin(keys.begin) {
    const std::int64_t offset = shape.kv_offset(pair) + keys.begin * shape.kv_stride();
    k = k_rows + offset;
    v = v_rows + offset;
    stride = shape.kv_stride();
    if (in_place(shape)) return;
    const std::int64_t to = stride_of(shape);
    for (std::int64_t j = 0; j < keys.end - keys.begin; ++j) {
      std::copy_n(k + j * stride, shape.depth, memory + j * to);
      std::copy_n(v + j * stride, shape.depth, memory + (kTileKeys + j) * to);
    }
    k = memory;
    v = memory + kTileKeys * to;
    stride = to;
  }
};

// A unit of work: strips [begin, end) of one pair. Units are handed out from the last rows of the sequence to the first
// (with a causal band the longest first), pairs fastest.
struct BlockGrid {
  std::int64_t pairs, strips, block_strips, blocks;

  BlockGrid(std::int64_t pairs_in, std::int64_t rows, std::int64_t width, std::int64_t threads)
      : pairs(pairs_in),
        strips((rows + width - 1) / width),
        block_strips(std::clamp<std::int64_t>(strips * pairs / (threads * 8), 1, kMaxBlockStrips)),
        blocks((strips + block_strips - 1) / block_strips) {}

  std::int64_t units() const { return pairs * blocks; }
  std::int64_t pair(std::int64_t unit) const { return unit % pairs; }
  std::int64_t block(std::int64_t unit) const { return blocks - 1 - unit / pairs; }
  std::int64_t first_strip(std::int64_t block_index) const { return block_index * block_strips; }
  std::int64_t num_strips(std::int64_t block_index) const {
    return std::min(block_strips, strips - first_strip(block_index));
  }
};

// columns[d][x] = factor · row x of the strip, d < depth; lanes that see nothing get 0 (what they hold may be
// anything).
template <class T>
void load_transposed(const Strip<T>& strip, const BandShape& shape, const T* from, T* columns) {
  const std::int64_t width = strip.vectors() * kLanes<T>;
  for (std::int64_t x = 0; x < width; ++x) {
    if (x >= strip.count || strip.sees_nothing(x)) {
      for (std::int64_t d = 0; d < shape.depth; ++d) columns[d * width + x] = 0;
      continue;
    }
    const T* row = from + shape.query_offset(strip.pair, strip.begin + x);
    for (std::int64_t d = 0; d < shape.depth; ++d) columns[d * width + x] = row[d];
  }
}

// The strip's rows one after the other, padded with zeros to padded_depth; rows that see nothing are 0.
template <class T>
void load_rows(const Strip<T>& strip, const BandShape& shape, const T* from, std::int64_t padded_depth, T* rows) {
  for (std::int64_t x = 0; x < strip.count; ++x) {
    const std::int64_t depth = strip.sees_nothing(x) ? 0 : shape.depth;
    const T* row = from + shape.query_offset(strip.pair, strip.begin + x);
    for (std::int64_t d = 0; d < depth; ++d) rows[x * padded_depth + d] = row[d];
    for (std::int64_t d = depth; d < padded_depth; ++d) rows[x * padded_depth + d] = 0;
  }
}

// body(integral_constant<N>) with the number of vectors of a strip.
template <class Body>
void with_vectors(int vectors, const Body& body) {
  if (vectors == 1) body(std::integral_constant<int, 1>{});
  else if (vectors == 2) body(std::integral_constant<int, 2>{});
  else if constexpr (kStripVectors >= 3) body(std::integral_constant<int, 3>{});
}

}  // namespace annulus::attention::cpu
