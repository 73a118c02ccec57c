// Halo exchange: rows at the edges of chunks go to the rank that owns the neighbouring chunk
// (spec/sequence_parallel.md, NSA layers). Both layouts; the sequence's chunks are numbered 0 … 2P − 1, a rank's two
// are its slots 0 and 1.
#pragma once

#include "parallel/communicator.h"
#include "parallel/layout.h"

namespace annulus::parallel {

enum class ChunkShift {
  up,   // chunk g gets what chunk g − 1 sends (rows before a chunk; gradients of rows after it)
  down  // chunk g gets what chunk g + 1 sends (rows after a chunk; gradients of rows before it)
};

// Whether the chunk in `slot` of `rank` gets anything: the first (up) and the last (down) of the sequence do not.
bool has_neighbour(const SequenceLayout& layout, int rank, int slot, ChunkShift direction);

// recv[slot] of every chunk = send of its neighbour's slot; all views are contiguous and of one size and
// dtype. recv of a chunk without a neighbour holds anything afterwards: what crosses the sequence's ends. Collective
// over `ring` (the sequence axis, P > 1). At most two messages a rank; with ctx.planning nothing happens.
void shift_chunks(Context& ctx, Communicator& ring, const SequenceLayout& layout, ChunkShift direction,
                  const TensorView (&send)[2], const TensorView (&recv)[2]);

}  // namespace annulus::parallel
