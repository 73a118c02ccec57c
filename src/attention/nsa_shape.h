// The sizes of native sparse attention (spec/nsa.md, in its letters), and what follows from them alone.
#pragma once

#include <cstdint>

namespace annulus::attention {

struct NsaShape {
  std::int64_t block = 0, stride = 0;               // l, d
  std::int64_t select_block = 0, select_count = 0;  // l', n
  std::int64_t init_blocks = 0, local_blocks = 0;   // forced, inside n
  std::int64_t window = 0;                          // w

  // M, the compressed blocks of a sequence.
  std::int64_t num_blocks(std::int64_t tokens) const { return tokens < block ? 0 : (tokens - block) / stride + 1; }
  // What a SequenceLayout's chunks must be on several ranks: whole selection blocks, no shorter than the window's halo.
  std::int64_t chunk_multiple() const { return select_block; }
  std::int64_t min_chunk() const { return window > 1 ? window - 1 : 1; }
};

}  // namespace annulus::attention
