#include "attention/ring_buffers.h"

#include "ops/ops.h"

namespace annulus::attention {
namespace {

TensorView scratch_like(Context& ctx, const char* name, const TensorView& model, bool needed) {
  return needed ? ctx.scratch->allocate(name, model.dtype, model.shape) : TensorView{};
}

}  // namespace

void run_ring_forward(Context& ctx, const SequenceBatch& sequence, const std::vector<int>& hops, const TensorView& kv,
                      const parallel::RingVisit& visit) {
  const TensorView visiting0 = scratch_like(ctx, "visiting kv 0", kv, hops.size() > 1);
  const TensorView visiting1 = scratch_like(ctx, "visiting kv 1", kv, hops.size() > 2);
  parallel::ring_forward(
      ctx, {.ring = sequence.mesh->kv_ring(), .hops = hops, .own = kv, .visiting = {visiting0, visiting1}}, visit);
}

void run_ring_backward(Context& ctx, const SequenceBatch& sequence, const std::vector<int>& hops, const TensorView& kv,
                       const TensorView& d_kv, const parallel::RingGradientVisit& visit) {
  const bool travels = hops.size() > 1;
  const TensorView visiting0 = scratch_like(ctx, "visiting kv 0", kv, travels);
  const TensorView visiting1 = scratch_like(ctx, "visiting kv 1", kv, hops.size() > 2);
  const TensorView partial = scratch_like(ctx, "partial d_kv", d_kv, travels);
  const TensorView travelling0 = scratch_like(ctx, "travelling d_kv 0", d_kv, travels);
  const TensorView travelling1 = scratch_like(ctx, "travelling d_kv 1", d_kv, travels);
  parallel::ring_backward(
      ctx,
      {.ring = sequence.mesh->kv_ring(),
       .gradient_ring = sequence.mesh->dkv_ring(),
       .hops = hops,
       .own = kv,
       .visiting = {visiting0, visiting1},
       .own_gradient = d_kv,
       .partial = partial,
       .travelling = {travelling0, travelling1},
       .zero = [](Context& c, const TensorView& y) { ops::fill(c, {.y = y, .value = 0}); },
       .accumulate = [](Context& c, const TensorView& from,
                        const TensorView& into) { ops::add(c, {.a = from, .b = into, .y = into}); }},
      visit);
}

}  // namespace annulus::attention
