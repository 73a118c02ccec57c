// The three branches of native sparse attention on the mesh.
#include "attention/nsa.h"

#include <algorithm>
#include <cmath>

#include "attention/ring_buffers.h"
#include "attention/select.h"
#include "core/device_memory.h"
#include "ops/ops.h"

namespace annulus::attention {

LocalBlocks local_blocks(const NsaShape& shape, const parallel::SequenceLayout& layout, int rank) {
  LocalBlocks local{.block = shape.block, .stride = shape.stride};
  const std::int64_t total = shape.num_blocks(layout.tokens());
  if (layout.ranks() == 1) {
    local.per_chunk = local.num_blocks[0] = total;
    return local;
  }
  local.chunks = 2;
  local.per_chunk = layout.chunk() / shape.stride;
  for (int slot = 0; slot < 2; ++slot) {
    const std::int64_t before = layout.chunk_begin(rank)[static_cast<std::size_t>(slot)] / shape.stride;
    local.num_blocks[slot] = std::clamp<std::int64_t>(total - before, 0, local.per_chunk);
  }
  return local;
}

namespace {

double scale_of(const TensorView& q) { return 1 / std::sqrt(static_cast<double>(q.dim(3))); }

// What every branch of a call needs: bounds, and where things lie.
struct Plan {
  const NsaShape& shape;
  const SequenceBatch& sequence;
  const parallel::SequenceLayout& layout;
  LocalBlocks local;
  bool spread;        // over several ranks
  std::int64_t halo;  // rows before each chunk in the window's key buffer
  TensorView compressed_first, compressed_last, window_first, window_last;

  Plan(Context& ctx, const NsaShape& shape_in, const SequenceBatch& sequence_in)
      : shape(shape_in),
        sequence(sequence_in),
        layout(*sequence_in.layout),
        local(local_blocks(shape, layout, sequence_in.mesh->coordinate("sequence"))),
        spread(layout.ranks() > 1),
        halo(spread ? shape.window - 1 : 0) {
    for (auto* bounds : {&compressed_first, &compressed_last, &window_first, &window_last}) {
      *bounds = ctx.scratch->allocate("nsa bounds", DType::i32, sequence.global_last.shape);
    }
    const auto begin = layout.chunk_begin(sequence.mesh->coordinate("sequence"));
    nsa_bounds(ctx, {.token = sequence.global_last,
                     .start = sequence.document_start,
                     .compressed_first = compressed_first,
                     .compressed_last = compressed_last,
                     .window_first = window_first,
                     .window_last = window_last,
                     .block = shape.block,
                     .stride = shape.stride,
                     .num_blocks = shape.num_blocks(layout.tokens()),
                     .window = shape.window,
                     .halo = halo,
                     .chunk = layout.chunk(),
                     .chunk_begin = {begin[0], begin[1]}});
  }

  // visit(local part, part in the order of the sequence) for the pieces of [P][2, B, rows, Hkv, D] and [2, B, P · rows,
  // Hkv, D].
  template <class Visit>
  void for_gathered(const TensorView& by_rank, const TensorView& in_order, const Visit& visit) const {
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const TensorView part = by_rank.rows(rank * by_rank.dim(0) / layout.ranks(), by_rank.dim(0) / layout.ranks());
      const TensorView blocks = part.reshape({2 * sequence.batch, local.rows(), in_order.dim(3) * in_order.dim(4)});
      const TensorView all = in_order.reshape({2 * sequence.batch, in_order.dim(2), blocks.dim(2)});
      for (std::int64_t i = 0; i < blocks.dim(0); ++i) {
        for (int slot = 0; slot < 2; ++slot) {
          const std::int64_t chunk = layout.chunk_begin(rank)[static_cast<std::size_t>(slot)] / layout.chunk();
          visit(blocks[i].rows(slot * local.per_chunk, local.per_chunk),
                all[i].rows(chunk * local.per_chunk, local.per_chunk));
        }
      }
    }
  }

