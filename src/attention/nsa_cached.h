// Native sparse attention of new tokens of one sequence whose keys and values are cached (generation): the three
// branches, as nsa_forward computes their rows. One new token reads the compressed rows, its selected blocks and its
// window, nothing else. Not collective.
#pragma once

#include "attention/nsa.h"

namespace annulus::attention {

// T new tokens from `position` on. q [1, T, Hq, D]; token, start [1, T] i32, start 0; compressed_k, compressed_v [1, M,
// Hkv, D], every full block; k, v [1, position + T, Hkv, D], all tokens, for the selection; window_k, window_v [1, W,
// Hkv, D] from token window_begin on, those that the window reaches at least. Written: out[branch] [1, T, Hq, D],
// selected [1, T, Hkv, n].
struct NsaCachedForward {
  NsaShape shape;
  std::int64_t position = 0;
  TensorView q, token, start;
  TensorView compressed_k, compressed_v, k, v, window_k, window_v;
  std::int64_t window_begin = 0;
  TensorView out[kNumBranches], selected;
};
void nsa_cached_forward(Context& ctx, const NsaCachedForward& args);

}  // namespace annulus::attention
