// The rows beside chunks: packed, exchanged, laid where attention reads them, and their gradients on the way back.
#include "attention/nsa.h"
#include "core/device_memory.h"
#include "ops/ops.h"
#include "parallel/halo.h"

namespace annulus::attention {
namespace {

using parallel::ChunkShift;

struct Packed {
  TensorView send[2], recv[2];  // by slot: [2, B, count, Hkv, D]

  Packed(Context& ctx, const TensorView& k, std::int64_t count) {
    for (auto* views : {&send, &recv}) {
      for (TensorView& view : *views) {
        view = ctx.scratch->allocate("halo", k.dtype, {2, k.dim(0), count, k.dim(2), k.dim(3)});
      }
    }
  }
};

// Rows [first, first + count) of the chunk in `slot` of sequence b of x [B, T, Hkv, D].
TensorView chunk_rows(const SequenceBatch& sequence, const TensorView& x, std::int64_t b, int slot, std::int64_t first,
                      std::int64_t count) {
  return x[b].rows(slot * sequence.layout->chunk() + first, count);
}

std::int64_t edge_begin(const SequenceBatch& sequence, HaloSide side, std::int64_t count) {
  return side == HaloSide::before ? sequence.layout->chunk() - count : 0;  // of the chunk that holds the rows
}

void exchange(Context& ctx, const SequenceBatch& sequence, ChunkShift direction, const Packed& packed) {
  parallel::shift_chunks(ctx, sequence.mesh->kv_ring(), *sequence.layout, direction, packed.send, packed.recv);
}

}  // namespace

void fetch_halo(Context& ctx, const SequenceBatch& sequence, HaloSide side, std::int64_t count, const TensorView& k,
                const TensorView& v, const TensorView& halo_k, const TensorView& halo_v) {
  const Arena::Scope scope(*ctx.scratch);
  const Packed packed(ctx, k, count);
  const std::int64_t begin = edge_begin(sequence, side, count);
  const TensorView* rows[2] = {&k, &v};
  const TensorView* halo[2] = {&halo_k, &halo_v};
  for (int slot = 0; slot < 2; ++slot) {
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t b = 0; b < sequence.batch; ++b) {
        copy(ctx, chunk_rows(sequence, *rows[i], b, slot, begin, count), packed.send[slot][i][b]);
      }
    }
  }
  exchange(ctx, sequence, side == HaloSide::before ? ChunkShift::up : ChunkShift::down, packed);
  for (int slot = 0; slot < 2; ++slot) {
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t b = 0; b < sequence.batch; ++b) {
        copy(ctx, packed.recv[slot][i][b], (*halo[i])[b][slot]);
      }
    }
  }
}

void return_halo(Context& ctx, const SequenceBatch& sequence, HaloSide side, std::int64_t count,
                 const TensorView& d_halo_k, const TensorView& d_halo_v, const TensorView& d_k, const TensorView& d_v) {
  const Arena::Scope scope(*ctx.scratch);
  const Packed packed(ctx, d_k, count);
  const std::int64_t begin = edge_begin(sequence, side, count);
  const TensorView* halo[2] = {&d_halo_k, &d_halo_v};
  const TensorView* rows[2] = {&d_k, &d_v};
  for (int slot = 0; slot < 2; ++slot) {
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t b = 0; b < sequence.batch; ++b) {
        copy(ctx, (*halo[i])[b][slot], packed.send[slot][i][b]);
      }
    }
  }
  const ChunkShift direction = side == HaloSide::before ? ChunkShift::down : ChunkShift::up;
  exchange(ctx, sequence, direction, packed);
  const int rank = sequence.mesh->coordinate("sequence");
  for (int slot = 0; slot < 2; ++slot) {
    if (!parallel::has_neighbour(*sequence.layout, rank, slot, direction)) continue;
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t b = 0; b < sequence.batch; ++b) {
        const TensorView into = chunk_rows(sequence, *rows[i], b, slot, begin, count);
        ops::add(ctx, {.a = into, .b = packed.recv[slot][i][b], .y = into});
      }
    }
  }
}

}  // namespace annulus::attention
