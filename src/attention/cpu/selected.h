// What the CPU kernels of attention over selected blocks share.
//
// A unit of work is a segment of a (sequence, KV head) pair's tokens. It goes over the blocks of the key buffer once,
// in ascending order, and over a block with all tokens of the segment that selected it (QueryLists): a block's keys and
// values are read once per segment and not once per token, while a segment's state and gradients are its own. The G
// query heads of a token are rows of the products; keys, or channels, lie along vector lanes, so that nothing but the
// keys and values is ever transposed, and that once per call (pack_*).
//
// A row's arithmetic is the same, in the same order, whatever the rows beside it and however tokens are cut into
// segments.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/cpu/strip.h"
#include "attention/cpu/top_lists.h"
#include "attention/select.h"

namespace annulus::attention::cpu {

template <class T>
constexpr std::int64_t whole_vectors(std::int64_t count) {
  return (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

struct SelectedShape : BandShape {
  std::int64_t count, block, blocks;  // n, l', and the number of blocks that touch the buffer
  std::int64_t chunk, chunks, begin[2], first_block[2];

  template <class Args>
  explicit SelectedShape(const Args& args)
      : BandShape(args.q, args.k),
        count(args.selected.dim(3)),
        block(args.select_block),
        blocks((keys + block - 1) / block),
        chunk(args.keys.chunk),
        chunks(args.keys.begin[1] < 0 ? 1 : 2),
        begin{args.keys.begin[0], args.keys.begin[1]},
        first_block{begin[0] / block, begin[1] / block} {}

  std::int64_t list_offset(std::int64_t pair, std::int64_t token) const {  // in selected
    return ((pair / kv_heads * queries + token) * kv_heads + pair % kv_heads) * count;
  }

  template <class T>
  std::int64_t width() const {  // of a row of scores
    return whole_vectors<T>(block);
  }
  template <class T>
  std::int64_t padded_depth() const {
    return whole_vectors<T>(depth);
  }

  // Of block `block` of the buffer: what the tokens start … token see of it. Empty or not.
  KeyRange visible_in(std::int64_t index, std::int64_t start, std::int64_t token) const {
    const std::int64_t row = index * block, c = row < chunk ? 0 : 1, first = begin[c] + row - c * chunk;
    return {std::max<std::int64_t>(start - first, 0), std::min({token - first + 1, block, keys - row})};
  }
  // Where block `index` of the sequence lies in the buffer; −1: it does not.
  std::int64_t block_here(std::int32_t index) const {
    for (std::int64_t c = 0; c < chunks; ++c) {
      const std::int64_t within = index - first_block[c];
      if (within >= 0 && within * block < chunk) return within + c * (chunk / block);
    }
    return -1;
  }

  // Tokens whose rows make one tile of about `rows` rows.
  std::int64_t tile_tokens(std::int64_t rows) const { return std::max<std::int64_t>(rows / group, 1); }

  // Tokens of a segment such that about `rows` rows meet a block when every block is as popular as any other.
  std::int64_t segment_tokens(std::int64_t rows) const {
    constexpr std::int64_t kMaxTokens = 8192;
    const std::int64_t popular = std::max<std::int64_t>(blocks / std::max<std::int64_t>(count, 1), 1);
    return std::clamp<std::int64_t>(rows * popular / group, 1, kMaxTokens);
  }

  int threads() const {  // as threads_of(BandShape)
    constexpr double kParallelProducts = 1 << 20;
    const double products =
        static_cast<double>(pairs() * rows() * std::min(keys, count * block)) * static_cast<double>(depth);
    return products < kParallelProducts ? 1 : omp_get_max_threads();
  }
};

// Cuts memory into aligned pieces. Without memory it only counts.
template <class T>
class Pieces {
 public:
  explicit Pieces(T* memory = nullptr) : memory_(memory) {}

  template <class U = T>
  U* take(std::int64_t count) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    T* const piece = memory_ ? memory_ + used_ : nullptr;
    const auto elements = (count * static_cast<std::int64_t>(sizeof(U)) + std::int64_t{sizeof(T)} - 1) /
                          static_cast<std::int64_t>(sizeof(T));
    used_ += (elements + kLine - 1) / kLine * kLine;
    return reinterpret_cast<U*>(piece);
  }
  std::int64_t used() const { return used_; }

 private:
  T* memory_;
  std::int64_t used_ = 0;
};

// For every block of the buffer the tokens of a segment that see some of it: those that see the whole block, then the
// others; ascending. Counting sort.
class QueryLists {
 public:
  template <class T>
  QueryLists(const SelectedShape& shape, std::int64_t max_tokens, Pieces<T>& pieces)
      : ends_(pieces.template take<std::int32_t>(2 * shape.blocks + 1)),
        slots_(pieces.template take<std::int32_t>(max_tokens * shape.count)),
        tokens_(pieces.template take<std::int32_t>(max_tokens * shape.count)) {}

  void build(const SelectedShape& shape, std::int64_t pair, std::int64_t begin, std::int64_t end,
             const std::int32_t* selected, const std::int32_t* token, const std::int32_t* start) {
    const std::int64_t row = pair / shape.kv_heads * shape.queries;
    std::fill_n(ends_, 2 * shape.blocks + 1, 0);
    std::int32_t* slot = slots_;
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t* list = selected + shape.list_offset(pair, t);
      for (std::int64_t i = 0; i < shape.count; ++i, ++slot) {
        *slot = -1;
        const std::int64_t block = list[i] < 0 ? -1 : shape.block_here(list[i]);
        if (block < 0) continue;
        const KeyRange seen = shape.visible_in(block, start[row + t], token[row + t]);
        if (seen.empty()) continue;
        const bool partial = seen.begin > 0 || seen.end < shape.block;
        *slot = static_cast<std::int32_t>(2 * block + partial);
        ++ends_[*slot + 1];
      }
    }
    for (std::int64_t s = 0; s < 2 * shape.blocks; ++s) ends_[s + 1] += ends_[s];
    // ends_[s] is where list s begins and, when all its tokens are in, where it ends.
    slot = slots_;
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t i = 0; i < shape.count; ++i, ++slot) {
        if (*slot >= 0) tokens_[ends_[*slot]++] = static_cast<std::int32_t>(t);
      }
    }
  }

  struct List {
    const std::int32_t* tokens;
    std::int64_t count;
  };
  List list(std::int64_t block, bool partial) const {
    const std::int64_t slot = 2 * block + partial, begin = slot > 0 ? ends_[slot - 1] : 0;
    return {tokens_ + begin, ends_[slot] - begin};
  }
  bool is_empty(std::int64_t block) const { return ends_[2 * block + 1] == (block > 0 ? ends_[2 * block - 1] : 0); }

 private:
  std::int32_t *ends_, *slots_, *tokens_;
};

