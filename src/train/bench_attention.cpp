// Attention in `annulus bench`: dense through the ring, and native sparse attention, whole and by stage.
#include <algorithm>
#include <cmath>

#include "attention/nsa.h"
#include "attention/select.h"
#include "parallel/ring.h"
#include "train/attention_statistics.h"
#include "train/bench_run.h"

namespace annulus::train {
namespace {

namespace attn = annulus::attention;

// One sequence, spread over all ranks in zigzag order, and the arenas of one case.
struct Rig {
  parallel::Mesh mesh;
  parallel::SequenceLayout layout;
  Arena arena, scratch;
  Context ctx;
  attn::SequenceBatch batch;

  Rig(parallel::Communicator& world, const parallel::SequenceLayout& layout_in, const Context& base)
      : mesh(world, {{"sequence", world.size()}}),
        layout(layout_in),
        arena("attention", DeviceKind::cpu),
        scratch("attention scratch", DeviceKind::cpu),
        ctx(base) {
    ctx.scratch = &scratch;
    batch.layout = &layout;
    batch.mesh = &mesh;
    batch.batch = 1;
    batch.hops = batch.document_hops = parallel::all_hops(world.size());
  }

  // allocate() plans tensors, then gives them memory; runs are planned in between.
  void prepare(const std::function<void()>& allocate, const std::vector<std::function<void()>>& runs) {
    const auto all = [&] {
      allocate();
      for (auto* view : {&batch.global_first, &batch.global_last, &batch.document_start}) {
        *view = arena.allocate("rows", DType::i32, {1, layout.local_tokens()});
      }
    };
    all();
    ctx.planning = true;
    for (const auto& run : runs) run();
    ctx.planning = false;
    arena.commit();
    scratch.commit();
    all();
    for (std::int64_t row = 0; row < layout.local_tokens(); ++row) {
      batch.global_last.as<std::int32_t>()[row] =
          static_cast<std::int32_t>(layout.global_index(mesh.coordinate("sequence"), row));
    }
  }
  std::string memory() const {
    return fmt::format("\"attention_mib\":{:.1f}",
                       static_cast<double>(arena.planned_bytes() + scratch.planned_bytes()) / (1 << 20));
  }
};

std::string shape_text(std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim, int ranks) {
  return fmt::format("S {} Hq {} Hkv {} D {} ranks {}", tokens, heads, kv_heads, dim, ranks);
}

}  // namespace

// FLOPs: forward 2·S²·D·Hq, backward 2.5 times that, shared by the ranks.
void BenchRun::attention(std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim,
                         const std::string& suffix) {
  const std::string forward = "attention_forward" + suffix, backward = "attention_backward" + suffix;
  const bool heavy = !suffix.empty();
  if (!wanted(forward, heavy) && !wanted(backward, heavy)) return;
  const int ranks = runtime_.world().size();
  Rig rig(runtime_.world(), {parallel::LayoutKind::zigzag, tokens, ranks}, ctx_);
  TensorView q, kv, out, lse, d_out, d_q, d_kv;
  const std::int64_t local = rig.layout.local_tokens();
  const auto run_forward = [&] { attn::dense_forward(rig.ctx, rig.batch, {.q = q, .kv = kv, .out = out, .lse = lse}); };
  const auto run_backward = [&] {
    attn::dense_backward(rig.ctx, rig.batch,
                         {.q = q, .kv = kv, .out = out, .lse = lse, .d_out = d_out, .d_q = d_q, .d_kv = d_kv});
  };
  rig.prepare(
      [&] {
        q = random(rig.arena, {1, local, heads, dim});
        kv = random(rig.arena, {2, 1, local, kv_heads, dim});
        out = random(rig.arena, q.shape);
        d_out = random(rig.arena, q.shape);
        d_q = random(rig.arena, q.shape);
        d_kv = random(rig.arena, kv.shape);
        lse = random(rig.arena, {1, heads, local});
      },
      {run_forward, run_backward});
  const double s = static_cast<double>(tokens), flops = 2 * s * s * static_cast<double>(dim * heads) / ranks;
  const std::string shape = shape_text(tokens, heads, kv_heads, dim, ranks);
  const double forward_ms = 1e3 * time(run_forward), backward_ms = 1e3 * time(run_backward);
  results_.push_back({forward, shape, forward_ms, flops, 0, rig.memory()});
  results_.push_back({backward, shape, backward_ms, 2.5 * flops, 0, rig.memory()});
  results_.push_back({"attention_both" + suffix, shape, forward_ms + backward_ms, 3.5 * flops, 0, rig.memory()});
}

namespace {

// Native sparse attention over one random sequence: tensors, and the runs that are timed.
struct NsaRig : Rig {
  attn::NsaShape nsa;
  TensorView q, kv[3], out[3], d_out[3], lse[3], selected, d_q, d_kv[3];
  TensorView compressed_last, window_first;  // bounds of one rank's rows; the first compressed block is 0