  Shape gathered_shape(const TensorView& compressed) const {
    return {2, compressed.dim(1), compressed.dim(2) * layout.ranks(), compressed.dim(3), compressed.dim(4)};
  }

  // All compressed keys and values of the sequence, in order, in scratch; the local ones themselves on one rank.
  TensorView gather(Context& ctx, const TensorView& compressed) const {
    if (!spread) return compressed;
    const TensorView in_order = ctx.scratch->allocate("compressed kv", compressed.dtype, gathered_shape(compressed));
    const Arena::Scope scope(*ctx.scratch);
    auto& axis = sequence.mesh->device("sequence");
    const TensorView by_rank =
        ctx.scratch->allocate("compressed kv by rank", compressed.dtype, {compressed.numel() * layout.ranks()});
    axis.wait(ctx, axis.all_gather(ctx, compressed.flat(), by_rank));
    for_gathered(by_rank, in_order, [&](const TensorView& part, const TensorView& place) { copy(ctx, part, place); });
    return in_order;
  }

  // d_compressed = this rank's part of the sum of d_in_order over ranks.
  void scatter(Context& ctx, const TensorView& d_in_order, const TensorView& d_compressed) const {
    if (!spread) return;  // they are the same buffer
    const Arena::Scope scope(*ctx.scratch);
    auto& axis = sequence.mesh->device("sequence");
    const TensorView by_rank = ctx.scratch->allocate("d_compressed by rank", d_in_order.dtype, {d_in_order.numel()});
    for_gathered(by_rank, d_in_order, [&](const TensorView& part, const TensorView& place) { copy(ctx, place, part); });
    axis.wait(ctx, axis.reduce_scatter(ctx, by_rank, d_compressed.flat()));
  }

  // The window's keys and values: each chunk with the rows before it, [2, B, chunks · (halo + chunk), Hkv, D].
  TensorView window_buffer(Context& ctx, const TensorView& kv, DType dtype) const {
    if (!spread) return kv;
    return ctx.scratch->allocate("window kv", dtype, {2, kv.dim(1), 2 * (halo + layout.chunk()), kv.dim(3), kv.dim(4)});
  }
  // visit(rows of kv, rows of buffer) for every chunk.
  template <class Visit>
  void for_window_chunks(const TensorView& kv, const TensorView& buffer, const Visit& visit) const {
    const std::int64_t chunk = layout.chunk();
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t b = 0; b < sequence.batch; ++b) {
        for (int slot = 0; slot < 2; ++slot) {
          visit(kv[i][b].rows(slot * chunk, chunk), buffer[i][b].rows(slot * (halo + chunk) + halo, chunk));
        }
      }
    }
  }
  // visit(halo, rows of buffer): halo of K and V each [B, 2, halo, Hkv, D].
  template <class Visit>
  void for_window_halos(const TensorView (&halos)[2], const TensorView& buffer, const Visit& visit) const {
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t b = 0; b < sequence.batch; ++b) {
        for (int slot = 0; slot < 2; ++slot) {
          visit(halos[i][b][slot], buffer[i][b].rows(slot * (halo + layout.chunk()), halo));
        }
      }
    }
  }
  TensorView halo_view(Context& ctx, const TensorView& kv, DType dtype) const {
    return ctx.scratch->allocate("window halo", dtype, {kv.dim(1), 2, halo, kv.dim(3), kv.dim(4)});
  }

  TensorView fetch_window(Context& ctx, const TensorView& kv) const {
    const TensorView buffer = window_buffer(ctx, kv, kv.dtype);
    if (!spread) return buffer;
    for_window_chunks(kv, buffer, [&](const TensorView& rows, const TensorView& place) { copy(ctx, rows, place); });
    if (halo == 0) return buffer;
    const Arena::Scope scope(*ctx.scratch);
    const TensorView halos[2] = {halo_view(ctx, kv, kv.dtype), halo_view(ctx, kv, kv.dtype)};
    fetch_halo(ctx, sequence, HaloSide::before, halo, kv[0], kv[1], halos[0], halos[1]);
    for_window_halos(halos, buffer, [&](const TensorView& rows, const TensorView& place) { copy(ctx, rows, place); });
    return buffer;
  }

  void return_window(Context& ctx, const TensorView& d_buffer, const TensorView& d_kv) const {
    if (!spread) return;  // they are the same buffer
    for_window_chunks(d_kv, d_buffer, [&](const TensorView& rows, const TensorView& place) { copy(ctx, place, rows); });
    if (halo == 0) return;
    const Arena::Scope scope(*ctx.scratch);
    const TensorView halos[2] = {halo_view(ctx, d_kv, d_kv.dtype), halo_view(ctx, d_kv, d_kv.dtype)};
    for_window_halos(halos, d_buffer, [&](const TensorView& rows, const TensorView& place) { copy(ctx, place, rows); });
    return_halo(ctx, sequence, HaloSide::before, halo, halos[0], halos[1], d_kv[0], d_kv[1]);
  }

  KeyChunks keys_of(int source) const {
    const auto begin = layout.chunk_begin(source);
    return {.chunk = layout.chunk(), .begin = {begin[0], begin[1]}};
  }
};