// visit(tokens, count, partial) for a block's tokens in tiles of at most `tile` tokens.
template <class Visit>
void for_tiles(const QueryLists& lists, std::int64_t block, std::int64_t tile, const Visit& visit) {
  for (const bool partial : {false, true}) {
    const auto list = lists.list(block, partial);
    for (std::int64_t i = 0; i < list.count; i += tile) {
      visit(list.tokens + i, std::min(tile, list.count - i), partial);
    }
  }
}

// Rows [0, count) in groups of M, the last two of even size; body(integral_constant<size>, first row).
template <int M, class Body>
[[gnu::always_inline]] inline void row_group(std::int64_t size, std::int64_t i, const Body& body) {
  if constexpr (M > 1) {
    if (size < M) return row_group<M - 1>(size, i, body);
  }
  body(std::integral_constant<int, M>{}, i);
}
template <int M, class Body>
[[gnu::always_inline]] inline void for_even_groups(std::int64_t count, const Body& body) {
  std::int64_t i = 0;
  for (; count - i >= 2 * M; i += M) body(std::integral_constant<int, M>{}, i);
  for (std::int64_t left = count - i; left > 0; left = count - i) {
    const std::int64_t size = left > M ? (left + 1) / 2 : left;
    row_group<M>(size, i, body);
    i += size;
  }
}

