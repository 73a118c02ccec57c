// Dense attention: the banded kernel once a hop, state carried from hop to hop.
#include <algorithm>
#include <cmath>

#include "attention/ring_buffers.h"
#include "ops/ops.h"

namespace annulus::attention {
namespace {

// Bounds of the local rows in the key buffer of rank `source`.
void map_bounds(Context& ctx, const SequenceBatch& sequence, int source, const TensorView& first,
                const TensorView& last) {
  const auto begin = sequence.layout->chunk_begin(source);
  band_bounds(ctx, {.global_first = sequence.global_first,
                    .global_last = sequence.global_last,
                    .first = first,
                    .last = last,
                    .chunk = sequence.layout->chunk(),
                    .chunk_begin = {begin[0], begin[1]}});
}

struct Bounds {
  TensorView first, last;
  Bounds(Context& ctx, const SequenceBatch& sequence)
      : first(ctx.scratch->allocate("band first", DType::i32, sequence.global_first.shape)),
        last(ctx.scratch->allocate("band last", DType::i32, sequence.global_first.shape)) {}
};

}  // namespace

std::vector<int> needed_hops(const parallel::SequenceLayout& layout, std::span<const std::int32_t> first,
                             std::int64_t batch) {
  const int ranks = layout.ranks();
  const std::int64_t chunk = layout.chunk(), tokens = layout.tokens();
  // Is there a query in [query, query + chunk) that sees a key in [key, key + chunk)? Bounds do not decrease, so the
  // first query at or after `key` reaches back furthest.
  auto sees = [&](std::int64_t query, std::int64_t key) {
    if (query < 0 || key < 0) return false;
    const std::int64_t t = std::max(query, key);
    if (t >= query + chunk) return false;
    for (std::int64_t b = 0; b < batch; ++b) {
      if (first[static_cast<std::size_t>(b * tokens + t)] < key + chunk) return true;
    }
    return false;
  };
  std::vector<int> hops{0};
  for (int hop = 1; hop < ranks; ++hop) {
    bool needed = false;
    for (int rank = 0; rank < ranks && !needed; ++rank) {
      for (const auto query : layout.chunk_begin(rank)) {
        for (const auto key : layout.chunk_begin((rank - hop + ranks) % ranks)) needed = needed || sees(query, key);
      }
    }
    if (needed) hops.push_back(hop);
  }
  return hops;
}

void dense_forward(Context& ctx, const SequenceBatch& sequence, const DenseForward& args) {
  const Arena::Scope scope(*ctx.scratch);
  const DType stat = stat_type(args.q.dtype);
  const Bounds bounds(ctx, sequence);
  // The state is carried in stat; where that is the working type the output itself is the state.
  const TensorView o =
      stat == args.out.dtype ? args.out : ctx.scratch->allocate("attention state", stat, args.out.shape);
  bool has_state = false;
  run_ring_forward(ctx, sequence, sequence.hops, args.kv, [&](int source, const TensorView& kv, bool is_last) {
    map_bounds(ctx, sequence, source, bounds.first, bounds.last);
    band_forward(ctx, {.q = args.q,
                       .k = kv[0],
                       .v = kv[1],
                       .first = bounds.first,
                       .last = bounds.last,
                       .o = o,
                       .lse = args.lse,
                       .has_state = has_state,
                       .out = is_last ? args.out : TensorView{},
                       .scale = 1 / std::sqrt(static_cast<double>(args.q.dim(3)))});
    has_state = true;
  });
}

void dense_backward(Context& ctx, const SequenceBatch& sequence, const DenseBackward& args) {
  const Arena::Scope scope(*ctx.scratch);
  const Bounds bounds(ctx, sequence);
  const TensorView delta = ctx.scratch->allocate("attention delta", args.lse.dtype, args.lse.shape);
  band_delta(ctx, {.d_o = args.d_out, .o = args.out, .delta = delta});
  ops::fill(ctx, {.y = args.d_q, .value = 0});
  run_ring_backward(ctx, sequence, sequence.hops, args.kv, args.d_kv,
                    [&](int source, const TensorView& kv, const TensorView& d_kv) {
                      map_bounds(ctx, sequence, source, bounds.first, bounds.last);
                      band_backward(ctx, {.q = args.q,
                                          .k = kv[0],
                                          .v = kv[1],
                                          .first = bounds.first,
                                          .last = bounds.last,
                                          .d_o = args.d_out,
                                          .lse = args.lse,
                                          .delta = delta,
                                          .d_q = args.d_q,
                                          .d_k = d_kv[0],
                                          .d_v = d_kv[1],
                                          .scale = 1 / std::sqrt(static_cast<double>(args.q.dim(3)))});
                    });
}

}  // namespace annulus::attention
