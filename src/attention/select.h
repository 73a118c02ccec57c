// NSA's selection (spec/nsa.md, 2 and 3; arXiv 2502.11089, sections 3.3.2 and 3.4): scores of selection blocks from the
// compressed attention, the n best of them for every query and KV head, and attention over their tokens.
//
// Shapes: q, o, d_o, d_q [B, T, Hq, D]; lse, delta [B, Hq, T]; token, start [B, T] i32: a row's token in the sequence
// and the first token of its document; selected [B, T, Hkv, n] i32: indices of blocks of l' tokens in the whole
// sequence, ascending, then −1. Tokens of a sequence's rows ascend. Query head h belongs to KV head h / G. q, k, v, d_o
// are T (f32, f64; bf16 on a device); o, lse, delta and gradients are stat_type(T). lse is the natural log-sum-exp of
// scale · q·k. Deterministic. Memory grows with T and S, never with their product. ctx.poll() is called between tiles.
// Not collective.
#pragma once

#include "core/context.h"

namespace annulus::attention {

// k [B, M, Hkv, D], first, last [B, T] and lse: keys, bounds and result of the compressed attention. A block's score is
// the sum over the group's heads and over the compressed blocks i that share tiles of d tokens with it, weighted by
// their number, of p[i] = exp(scale·q·k[i] − lse), 0 where i is not visible:
//   score[j] = Σ_{a < l'/d} Σ_{b < l/d} p[(l'/d)·j + a + b − (l/d − 1)].
// Candidates are the blocks that touch start … token. Forced, inside n: the document's first init_blocks blocks, and
// the query's own with the local_blocks − 1 before it, as far as they are candidates. The rest by score, ties to the
// lower index, until n or no candidate is left. A row's selection does not depend on the other rows.
struct SelectBlocks {
  TensorView q, k, first, last, lse;
  TensorView token, start;
  TensorView selected;
  std::int64_t block = 0, stride = 0, select_block = 0;  // l, d, l'; d | l, d | l', l <= l'
  std::int64_t init_blocks = 0, local_blocks = 1;        // init_blocks + local_blocks <= n
  double scale = 1;
};

// Where the keys of a buffer lie in the sequence: `chunk` tokens from begin[0], then `chunk` from begin[1] (ascending;
// begin[1] < 0: there is none). Chunks begin at multiples of l' and, where there are two, are a multiple of it long.
struct KeyChunks {
  std::int64_t chunk = 0;
  std::int64_t begin[2] = {0, -1};
};

// Attention over the tokens start <= s <= token of the selected blocks that lie in this buffer, k, v [B, S', Hkv, D]
// (one ring hop). State as in attention/band.h: o is normalised; −∞ in lse and 0 in o where nothing was seen yet.
struct SelectedForward {
  TensorView q, k, v, selected, token, start;
  TensorView o, lse;
  bool has_state = true;  // false: o and lse hold nothing yet and are written for every row
  TensorView out;         // optional, T: the finished output, for every row, by the last hop; may be o if T is stat
  std::int64_t select_block = 0;
  KeyChunks keys;
  double scale = 1;
};

// Adds this hop's share into d_q, d_k, d_v. lse and delta (band_delta) belong to the whole row (after the last hop).
// Key-stationary over the list of queries of every block, built by counting sort; a block with more queries than a unit
// of work holds is split and its parts are added in order.
struct SelectedBackward {
  TensorView q, k, v, selected, token, start, d_o, lse, delta;
  TensorView d_q, d_k, d_v;
  std::int64_t select_block = 0;
  KeyChunks keys;
  double scale = 1;
};

// The blocks that one row selects, copied together: of KV head h, row i of k_out, v_out [1, R, Hkv, D] is token
// selected[h][i / l'] · l' + i mod l' of k, v [1, S, Hkv, D]. selected [1, 1, Hkv, n] names a block for each of the R
// rows, all inside k.
struct GatherBlocks {
  TensorView k, v, selected, k_out, v_out;
  std::int64_t select_block = 0;
};

// clang-format off
#define ANNULUS_SELECT_OPS(X)              \
  X(select_blocks, SelectBlocks)           \
  X(selected_forward, SelectedForward)     \
  X(selected_backward, SelectedBackward)   \
  X(gather_blocks, GatherBlocks)
// clang-format on

#define ANNULUS_DECLARE_OP(name, Args) void name(Context& ctx, const Args& args);
ANNULUS_SELECT_OPS(ANNULUS_DECLARE_OP)
namespace cpu {
ANNULUS_SELECT_OPS(ANNULUS_DECLARE_OP)
}
namespace cuda {
ANNULUS_SELECT_OPS(ANNULUS_DECLARE_OP)
}
#undef ANNULUS_DECLARE_OP

}  // namespace annulus::attention