// The product of weights and columns: for i < rows, in chunks of N vectors from column c,
//   store(i, c, acc): acc[n] = sum over k < count of w(i, k) · columns[k · stride + c + n · lanes],
// w(i, k) = weights[i · width + k], or weights[k · width + i] if kTransposed. columns are aligned and padded.
template <class T, bool kTransposed, int N, class Store>
void multiply_chunk(const T* weights, std::int64_t width, std::int64_t rows, const T* columns, std::int64_t stride,
                    std::int64_t count, std::int64_t c, const Store& store) {
  constexpr int kRows = chunk_rows(N) < 6 ? chunk_rows(N) : 6;
  for_even_groups<kRows>(rows, [&](auto m, std::int64_t i) {
    constexpr int M = decltype(m)::value;
    Vector<T> acc[M][N];
    multiply_block<T, M, N, !kTransposed>(acc, weights + (kTransposed ? i : i * width), width, columns + c, stride,
                                          count);
#pragma GCC unroll 6
    for (int r = 0; r < M; ++r) store(i + r, c, acc[r]);
  });
}
template <class T, bool kTransposed, class Store>
void multiply(const T* weights, std::int64_t width, std::int64_t rows, const T* columns, std::int64_t stride,
              std::int64_t count, std::int64_t padded_columns, const Store& store) {
  for (std::int64_t c = 0; c < padded_columns;) {
    const std::int64_t vectors = std::min<std::int64_t>((padded_columns - c) / kLanes<T>, kChunkVectors);
    const auto chunk = [&](auto n) {
      multiply_chunk<T, kTransposed, decltype(n)::value>(weights, width, rows, columns, stride, count, c, store);
    };
    if constexpr (kChunkVectors == 4) {
      if (vectors == 4) chunk(std::integral_constant<int, 4>{});
      else if (vectors == 3) chunk(std::integral_constant<int, 3>{});
    }
    if (vectors == 2) chunk(std::integral_constant<int, 2>{});
    else if (vectors == 1) chunk(std::integral_constant<int, 1>{});
    c += vectors * kLanes<T>;
  }
}

// A block's keys or values, [D][width], zeros beyond the buffer's end.
template <class T>
void pack_transposed(const SelectedShape& shape, const T* from, std::int64_t pair, std::int64_t block, T* to) {
  const std::int64_t width = shape.width<T>(), first = block * shape.block;
  const std::int64_t count = std::min(shape.block, shape.keys - first);
  const T* rows = from + shape.kv_offset(pair) + first * shape.kv_stride();
  for (std::int64_t d = 0; d < shape.depth; ++d) {
    for (std::int64_t j = 0; j < count; ++j) to[d * width + j] = rows[j * shape.kv_stride() + d];
    std::fill(to + d * width + count, to + (d + 1) * width, T(0));
  }
}

// A block's keys or values, [l'][padded D], zeros beyond the buffer's end.
template <class T>
void pack_rows(const SelectedShape& shape, const T* from, std::int64_t pair, std::int64_t block, T* to) {
  const std::int64_t padded = shape.padded_depth<T>(), first = block * shape.block;
  const T* rows = from + shape.kv_offset(pair) + first * shape.kv_stride();
  for (std::int64_t j = 0; j < shape.block; ++j, to += padded) {
    const std::int64_t depth = first + j < shape.keys ? shape.depth : 0;
    std::copy_n(rows + (depth > 0 ? j * shape.kv_stride() : 0), depth, to);
    std::fill(to + depth, to + padded, T(0));
  }
}

// The rows of a tile's tokens one after the other, `padded` apart.
template <class T>
void gather_rows(const SelectedShape& shape, const T* from, std::int64_t pair, const std::int32_t* tokens,
                 std::int64_t count, T* to) {
  const std::int64_t padded = shape.padded_depth<T>();
  for (std::int64_t i = 0; i < count; ++i) {
    const T* rows = from + shape.query_offset(pair, tokens[i] * shape.group);
    if (padded == shape.depth) {
      std::copy_n(rows, shape.group * padded, to);
      to += shape.group * padded;
      continue;
    }
    for (std::int64_t g = 0; g < shape.group; ++g, to += padded) {
      std::copy_n(rows + g * shape.depth, shape.depth, to);
      std::fill(to + shape.depth, to + padded, T(0));
    }
  }
}

// Which lanes of the vector of keys from `first` lie in `keys`.
template <class T>
inline IndexVector<T> lanes_in(const KeyRange& keys, std::int64_t first) {
  IndexVector<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  const auto begin = static_cast<LaneIndex<T>>(keys.begin - first), end = static_cast<LaneIndex<T>>(keys.end - first);
  return (lane >= begin) & (lane < end);
}

// 2^x for x below the largest exponent; NaN stays NaN.
template <class T>
[[gnu::always_inline]] inline Vector<T> weight_of(Vector<T> x) {
  return x == x ? exp2_of<T>(x) : x;
}

template <class T>
[[gnu::always_inline]] inline T largest_lane(Vector<T> x) {
  IndexVector<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int step = kLanes<T> / 2; step > 0; step /= 2) {
    const Vector<T> other = __builtin_shuffle(x, lane ^ step);
    x = x < other ? other : x;
  }
  return x[0];
}

}  // namespace annulus::attention::cpu
