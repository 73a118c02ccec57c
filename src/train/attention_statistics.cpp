#include "train/attention_statistics.h"

#include <algorithm>
#include <cmath>

#include "ops/ops.h"

namespace annulus::train {

void UnionSum::add(const std::int32_t* selected, std::int64_t rows, std::int64_t kv_heads, std::int64_t count,
                   std::int64_t group) {
  std::vector<std::int32_t> all;
  for (std::int64_t row = 0; row + group <= rows; row += group) {
    for (std::int64_t h = 0; h < kv_heads; ++h) {
      all.clear();
      for (std::int64_t i = 0; i < group; ++i) {
        const std::int32_t* list = selected + ((row + i) * kv_heads + h) * count;
        for (std::int64_t j = 0; j < count && list[j] >= 0; ++j) all.push_back(list[j]);
      }
      std::sort(all.begin(), all.end());
      blocks += static_cast<double>(std::unique(all.begin(), all.end()) - all.begin());
      groups += 1;
    }
  }
}

void close_gate(Engine& engine, attention::Branch branch) {
  constexpr double kShut = -1e4;  // its sigmoid is 0 in every type
  const auto fill = [&](const model::ParameterStore::Entry& e, double value) {
    const std::int64_t count = e.count / attention::kNumBranches;  // rows are branch · Hq + head
    ops::fill(engine.context(), {.y = engine.store().values().rows(e.offset + branch * count, count), .value = value});
  };
  for (const auto& e : engine.store().entries()) {
    if (e.name.ends_with(".self_attn.gate.weight")) fill(e, 0);
    if (e.name.ends_with(".self_attn.gate.bias")) fill(e, kShut);
  }
}

AttentionWatch::AttentionWatch(Engine& engine)
    : engine_(engine), sums_(static_cast<std::size_t>(engine.options().model.num_hidden_layers)) {
  engine_.model().on_attention(
      [this](Context& ctx, std::int64_t layer, const model::AttentionLayer::View& view) { add(ctx, layer, view); });
}

AttentionWatch::~AttentionWatch() { engine_.model().on_attention(nullptr); }

void AttentionWatch::add(Context& ctx, std::int64_t layer, const model::AttentionLayer::View& view) {
  if (!view.selected.shape.rank()) return;
  const auto& layout = engine_.layout();
  const int rank = engine_.mesh().coordinate("sequence");
  const std::int64_t local = layout.local_tokens(), kv_heads = view.selected.dim(2), count = view.selected.dim(3);
  const std::int64_t heads = view.gate_logits.dim(1) / 3;
  std::vector<std::int32_t> selected(static_cast<std::size_t>(view.selected.numel()));
  copy(ctx, view.selected, host_view(selected.data(), view.selected.shape));
  std::vector<std::byte> bytes(static_cast<std::size_t>(view.gate_logits.bytes()));
  copy(ctx, view.gate_logits, {bytes.data(), view.gate_logits.dtype, DeviceKind::cpu, view.gate_logits.shape});
  synchronize(ctx);
  const auto gate = [&](std::int64_t i) {
    const TensorView t{bytes.data(), view.gate_logits.dtype, DeviceKind::cpu, view.gate_logits.shape};
    const double x = t.dtype == DType::f64    ? t.as<double>()[i]
                     : t.dtype == DType::bf16 ? static_cast<double>(to_float(t.as<BFloat16>()[i]))
                                              : static_cast<double>(t.as<float>()[i]);
    return 1 / (1 + std::exp(-x));
  };
  Sums& sums = sums_[static_cast<std::size_t>(layer)];
  for (std::int64_t b = 0; b < view.selected.dim(0); ++b) {
    const std::int64_t length = lengths_.empty() ? layout.tokens() : lengths_[static_cast<std::size_t>(b)];
    for (const std::int64_t begin : layout.chunk_begin(rank)) {  // neighbours are neighbours within a chunk
      if (begin < 0) continue;
      const std::int64_t rows = std::clamp<std::int64_t>(length - begin, 0, layout.chunk());
      const std::int64_t first = b * local + layout.rows_before(rank, begin);
      const std::int32_t* lists = selected.data() + first * kv_heads * count;
      sums.one.add(lists, rows, kv_heads, count, 1);
      sums.four.add(lists, rows, kv_heads, count, 4);
      sums.eight.add(lists, rows, kv_heads, count, 8);
      for (std::int64_t i = first * 3 * heads; i < (first + rows) * 3 * heads; ++i) {
        sums.gate[i / heads % 3] += gate(i);
      }
      sums.gates += static_cast<double>(rows * heads);
    }
  }
}

std::vector<NsaStatistics> AttentionWatch::result() {
  constexpr std::size_t kValues = 10;
  std::vector<double> flat;
  for (const Sums& s : sums_) {
    flat.insert(flat.end(), {s.gate[0], s.gate[1], s.gate[2], s.gates, s.one.blocks, s.one.groups, s.four.blocks,
                             s.four.groups, s.eight.blocks, s.eight.groups});
  }
  Context host;
  auto& world = engine_.mesh().world();
  world.wait(host, world.all_reduce(host, host_view(flat.data(), {static_cast<std::int64_t>(flat.size())}),
                                    parallel::ReduceOp::sum));
  std::vector<NsaStatistics> out;
  for (std::size_t layer = 0; layer < sums_.size(); ++layer) {
    const double* s = flat.data() + layer * kValues;
    if (s[3] == 0) continue;
    out.push_back({.layer = static_cast<std::int64_t>(layer),
                   .gate = {s[0] / s[3], s[1] / s[3], s[2] / s[3]},
                   .selected = UnionSum{s[4], s[5]}.mean(),
                   .union_4 = UnionSum{s[6], s[7]}.mean(),
                   .union_8 = UnionSum{s[8], s[9]}.mean()});
  }
  return out;
}

}  // namespace annulus::train
