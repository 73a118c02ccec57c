// block_mean, unfold_blocks and their transposes. Gradients are gathered: each row sums over the blocks that cover it,
// in ascending order, so that nothing is written by two threads.
#include "attention/compress.h"

#include <algorithm>

#include "ops/cpu/parallel.h"

namespace annulus::attention::cpu {
namespace {

using ops::cpu::for_rows;
using ops::cpu::for_type;

// Where rows and blocks of a call lie. A piece is a chunk of a sequence: sequence · C + chunk.
struct Layout {
  LocalBlocks blocks;
  std::int64_t chunk, halo, kv_heads, depth, pieces;

  Layout(const TensorView& x, const TensorView& halo_rows, const LocalBlocks& blocks_in)
      : blocks(blocks_in),
        chunk(x.dim(1) / blocks.chunks),
        halo(halo_rows.shape.rank() ? halo_rows.dim(2) : 0),
        kv_heads(x.dim(2)),
        depth(x.dim(3)),
        pieces(x.dim(0) * blocks.chunks) {}

  std::int64_t width() const { return kv_heads * depth; }
  std::int64_t length() const { return blocks.block * depth; }  // of a block vector
  // A piece's row, in the chunk or in its halo.
  template <class T>
  T* row(T* x, T* halo_rows, std::int64_t piece, std::int64_t index) const {
    return index < chunk ? x + (piece * chunk + index) * width() : halo_rows + (piece * halo + index - chunk) * width();
  }
  std::int64_t existing(std::int64_t piece) const { return blocks.num_blocks[piece % blocks.chunks]; }
  // Blocks [first, last] that cover a row of a piece.
  std::int64_t first_covering(std::int64_t index) const {
    return index < blocks.block ? 0 : (index - blocks.block) / blocks.stride + 1;
  }
  std::int64_t last_covering(std::int64_t piece, std::int64_t index) const {
    return std::min(index / blocks.stride, existing(piece) - 1);
  }
};

template <class T>
T* data(const TensorView& view) {
  return view.shape.rank() ? view.as<T>() : nullptr;
}

// body(piece, row of the piece, the row's memory) for every row of x and halo.
template <class T, class Body>
void for_token_rows(const Layout& at, T* x, T* halo, std::int64_t cost, const Body& body) {
  const std::int64_t rows = at.chunk + at.halo;
  for_rows(at.pieces * rows, cost,
           [&](std::int64_t i) { body(i / rows, i % rows, at.row(x, halo, i / rows, i % rows)); });
}

template <class T>
void mean_backward(const BlockMeanBackward& args) {
  const Layout at(args.d_x, args.d_halo, args.blocks);
  const T* d_y = args.d_y.as<T>();
  const T share = T(1) / static_cast<T>(at.blocks.block);
  for_token_rows(at, args.d_x.as<T>(), data<T>(args.d_halo), at.width() * at.blocks.block / at.blocks.stride,
                 [&, share](std::int64_t piece, std::int64_t index, T* row) {
                   for (std::int64_t i = at.first_covering(index); i <= at.last_covering(piece, index); ++i) {
                     const T* from = d_y + (piece * at.blocks.per_chunk + i) * at.width();
#pragma omp simd
                     for (std::int64_t e = 0; e < at.width(); ++e) row[e] += share * from[e];
                   }
                 });
}

template <class T>
void fold(const FoldBlocks& args) {
  const Layout at(args.d_x, args.d_halo, args.blocks);
  const T* d_u = args.d_u.as<T>();
  const std::int64_t first = args.first_row, end = first + args.d_u.dim(0);
  for_token_rows(at, args.d_x.as<T>(), data<T>(args.d_halo), at.width() * at.blocks.block / at.blocks.stride,
                 [&](std::int64_t piece, std::int64_t index, T* row) {
                   for (std::int64_t i = at.first_covering(index); i <= at.last_covering(piece, index); ++i) {
                     for (std::int64_t h = 0; h < at.kv_heads; ++h) {
                       const std::int64_t vector = (piece * at.blocks.per_chunk + i) * at.kv_heads + h;
                       if (vector < first || vector >= end) continue;
                       const T* from = d_u + (vector - first) * at.length() + (index - i * at.blocks.stride) * at.depth;
#pragma omp simd
                       for (std::int64_t c = 0; c < at.depth; ++c) row[h * at.depth + c] += from[c];
                     }
                   }
                 });
}

template <class T>
void mean(const BlockMean& args) {
  const Layout at(args.x, args.halo, args.blocks);
  const T *x = args.x.as<T>(), *halo = data<T>(args.halo);
  T* y = args.y.as<T>();
  const T share = T(1) / static_cast<T>(at.blocks.block);
  for_rows(at.pieces * at.blocks.per_chunk, at.width() * at.blocks.block, [&, share](std::int64_t b) {
    const std::int64_t piece = b / at.blocks.per_chunk, i = b % at.blocks.per_chunk;
    T* out = y + b * at.width();
    std::fill_n(out, at.width(), T(0));
    if (i >= at.existing(piece)) return;
    for (std::int64_t j = 0; j < at.blocks.block; ++j) {
      const T* row = at.row(x, halo, piece, i * at.blocks.stride + j);
#pragma omp simd
      for (std::int64_t e = 0; e < at.width(); ++e) out[e] += row[e];
    }
#pragma omp simd
    for (std::int64_t e = 0; e < at.width(); ++e) out[e] *= share;
  });
}

template <class T>
void unfold(const UnfoldBlocks& args) {
  const Layout at(args.x, args.halo, args.blocks);
  const T *x = args.x.as<T>(), *halo = data<T>(args.halo);
  T* u = args.u.as<T>();
  for_rows(args.u.dim(0), at.length(), [&](std::int64_t r) {
    const std::int64_t vector = args.first_row + r, b = vector / at.kv_heads, head = vector % at.kv_heads;
    const std::int64_t piece = b / at.blocks.per_chunk, i = b % at.blocks.per_chunk;
    T* out = u + r * at.length();
    if (i >= at.existing(piece)) {
      std::fill_n(out, at.length(), T(0));
      return;
    }
    for (std::int64_t j = 0; j < at.blocks.block; ++j) {
      std::copy_n(at.row(x, halo, piece, i * at.blocks.stride + j) + head * at.depth, at.depth, out + j * at.depth);
    }
  });
}

}  // namespace

void block_mean(Context&, const BlockMean& args) {
  for_type(args.x, [&](auto type) { mean<decltype(type)>(args); });
}

void block_mean_backward(Context&, const BlockMeanBackward& args) {
  for_type(args.d_x, [&](auto type) { mean_backward<decltype(type)>(args); });
}

void unfold_blocks(Context&, const UnfoldBlocks& args) {
  for_type(args.x, [&](auto type) { unfold<decltype(type)>(args); });
}

void fold_blocks(Context&, const FoldBlocks& args) {
  for_type(args.d_x, [&](auto type) { fold<decltype(type)>(args); });
}

}  // namespace annulus::attention::cpu
