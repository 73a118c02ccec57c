#include "parallel/halo.h"

#include "core/device_memory.h"

namespace annulus::parallel {
namespace {

// The slot of a rank's chunk whose neighbour in `direction` is the rank's other chunk, or −1: zigzag's last rank has
// chunks P − 1 and P, and every contiguous rank two neighbours.
int slot_fed_at_home(const SequenceLayout& layout, int rank, ChunkShift direction) {
  const bool adjacent = layout.kind() == LayoutKind::contiguous || rank == layout.ranks() - 1;
  if (!adjacent) return -1;
  return direction == ChunkShift::up ? 1 : 0;
}

}  // namespace

bool has_neighbour(const SequenceLayout& layout, int rank, int slot, ChunkShift direction) {
  const std::int64_t begin = layout.chunk_begin(rank)[static_cast<std::size_t>(slot)];
  return direction == ChunkShift::up ? begin > 0 : begin + layout.chunk() < layout.tokens();
}

void shift_chunks(Context& ctx, Communicator& ring, const SequenceLayout& layout, ChunkShift direction,
                  const TensorView (&send)[2], const TensorView (&recv)[2]) {
  const int ranks = layout.ranks();
  ANNULUS_CHECK(ranks > 1 && ring.size() == ranks, "chunks of {} ranks on a ring of {}", ranks, ring.size());
  const bool up = direction == ChunkShift::up;
  const int home = slot_fed_at_home(layout, ring.rank(), direction);
  if (layout.kind() == LayoutKind::zigzag) {
    // Slot 0 holds chunk r, slot 1 chunk 2P − 1 − r: they move against each other.
    const Handle first = ring.shift(ctx, send[0], recv[0], up ? 1 : ranks - 1);
    const Handle second = ring.shift(ctx, send[1], recv[1], up ? ranks - 1 : 1);
    ring.wait(ctx, first);
    ring.wait(ctx, second);
  } else {
    const int from = up ? 1 : 0;  // the slot at the rank's edge
    ring.wait(ctx, ring.shift(ctx, send[from], recv[1 - from], up ? 1 : ranks - 1));
  }
  if (home >= 0) copy(ctx, send[1 - home], recv[home]);  // over what came round the sequence's end
}

}  // namespace annulus::parallel
