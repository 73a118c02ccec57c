// The ring (parallel/ring.h) with its visiting and travelling buffers taken from the Context's scratch arena, which the
// caller's Scope gives back.
#pragma once

#include "attention/attention.h"
#include "parallel/ring.h"

namespace annulus::attention {

// kv [2, B, T, Hkv, D] goes round; visit as in ring.h.
void run_ring_forward(Context& ctx, const SequenceBatch& sequence, const std::vector<int>& hops, const TensorView& kv,
                      const parallel::RingVisit& visit);

// d_kv (stat, shape of kv) is overwritten with the sum of what every visit adds.
void run_ring_backward(Context& ctx, const SequenceBatch& sequence, const std::vector<int>& hops, const TensorView& kv,
                       const TensorView& d_kv, const parallel::RingGradientVisit& visit);

}  // namespace annulus::attention
