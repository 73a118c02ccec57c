// Banded attention (spec/model.md, "One mask for everything"; FlashAttention-2, arXiv 2307.08691; the merge of partial
// results as in Ring Attention, arXiv 2310.01889): query row t of a sequence sees the key rows first[t] … last[t] of
// the key buffer it is given. Both bounds never decrease in t. One call is one ring hop, a sliding window, packed
// documents or the compressed keys of NSA. A row with first > last sees nothing and leaves carried state untouched.
//
// Shapes: q, o, d_o, d_q [B, T, Hq, D]; k, v, d_k, d_v [B, S, Hkv, D]; lse, delta [B, Hq, T]; first, last [B, T] i32
// rows of the key buffer. G = Hq / Hkv >= 1, query head h reads KV head h / G. q, k, v, d_o are T (f32, f64, bf16); o,
// lse, delta and gradients are stat_type(T). lse is the natural log-sum-exp of scale · q·k. Deterministic, unless asked
// otherwise; memory O(T + S), no T x S matrix. ctx.poll() is called between tiles. Not collective.
#pragma once

#include "core/context.h"

namespace annulus::attention {

struct BandForward {
  TensorView q, k, v, first, last;
  TensorView o, lse;      // the state: o is normalised; −∞ in lse (and 0 in o) where nothing was seen yet
  bool has_state = true;  // false: o and lse hold nothing yet and are written for every row
  TensorView out;         // optional, T: the finished output, for every row, by the last hop; may be o if T is stat
  double scale = 1;       // 1/√D; > 0
};

// delta[b, h, t] = Σ_c d_o[b, t, h, c] · o[b, t, h, c]; o is T or stat.
struct BandDelta {
  TensorView d_o, o, delta;
};

// Adds this hop's share into d_q, d_k, d_v. lse and delta belong to the whole row (after the last hop).
struct BandBackward {
  TensorView q, k, v, first, last, d_o, lse, delta;
  TensorView d_q, d_k, d_v;
  double scale = 1;
  bool ordered =
      true;  // false: a GPU may add to d_q in any order, somewhat faster, and repeats may differ in last bits
};

// Rows of a visiting key buffer from global bounds. The buffer holds `chunk` tokens of the sequence from
// chunk_begin[0], then `chunk` from chunk_begin[1] (ascending; chunk_begin[1] < 0: there is none). For a global bound
// g, rows_before(g) = Σ_c clamp(g − chunk_begin[c], 0, chunk); first = rows_before(global_first), last =
// rows_before(global_last + 1) − 1. All [B, T] i32.
struct BandBounds {
  TensorView global_first, global_last, first, last;
  std::int64_t chunk = 0;
  std::int64_t chunk_begin[2] = {0, -1};
};

#define ANNULUS_BAND_OPS(X) \
  X(band_forward, BandForward) X(band_delta, BandDelta) X(band_backward, BandBackward) X(band_bounds, BandBounds)

#define ANNULUS_DECLARE_OP(name, Args) void name(Context& ctx, const Args& args);
ANNULUS_BAND_OPS(ANNULUS_DECLARE_OP)
namespace cpu {
ANNULUS_BAND_OPS(ANNULUS_DECLARE_OP)
}
namespace cuda {
ANNULUS_BAND_OPS(ANNULUS_DECLARE_OP)
}
#undef ANNULUS_DECLARE_OP

}  // namespace annulus::attention
