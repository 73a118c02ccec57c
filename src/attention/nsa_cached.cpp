#include "attention/nsa_cached.h"

#include <algorithm>
#include <cmath>

#include "attention/select.h"

namespace annulus::attention {
namespace {

double scale_of(const TensorView& q) { return 1 / std::sqrt(static_cast<double>(q.dim(3))); }

TensorView state_of(Context& ctx, const TensorView& out) {
  const DType stat = stat_type(out.dtype);
  return out.dtype == stat ? out : ctx.scratch->allocate("attention state", stat, out.shape);
}

void band_branch(Context& ctx, const NsaCachedForward& args, Branch branch, const TensorView& k, const TensorView& v,
                 const TensorView& first, const TensorView& last, const TensorView& lse) {
  const Arena::Scope scope(*ctx.scratch);
  band_forward(ctx, {.q = args.q,
                     .k = k,
                     .v = v,
                     .first = first,
                     .last = last,
                     .o = state_of(ctx, args.out[branch]),
                     .lse = lse,
                     .has_state = false,
                     .out = args.out[branch],
                     .scale = scale_of(args.q)});
}

// One token: its blocks are copied together, every KV head's own, and are then a band. Blocks are ascending and the
// last one is the token's own, so that all heads have as many rows.
void selected_of_one(Context& ctx, const NsaCachedForward& args, const TensorView& lse) {
  const Arena::Scope scope(*ctx.scratch);
  const std::int64_t size = args.shape.select_block, own = args.position / size;
  const std::int64_t rows = std::min(args.shape.select_count - 1, own) * size + args.position - own * size + 1;
  const Shape shape{1, rows, args.k.dim(2), args.k.dim(3)};
  const TensorView k = ctx.scratch->allocate("selected k", args.k.dtype, shape);
  const TensorView v = ctx.scratch->allocate("selected v", args.v.dtype, shape);
  gather_blocks(ctx,
                {.k = args.k, .v = args.v, .selected = args.selected, .k_out = k, .v_out = v, .select_block = size});
  band_branch(ctx, args, kSelected, k, v, args.start, args.token, lse);  // bounds beyond the rows are cut
}

void selected_of_many(Context& ctx, const NsaCachedForward& args, const TensorView& lse) {
  const Arena::Scope scope(*ctx.scratch);
  selected_forward(ctx, {.q = args.q,
                         .k = args.k,
                         .v = args.v,
                         .selected = args.selected,
                         .token = args.token,
                         .start = args.start,
                         .o = state_of(ctx, args.out[kSelected]),
                         .lse = lse,
                         .has_state = false,
                         .out = args.out[kSelected],
                         .select_block = args.shape.select_block,
                         .keys = {.chunk = args.k.dim(1)},
                         .scale = scale_of(args.q)});
}

}  // namespace

void nsa_cached_forward(Context& ctx, const NsaCachedForward& args) {
  const Arena::Scope scope(*ctx.scratch);
  const auto bounds = [&] { return ctx.scratch->allocate("nsa bounds", DType::i32, args.token.shape); };
  const TensorView compressed_first = bounds(), compressed_last = bounds(), first = bounds(), last = bounds();
  const TensorView window_first = bounds(), window_last = bounds();
  const TensorView lse =
      ctx.scratch->allocate("branch lse", stat_type(args.q.dtype), {1, args.q.dim(2), args.q.dim(1)});
  nsa_bounds(ctx, {.token = args.token,
                   .start = args.start,
                   .compressed_first = compressed_first,
                   .compressed_last = compressed_last,
                   .window_first = first,
                   .window_last = last,
                   .block = args.shape.block,
                   .stride = args.shape.stride,
                   .num_blocks = args.compressed_k.dim(1),
                   .window = args.shape.window,
                   .chunk = args.k.dim(1)});
  band_branch(ctx, args, kCompressed, args.compressed_k, args.compressed_v, compressed_first, compressed_last, lse);
  select_blocks(ctx, {.q = args.q,
                      .k = args.compressed_k,
                      .first = compressed_first,
                      .last = compressed_last,
                      .lse = lse,
                      .token = args.token,
                      .start = args.start,
                      .selected = args.selected,
                      .block = args.shape.block,
                      .stride = args.shape.stride,
                      .select_block = args.shape.select_block,
                      .init_blocks = args.shape.init_blocks,
                      .local_blocks = args.shape.local_blocks,
                      .scale = scale_of(args.q)});
  if (args.q.dim(1) == 1) selected_of_one(ctx, args, lse);
  else selected_of_many(ctx, args, lse);
  band_bounds(ctx, {.global_first = first,
                    .global_last = last,
                    .first = window_first,
                    .last = window_last,
                    .chunk = args.window_k.dim(1),
                    .chunk_begin = {args.window_begin, -1}});
  band_branch(ctx, args, kWindow, args.window_k, args.window_v, window_first, window_last, lse);
}

}  // namespace annulus::attention
