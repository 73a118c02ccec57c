// Native sparse attention over a sequence that is spread over ranks (spec/nsa.md; arXiv 2502.11089;
// spec/sequence_parallel.md, NSA layers): its three branches for one query, without the layer's projections,
// compression and gates. Compressed keys and values are gathered (S/d rows), raw ones of the selection go round the
// ring, the window gets w − 1 rows from the chunk before. No rank ever holds K, V of all S tokens.
//
// All functions here are collective over the mesh's sequence axis.
#pragma once

#include "attention/attention.h"
#include "attention/compress.h"
#include "attention/nsa_shape.h"

namespace annulus::attention {

enum Branch : int { kCompressed, kSelected, kWindow, kNumBranches };

// The compressed blocks that this rank computes: those that start in its chunks; the sequence's last chunk has l/d − 1
// fewer than the others.
LocalBlocks local_blocks(const NsaShape& shape, const parallel::SequenceLayout& layout, int rank);

// The `count` rows before or behind each local chunk, from the ranks that hold them. k, v [B, T, Hkv, D]; halo_k,
// halo_v [B, chunks, count, Hkv, D]: of a chunk at the sequence's end they hold anything. P > 1.
enum class HaloSide { before, behind };
void fetch_halo(Context& ctx, const SequenceBatch& sequence, HaloSide side, std::int64_t count, const TensorView& k,
                const TensorView& v, const TensorView& halo_k, const TensorView& halo_v);
// The way back: gradients of the halo are added to d_k, d_v of the ranks that hold those rows.
void return_halo(Context& ctx, const SequenceBatch& sequence, HaloSide side, std::int64_t count,
                 const TensorView& d_halo_k, const TensorView& d_halo_v, const TensorView& d_k, const TensorView& d_v);

// q [B, T, Hq, D] and kv_selected, kv_window [2, B, T, Hkv, D], rotated (the two may be the same); compressed [2, B,
// LocalBlocks::rows(), Hkv, D], this rank's blocks, finished. Written: out[branch] [B, T, Hq, D], lse[branch] [B, Hq,
// T], selected [B, T, Hkv, n] (attention/select.h); with selection_given it is read instead.
struct NsaForward {
  NsaShape shape;
  TensorView q, compressed, kv_selected, kv_window;
  TensorView out[kNumBranches], lse[kNumBranches], selected;
  bool selection_given = false;
};
void nsa_forward(Context& ctx, const SequenceBatch& sequence, const NsaForward& args);

// d_q (the sum over branches), d_compressed, d_kv_selected and d_kv_window (stat) are overwritten; they are four
// buffers. No gradient passes through the selection.
struct NsaBackward {
  NsaShape shape;
  TensorView q, compressed, kv_selected, kv_window;
  TensorView out[kNumBranches], lse[kNumBranches], selected;
  TensorView d_out[kNumBranches];
  TensorView d_q, d_compressed, d_kv_selected, d_kv_window;
};
void nsa_backward(Context& ctx, const SequenceBatch& sequence, const NsaBackward& args);

}  // namespace annulus::attention