  using Rig::Rig;

  void allocate(const std::function<TensorView(Arena&, const Shape&)>& random, std::int64_t heads,
                std::int64_t kv_heads, std::int64_t dim) {
    const std::int64_t local = layout.local_tokens();
    const auto blocks = attn::local_blocks(nsa, layout, mesh.coordinate("sequence"));
    q = random(arena, {1, local, heads, dim});
    d_q = random(arena, q.shape);
    for (int b = 0; b < 3; ++b) {
      kv[b] = random(arena, {2, 1, b == attn::kCompressed ? blocks.rows() : local, kv_heads, dim});
      d_kv[b] = random(arena, kv[b].shape);
      out[b] = random(arena, q.shape);
      d_out[b] = random(arena, q.shape);
      lse[b] = random(arena, {1, heads, local});
    }
    selected = arena.allocate("selected", DType::i32, {1, local, kv_heads, nsa.select_count});
    compressed_last = arena.allocate("bounds", DType::i32, {1, local});
    window_first = arena.allocate("bounds", DType::i32, {1, local});
  }

  void forward() {
    attn::nsa_forward(ctx, batch,
                      {.shape = nsa,
                       .q = q,
                       .compressed = kv[0],
                       .kv_selected = kv[1],
                       .kv_window = kv[2],
                       .out = {out[0], out[1], out[2]},
                       .lse = {lse[0], lse[1], lse[2]},
                       .selected = selected});
  }
  void backward() {
    attn::nsa_backward(ctx, batch,
                       {.shape = nsa,
                        .q = q,
                        .compressed = kv[0],
                        .kv_selected = kv[1],
                        .kv_window = kv[2],
                        .out = {out[0], out[1], out[2]},
                        .lse = {lse[0], lse[1], lse[2]},
                        .selected = selected,
                        .d_out = {d_out[0], d_out[1], d_out[2]},
                        .d_q = d_q,
                        .d_compressed = d_kv[0],
                        .d_kv_selected = d_kv[1],
                        .d_kv_window = d_kv[2]});
  }

  // Mean number of different blocks of 4 and 8 neighbouring queries.
  std::string unions() const {
    UnionSum four, eight;
    for (auto [sum, group] : {std::pair{&four, 4}, {&eight, 8}}) {
      sum->add(selected.as<std::int32_t>(), selected.dim(1), selected.dim(2), selected.dim(3), group);
    }
    return fmt::format(",\"union_4\":{:.2f},\"union_8\":{:.2f}", four.mean(), eight.mean());
  }