// The carried state of a branch: its output where that has the statistics' type.
TensorView state_of(Context& ctx, const TensorView& out, DType stat) {
  return out.dtype == stat ? out : ctx.scratch->allocate("attention state", stat, out.shape);
}

void band_branch(Context& ctx, const NsaForward& args, Branch branch, const TensorView& kv, const TensorView& first,
                 const TensorView& last) {
  const Arena::Scope scope(*ctx.scratch);
  band_forward(ctx, {.q = args.q,
                     .k = kv[0],
                     .v = kv[1],
                     .first = first,
                     .last = last,
                     .o = state_of(ctx, args.out[branch], args.lse[branch].dtype),
                     .lse = args.lse[branch],
                     .has_state = false,
                     .out = args.out[branch],
                     .scale = scale_of(args.q)});
}

void band_branch_backward(Context& ctx, const NsaBackward& args, Branch branch, const TensorView& kv,
                          const TensorView& first, const TensorView& last, const TensorView& d_kv) {
  const Arena::Scope scope(*ctx.scratch);
  const TensorView delta = ctx.scratch->allocate("attention delta", args.lse[branch].dtype, args.lse[branch].shape);
  band_delta(ctx, {.d_o = args.d_out[branch], .o = args.out[branch], .delta = delta});
  ops::fill(ctx, {.y = d_kv, .value = 0});
  band_backward(ctx, {.q = args.q,
                      .k = kv[0],
                      .v = kv[1],
                      .first = first,
                      .last = last,
                      .d_o = args.d_out[branch],
                      .lse = args.lse[branch],
                      .delta = delta,
                      .d_q = args.d_q,
                      .d_k = d_kv[0],
                      .d_v = d_kv[1],
                      .scale = scale_of(args.q)});
}

void compressed_branch(Context& ctx, const NsaForward& args, const Plan& plan) {
  const Arena::Scope scope(*ctx.scratch);
  const TensorView kv = plan.gather(ctx, args.compressed);
  band_branch(ctx, args, kCompressed, kv, plan.compressed_first, plan.compressed_last);
  if (args.selection_given) return;
  select_blocks(ctx, {.q = args.q,
                      .k = kv[0],
                      .first = plan.compressed_first,
                      .last = plan.compressed_last,
                      .lse = args.lse[kCompressed],
                      .token = plan.sequence.global_last,
                      .start = plan.sequence.document_start,
                      .selected = args.selected,
                      .block = args.shape.block,
                      .stride = args.shape.stride,
                      .select_block = args.shape.select_block,
                      .init_blocks = args.shape.init_blocks,
                      .local_blocks = args.shape.local_blocks,
                      .scale = scale_of(args.q)});
}

