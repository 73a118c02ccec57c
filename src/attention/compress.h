// Pieces of NSA's compression (spec/nsa.md, 1; arXiv 2502.11089, section 3.3.1): blocks of l rows, d apart, become one
// row each. What a layer makes of them (the mean, the mean and an MLP) is built on these and ops/ops.h.
//
// A rank's rows x [B, C·c, Hkv, D] are C = 1 or 2 chunks of c tokens. Block i of a chunk covers the chunk's rows i·d …
// i·d + l − 1; rows past its end are the first of halo [B, C, l − d, Hkv, D], which follows the chunk. Without a halo
// (an empty view) all blocks lie inside. Block tensors are [B, C, N, Hkv, D]; the first num_blocks[chunk] <= N of a
// chunk exist, the others are padding: written as 0, their gradients not read.
// T is f32 or f64 (bf16 on a device), gradients are stat_type(T). Deterministic; not collective.
#pragma once

#include "core/context.h"

namespace annulus::attention {

struct LocalBlocks {
  std::int64_t block = 0, stride = 0;                       // l, d; d divides l
  std::int64_t chunks = 1, per_chunk = 0;                   // C, N
  std::int64_t num_blocks[2] = {0, 0};                      // that exist
  std::int64_t rows() const { return chunks * per_chunk; }  // of a sequence, padding included
};

// y[B, C, N, Hkv, D] (T) = mean of each block's rows.
struct BlockMean {
  TensorView x, halo, y;
  LocalBlocks blocks;
};

// d_x, d_halo (stat) += the gradient of the mean; d_y is T or stat.
struct BlockMeanBackward {
  TensorView d_y, d_x, d_halo;
  LocalBlocks blocks;
};

// Block vectors first_row … first_row + R − 1 of the B·C·N·Hkv (in the order of block tensors) as rows: u[R, l·D], u[r,
// j·D + c] = channel c of the block's row j; 0 for padding.
struct UnfoldBlocks {
  TensorView x, halo, u;
  std::int64_t first_row = 0;
  LocalBlocks blocks;
};

// d_x, d_halo (stat) += the rows d_u[R, l·D] (T or stat) of those block vectors, laid back and summed where they
// overlap.
struct FoldBlocks {
  TensorView d_u, d_x, d_halo;
  std::int64_t first_row = 0;
  LocalBlocks blocks;
};

// What a query row may see in the key buffers of compression and window, [B, T] i32 each, from the row's token and the
// first token of its document.
//   compressed_first = ⌈start/d⌉, compressed_last = min(⌊(token − l + 1)/d⌋, M − 1) (floor): rows of the gathered
//   buffer. window_first, window_last: keys max(start, token − w + 1) … token, as rows of a buffer that holds `halo`
//   tokens before chunk_begin[0], the chunk, then the same of chunk_begin[1] (< 0: there is none).
// Rows of a sequence ascend in token, so that all four bounds never decrease.
struct NsaBounds {
  TensorView token, start;
  TensorView compressed_first, compressed_last, window_first, window_last;
  std::int64_t block = 0, stride = 0, num_blocks = 0;  // l, d, M
  std::int64_t window = 0, halo = 0, chunk = 0;
  std::int64_t chunk_begin[2] = {0, -1};
};

// clang-format off
#define ANNULUS_COMPRESS_OPS(X)              \
  X(block_mean, BlockMean)                   \
  X(block_mean_backward, BlockMeanBackward)  \
  X(unfold_blocks, UnfoldBlocks)             \
  X(fold_blocks, FoldBlocks)                 \
  X(nsa_bounds, NsaBounds)
// clang-format on

#define ANNULUS_DECLARE_OP(name, Args) void name(Context& ctx, const Args& args);
ANNULUS_COMPRESS_OPS(ANNULUS_DECLARE_OP)
namespace cpu {
ANNULUS_COMPRESS_OPS(ANNULUS_DECLARE_OP)
}
namespace cuda {
ANNULUS_COMPRESS_OPS(ANNULUS_DECLARE_OP)
}
#undef ANNULUS_DECLARE_OP

}  // namespace annulus::attention
