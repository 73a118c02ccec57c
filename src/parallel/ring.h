// The ring: visiting buffers go round the ranks of an axis while kernels work on them (Ring Attention, arXiv
// 2310.01889). Knows nothing of attention: it hands every hop's buffer to a callback, one kernel call a hop.
//
// At hop h rank r works on the buffer of rank r − h (mod P). `hops` lists the hops that some rank needs, ascending, 0
// first, equal on every rank; others are not sent: a buffer goes on by the distance between two listed hops at once.
// Never more than two visiting buffers beside the rank's own. Collective over the ring's communicator. With
// ctx.planning callbacks are called for every hop (they plan arenas), with views that hold no data, and nothing is
// sent. Sent: (number of hops − 1) buffers forward; backward as many, and as many gradients as hops (none for one hop).
#pragma once

#include <functional>
#include <vector>

#include "parallel/communicator.h"

namespace annulus::parallel {

std::vector<int> all_hops(int ranks);  // 0, 1, … P − 1

struct RingForward {
  Communicator& ring;
  const std::vector<int>& hops;
  TensorView own;          // K and V, one message
  TensorView visiting[2];  // as `own`; hops − 1 of them (at most two) are used, others may be empty
};
// visit(source, buffer, last): work on the buffer of rank `source`; while it runs, the next hop is in flight.
using RingVisit = std::function<void(int source, const TensorView& buffer, bool last)>;
void ring_forward(Context& ctx, const RingForward& args, const RingVisit& visit);

// Backward: the buffers travel again and a gradient buffer follows each one hop behind, on a ring of its own, and ends
// at home. visit() adds its share into `gradient` (stat type), which holds zeros; the ring adds that to what arrived. A
// sum is ((share of the owner + share at the first hop) + …): one order. While a visit runs, the next buffer and the
// last hop's gradient are in flight.
struct RingBackward {
  Communicator& ring;
  Communicator& gradient_ring;  // another communicator over the same ranks
  const std::vector<int>& hops;
  TensorView own, visiting[2];
  TensorView own_gradient;  // in: anything; out: the sum over all ranks that saw `own`
  TensorView partial,
      travelling[2];  // as own_gradient; empty where unused: partial with one hop, travelling as visiting
  // This folder does not compute: the caller passes the device's own operations (ops::fill with 0, ops::add).
  std::function<void(Context& ctx, const TensorView& tensor)> zero;
  std::function<void(Context& ctx, const TensorView& from, const TensorView& into)> accumulate;  // into += from
};
using RingGradientVisit = std::function<void(int source, const TensorView& buffer, const TensorView& gradient)>;
void ring_backward(Context& ctx, const RingBackward& args, const RingGradientVisit& visit);

}  // namespace annulus::parallel