  // Stages, on one rank: lse of a branch stands for its delta too, which changes no time.
  double scale() const { return 1 / std::sqrt(static_cast<double>(q.dim(3))); }
  void band(attn::Branch b, const TensorView& first, const TensorView& last) {
    attn::band_forward(ctx, {.q = q,
                             .k = kv[b][0],
                             .v = kv[b][1],
                             .first = first,
                             .last = last,
                             .o = out[b],
                             .lse = lse[b],
                             .has_state = false,
                             .out = {},
                             .scale = scale()});
  }
  void band_gradient(attn::Branch b, const TensorView& first, const TensorView& last) {
    attn::band_backward(ctx, {.q = q,
                              .k = kv[b][0],
                              .v = kv[b][1],
                              .first = first,
                              .last = last,
                              .d_o = d_out[b],
                              .lse = lse[b],
                              .delta = lse[b],
                              .d_q = d_q,
                              .d_k = d_kv[b][0],
                              .d_v = d_kv[b][1],
                              .scale = scale()});
  }
  void select() {
    attn::select_blocks(ctx, {.q = q,
                              .k = kv[0][0],
                              .first = batch.document_start,
                              .last = compressed_last,
                              .lse = lse[0],
                              .token = batch.global_last,
                              .start = batch.document_start,
                              .selected = selected,
                              .block = nsa.block,
                              .stride = nsa.stride,
                              .select_block = nsa.select_block,
                              .init_blocks = nsa.init_blocks,
                              .local_blocks = nsa.local_blocks,
                              .scale = scale()});
  }
  void gather() {
    attn::selected_forward(ctx, {.q = q,
                                 .k = kv[1][0],
                                 .v = kv[1][1],
                                 .selected = selected,
                                 .token = batch.global_last,
                                 .start = batch.document_start,
                                 .o = out[1],
                                 .lse = lse[1],
                                 .has_state = false,
                                 .out = {},
                                 .select_block = nsa.select_block,
                                 .keys = {.chunk = layout.tokens(), .begin = {0, -1}},
                                 .scale = scale()});
  }
  void gather_gradient() {
    attn::selected_backward(ctx, {.q = q,
                                  .k = kv[1][0],
                                  .v = kv[1][1],
                                  .selected = selected,
                                  .token = batch.global_last,
                                  .start = batch.document_start,
                                  .d_o = d_out[1],
                                  .lse = lse[1],
                                  .delta = lse[1],
                                  .d_q = d_q,
                                  .d_k = d_kv[1][0],
                                  .d_v = d_kv[1][1],
                                  .select_block = nsa.select_block,
                                  .keys = {.chunk = layout.tokens(), .begin = {0, -1}},
                                  .scale = scale()});
  }
};

}  // namespace

// FLOPs: 4·D·Hq for every visible pair of query and key of the three branches forward, backward 2.5 times that, scores
// half of the compressed attention's forward; the whole counts them as part of it.
void BenchRun::nsa(std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim,
                   const std::string& prefix) {
  const auto stage_wanted = [&](const std::string& name) { return wanted("nsa_" + prefix + name, true); };
  constexpr const char* kStages[] = {"forward",           "backward",         "both",           "compressed_forward",
                                     "scores_and_top_n",  "selected_forward", "window_forward", "compressed_backward",
                                     "selected_backward", "window_backward"};
  if (std::none_of(std::begin(kStages), std::end(kStages), stage_wanted)) return;
  const int ranks = runtime_.world().size();
  const attn::NsaShape nsa = model::NsaConfig{}.shape();
  NsaRig rig(runtime_.world(), {parallel::LayoutKind::zigzag, tokens, ranks, nsa.chunk_multiple(), nsa.min_chunk()},
             ctx_);
  rig.nsa = nsa;
  rig.prepare([&] { rig.allocate([&](Arena& a, const Shape& s) { return random(a, s); }, heads, kv_heads, dim); },
              {[&] { rig.forward(); }, [&] { rig.backward(); }});
  const double s = static_cast<double>(tokens), per_pair = 4 * static_cast<double>(dim * heads) / ranks;
  const auto pairs_within = [s](std::int64_t keys) {
    const double k = std::min(static_cast<double>(keys), s);
    return k * (k + 1) / 2 + (s - k) * k;
  };
  const double m = static_cast<double>(nsa.num_blocks(tokens)), d = static_cast<double>(nsa.stride);
  const double compressed = per_pair * (m * (s - static_cast<double>(nsa.block) + 1) - d * m * (m - 1) / 2);
  const double chosen = per_pair * pairs_within(nsa.select_count * nsa.select_block);
  const double window = per_pair * pairs_within(nsa.window);
  const std::string shape = shape_text(tokens, heads, kv_heads, dim, ranks);
  const auto add = [&](const std::string& name, double flops, double ms) {
    results_.push_back({"nsa_" + prefix + name, shape, ms, flops, 0, rig.memory()});
    return ms;
  };
  const auto measured = [&](const std::string& name, double flops, const std::function<void()>& call) {
    return stage_wanted(name) ? add(name, flops, 1e3 * time(call)) : 0;
  };
  const double all = compressed + chosen + window;
  const double forward = measured("forward", all, [&] { rig.forward(); });
  const double backward = measured("backward", 2.5 * all, [&] { rig.backward(); });
  if (forward > 0 && backward > 0) add("both", 3.5 * all, forward + backward);
  if (ranks > 1) return;
  if (forward == 0) rig.forward();  // the stages read what it leaves
  for (std::int64_t t = 0; t < tokens; ++t) {
    rig.compressed_last.as<std::int32_t>()[t] = static_cast<std::int32_t>(nsa.num_blocks(t + 1) - 1);
    rig.window_first.as<std::int32_t>()[t] = static_cast<std::int32_t>(std::max<std::int64_t>(0, t - nsa.window + 1));
  }
  const auto& zero = rig.batch.document_start;
  const auto& last = rig.batch.global_last;
  measured("compressed_forward", compressed, [&] { rig.band(attn::kCompressed, zero, rig.compressed_last); });
  if (measured("scores_and_top_n", compressed / 2, [&] { rig.select(); }) > 0) results_.back().extra += rig.unions();
  measured("selected_forward", chosen, [&] { rig.gather(); });
  measured("window_forward", window, [&] { rig.band(attn::kWindow, rig.window_first, last); });
  measured("compressed_backward", 2.5 * compressed,
           [&] { rig.band_gradient(attn::kCompressed, zero, rig.compressed_last); });
  measured("selected_backward", 2.5 * chosen, [&] { rig.gather_gradient(); });
  measured("window_backward", 2.5 * window, [&] { rig.band_gradient(attn::kWindow, rig.window_first, last); });
}

}  // namespace annulus::train
