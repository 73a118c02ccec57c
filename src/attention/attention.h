// A micro-batch's place in the sequence, and dense attention over it. Shapes: B sequences of S tokens, of which this
// rank holds T (parallel/layout.h); R = B·T rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/band.h"
#include "parallel/layout.h"
#include "parallel/mesh.h"

namespace annulus::attention {

// What attention layers know about the tokens they are given: positions are not theirs to guess.
struct SequenceBatch {
  const parallel::SequenceLayout* layout = nullptr;
  parallel::Mesh* mesh = nullptr;
  std::int64_t batch = 0;                // B
  TensorView global_first, global_last;  // [B, T] i32: tokens of the sequence that a local row sees (documents, window)
  TensorView document_start;             // [B, T] i32: first token of a local row's document
  TensorView cos, sin;                   // [R, D/2] stat: RoPE of every local row
  // Ring hops that some rank needs (parallel/ring.h), equal on every rank of the ring: for global_first … global_last,
  // and for everything that documents allow.
  std::vector<int> hops, document_hops;

  std::int64_t local_tokens() const { return layout->local_tokens(); }
  std::int64_t rows() const { return batch * local_tokens(); }
};

// The hops some rank needs. first[s] of every sequence's token t (length S, non-decreasing) is the first token t sees;
// it sees up to itself. `sequences` lists the B sequences' bounds. O(B · P²).
std::vector<int> needed_hops(const parallel::SequenceLayout& layout, std::span<const std::int32_t> first,
                             std::int64_t batch);

// Dense causal attention through the ring (spec/sequence_parallel.md). Collective over the mesh's sequence axis.
// q [B, T, Hq, D] and kv [2, B, T, Hkv, D] (K, then V: one message a hop), rotated, of the working type.
// out [B, T, Hq, D] (working type) and lse [B, Hq, T] (stat) are written for every row.
struct DenseForward {
  TensorView q, kv, out, lse;
};
void dense_forward(Context& ctx, const SequenceBatch& sequence, const DenseForward& args);

// d_out as out; d_q [B, T, Hq, D] and d_kv [2, B, T, Hkv, D] (stat) are overwritten.
struct DenseBackward {
  TensorView q, kv, out, lse, d_out, d_q, d_kv;
};
void dense_backward(Context& ctx, const SequenceBatch& sequence, const DenseBackward& args);

}  // namespace annulus::attention