void selected_branch(Context& ctx, const NsaForward& args, const Plan& plan) {
  const Arena::Scope scope(*ctx.scratch);
  const TensorView o = state_of(ctx, args.out[kSelected], args.lse[kSelected].dtype);
  bool has_state = false;
  run_ring_forward(ctx, plan.sequence, plan.sequence.document_hops, args.kv_selected,
                   [&](int source, const TensorView& kv, bool is_last) {
                     selected_forward(ctx, {.q = args.q,
                                            .k = kv[0],
                                            .v = kv[1],
                                            .selected = args.selected,
                                            .token = plan.sequence.global_last,
                                            .start = plan.sequence.document_start,
                                            .o = o,
                                            .lse = args.lse[kSelected],
                                            .has_state = has_state,
                                            .out = is_last ? args.out[kSelected] : TensorView{},
                                            .select_block = args.shape.select_block,
                                            .keys = plan.keys_of(source),
                                            .scale = scale_of(args.q)});
                     has_state = true;
                   });
}

void selected_branch_backward(Context& ctx, const NsaBackward& args, const Plan& plan) {
  const Arena::Scope scope(*ctx.scratch);
  const TensorView& lse = args.lse[kSelected];
  const TensorView delta = ctx.scratch->allocate("attention delta", lse.dtype, lse.shape);
  band_delta(ctx, {.d_o = args.d_out[kSelected], .o = args.out[kSelected], .delta = delta});
  run_ring_backward(ctx, plan.sequence, plan.sequence.document_hops, args.kv_selected, args.d_kv_selected,
                    [&](int source, const TensorView& kv, const TensorView& d_kv) {
                      selected_backward(ctx, {.q = args.q,
                                              .k = kv[0],
                                              .v = kv[1],
                                              .selected = args.selected,
                                              .token = plan.sequence.global_last,
                                              .start = plan.sequence.document_start,
                                              .d_o = args.d_out[kSelected],
                                              .lse = lse,
                                              .delta = delta,
                                              .d_q = args.d_q,
                                              .d_k = d_kv[0],
                                              .d_v = d_kv[1],
                                              .select_block = args.shape.select_block,
                                              .keys = plan.keys_of(source),
                                              .scale = scale_of(args.q)});
                    });
}

}  // namespace

void nsa_forward(Context& ctx, const SequenceBatch& sequence, const NsaForward& args) {
  const Arena::Scope scope(*ctx.scratch);
  const Plan plan(ctx, args.shape, sequence);
  compressed_branch(ctx, args, plan);
  selected_branch(ctx, args, plan);
  const TensorView window = plan.fetch_window(ctx, args.kv_window);
  band_branch(ctx, args, kWindow, window, plan.window_first, plan.window_last);
}

void nsa_backward(Context& ctx, const SequenceBatch& sequence, const NsaBackward& args) {
  const Arena::Scope scope(*ctx.scratch);
  const Plan plan(ctx, args.shape, sequence);
  ops::fill(ctx, {.y = args.d_q, .value = 0});
  {
    const Arena::Scope branch(*ctx.scratch);
    const TensorView kv = plan.gather(ctx, args.compressed);
    const TensorView d_kv =
        plan.spread ? ctx.scratch->allocate("d_compressed", args.d_compressed.dtype, kv.shape) : args.d_compressed;
    band_branch_backward(ctx, args, kCompressed, kv, plan.compressed_first, plan.compressed_last, d_kv);
    plan.scatter(ctx, d_kv, args.d_compressed);
  }
  selected_branch_backward(ctx, args, plan);
  const TensorView window = plan.fetch_window(ctx, args.kv_window);
  const TensorView d_window =
      plan.spread ? plan.window_buffer(ctx, args.kv_window, args.d_kv_window.dtype) : args.d_kv_window;
  band_branch_backward(ctx, args, kWindow, window, plan.window_first, plan.window_last, d_window);
  plan.return_window(ctx, d_window, args.d_kv_window);
}

}  // namespace annulus::attention
