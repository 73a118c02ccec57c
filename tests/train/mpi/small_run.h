// A small model on any mesh: one micro-batch of packed documents, its loss, gradients and step, gathered whole.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/rng.h"
#include "parallel/mpi_runtime.h"
#include "train/engine.h"

namespace annulus::testing {

inline parallel::MpiRuntime& runtime() {
  static parallel::MpiRuntime* const kRuntime = new parallel::MpiRuntime(nullptr, nullptr);
  return *kRuntime;
}

struct Whole {  // results, equal on every rank
  double loss_sum = 0, grad_norm = 0;
  std::int64_t targets = 0;
  std::vector<std::string> names;
  std::vector<std::vector<double>> gradients, weights;  // by parameter; weights after one step
  // By layer: NSA's selected blocks [B, S, Hkv, n] of a run on one rank; compared and pinned by SmallRun::choices.
  std::vector<std::vector<std::int32_t>> selected;
  std::int64_t flips = 0, num_lists = 0;  // lists of this rank that differ from SmallRun::choices, of how many
};

struct SmallRun {
  model::ModelConfig model;
  DType dtype = DType::f64;
  parallel::LayoutKind layout = parallel::LayoutKind::zigzag;
  model::Recompute recompute = model::Recompute::none;
  std::int64_t tokens = 48, batch = 2;
  std::vector<std::int64_t> documents;  // lengths; empty: one document
  std::int64_t only_target = -1;        // the only position of sequence 0 that keeps its target; −2: no target at all
  const Whole* choices = nullptr;       // of a run on one rank: whose selected blocks are compared, and used if pinned
  bool pinned = false;
};

inline model::ModelConfig small_model(std::int64_t kv_heads = 2) {
  model::ModelConfig m;
  m.vocab_size = 37;
  m.hidden_size = 32;
  m.intermediate_size = 40;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 8;
  m.num_key_value_heads = kv_heads;
  m.head_dim = 6;
  m.resolve();
  m.validate();
  return m;
}

// Small sparse attention: overlapping blocks, more blocks than are selected, a window that is no multiple of anything.
inline model::ModelConfig small_nsa_model(std::int64_t kv_heads = 2) {
  model::ModelConfig m = small_model(kv_heads);
  m.attention = {model::AttentionKind::nsa};
  m.nsa = {.block = 4, .stride = 2, .hidden = 5, .select_block = 4, .select_count = 4, .window = 7};
  m.resolve();
  m.validate();
  return m;
}

struct HostBatch {
  std::vector<std::int32_t> tokens, targets, start;
};

// Sequences [from, from + count) of the run's batch.
inline HostBatch make_batch(const SmallRun& run, std::int64_t from, std::int64_t count) {
  HostBatch out;
  const CounterRng rng(5, "batch");
  for (std::int64_t b = from; b < from + count; ++b) {
    std::vector<std::int64_t> ends;
    std::int64_t end = 0;
    for (const auto length : run.documents) ends.push_back(end += length);
    if (ends.empty()) ends.push_back(run.tokens);
    std::int64_t start = 0;
    std::size_t document = 0;
    for (std::int64_t t = 0; t < run.tokens; ++t) {
      if (t == ends[document]) {
        start = t;
        ++document;
      }
      const auto draw = [&](std::int64_t i) {
        return static_cast<std::int32_t>(rng.bits(static_cast<std::uint64_t>(b * 1000 + i)) %
                                         static_cast<std::uint64_t>(run.model.vocab_size));
      };
      bool target = t + 1 != ends[document];
      if (run.only_target >= 0) target = b == 0 && t == run.only_target;
      if (run.only_target == -2) target = false;
      out.tokens.push_back(draw(t));
      out.targets.push_back(target ? draw(t + 1) : -1);
      out.start.push_back(static_cast<std::int32_t>(start));
    }
  }
  return out;
}

inline std::vector<std::vector<double>> by_parameter(train::Engine& engine, const TensorView& flat) {
  std::vector<std::vector<double>> out;
  for (const auto& e : engine.store().entries()) {
    std::vector<double> values(static_cast<std::size_t>(e.count));
    for (std::int64_t i = 0; i < e.count; ++i) {
      values[static_cast<std::size_t>(i)] = flat.dtype == DType::f64
                                                ? flat.as<double>()[e.offset + i]
                                                : static_cast<double>(flat.as<float>()[e.offset + i]);
    }
    out.push_back(std::move(values));
  }
  return out;
}

// The choices of one layer for this rank's rows, from those of the whole batch.
inline std::vector<std::int32_t> local_choices(train::Engine& engine, const std::vector<std::int32_t>& whole) {
  const auto& options = engine.options();
  const std::int64_t tokens = options.sequence_length, local = engine.layout().local_tokens();
  const std::int64_t row_size = options.model.num_key_value_heads * options.model.nsa.select_count;
  std::vector<std::int32_t> out;
  if (whole.empty()) return out;  // a dense layer
  for (std::int64_t row = 0; row < options.batch * local; ++row) {
    const std::int64_t b = row / local + engine.mesh().coordinate("data") * options.batch;
    const std::int64_t t = engine.layout().global_index(engine.mesh().coordinate("sequence"), row % local);
    const auto from = whole.begin() + (b * tokens + t) * row_size;
    out.insert(out.end(), from, from + row_size);
  }
  return out;
}

// Compares the blocks that every layer selects with the run's choices, or pins those.
inline void watch_selection(const SmallRun& run, train::Engine& engine, Whole& out,
                            std::vector<std::vector<std::int32_t>>& choices) {
  if (run.choices) {
    for (const auto& whole : run.choices->selected) choices.push_back(local_choices(engine, whole));
  }
  const auto& options = engine.options();
  const std::int64_t count = options.model.nsa.select_count;
  if (run.pinned) {
    const Shape shape{options.batch, engine.layout().local_tokens(), options.model.num_key_value_heads, count};
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (!choices[i].empty())
        engine.model().pin_selection(static_cast<std::int64_t>(i), host_view(choices[i].data(), shape));
    }
  }
  out.selected.resize(static_cast<std::size_t>(options.model.num_hidden_layers));
  engine.model().on_attention([&, count](Context&, std::int64_t layer, const model::AttentionLayer::View& view) {
    if (!view.selected.shape.rank()) return;
    const auto* got = view.selected.as<std::int32_t>();
    auto& kept = out.selected[static_cast<std::size_t>(layer)];
    kept.assign(got, got + view.selected.numel());
    if (!run.choices) return;
    const auto& wanted = choices[static_cast<std::size_t>(layer)];
    for (std::size_t i = 0; i < wanted.size(); i += static_cast<std::size_t>(count)) {
      out.flips += !std::equal(got + i, got + i + count, wanted.begin() + static_cast<std::ptrdiff_t>(i));
      ++out.num_lists;
    }
  });
}

// Collective over `world`.
inline Whole run_step(const SmallRun& run, parallel::Communicator& world, int data, int sequence) {
  parallel::Mesh mesh(world, {{"data", data}, {"sequence", sequence}});
  const ComputeDevice cpu = make_compute_device(DeviceKind::cpu);
  train::EngineOptions options{.model = run.model,
                               .dtype = run.dtype,
                               .layout = run.layout,
                               .sequence_length = run.tokens,
                               .batch = run.batch / data,
                               .training = true,
                               .recompute = run.recompute,
                               .deterministic = true,
                               .optimizer = {}};
  options.optimizer.eps = 1e-3;  // a smooth step: Adam's sign-like response to round-off is not what is compared
  train::Engine engine(cpu, mesh, options);
  engine.plan();
  engine.commit();
  engine.context().progress = parallel::mpi_progress;
  engine.initialize(3);
  const HostBatch batch = make_batch(run, mesh.coordinate("data") * options.batch, options.batch);
  Whole out;
  std::vector<std::vector<std::int32_t>> choices;
  watch_selection(run, engine, out, choices);
  const HostBatch all = make_batch(run, 0, run.batch);
  out.targets = std::count_if(all.targets.begin(), all.targets.end(), [](auto t) { return t >= 0; });
  const double scale = out.targets > 0 ? 1 / static_cast<double>(out.targets) : 0;
  engine.load({batch.tokens, batch.targets, batch.start});
  for (int pass = 0; pass < 2; ++pass) {  // first the gradients themselves, then the whole step
    engine.zero_gradients();
    engine.forward_backward(scale);
    if (pass == 0) {
      auto& store = engine.store();
      store.shards().reduce_gradients(engine.context(), mesh.device_world(), store.gradients());
      store.shards().gather_parameters(engine.context(), mesh.device_world(), store.gradients());
      out.gradients = by_parameter(engine, store.gradients());
    }
  }
  const auto result = engine.optimizer_step(1e-2, 1.0, 1);
  out.loss_sum = result.loss_sum / 2;  // two passes
  out.grad_norm = result.grad_norm;
  out.weights = by_parameter(engine, engine.store().values());
  for (const auto& e : engine.store().entries()) out.names.push_back(e.name);
  return out;
}

// Whether the run's sequences can be spread over so many ranks.
inline bool fits(const SmallRun& run, int sequence_ranks) {
  try {
    (void)train::sequence_layout(run.model, run.layout, run.tokens, sequence_ranks);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

inline double norm_of(const std::vector<std::vector<double>>& tensors) {
  double sum = 0;
  for (const auto& t : tensors) {
    for (const double x : t) sum += x * x;
  }
  return std::sqrt(sum);
}

// The largest violation of |a − b| <= tolerance · max|b| + floor · norm, over all tensors, as a ratio; the worst
// tensor's name.
inline std::pair<double, std::string> worst(const Whole& reference, const std::vector<std::vector<double>>& a,
                                            const std::vector<std::vector<double>>& b, double tolerance, double floor) {
  std::pair<double, std::string> out{0, ""};
  for (std::size_t i = 0; i < a.size(); ++i) {
    double error = 0, scale = 0;
    for (std::size_t j = 0; j < a[i].size(); ++j) {
      const double e = std::abs(a[i][j] - b[i][j]);
      error = e <= error ? error : e;
      scale = std::max(scale, std::abs(b[i][j]));
    }
    const double bound = std::max(tolerance * scale, floor);
    const double ratio = std::isnan(error) ? INFINITY : bound > 0 ? error / bound : error > 0 ? INFINITY : 0;
    if (ratio > out.first) out = {ratio, reference.names[i]};
  }
  return out;
}

}  // namespace annulus::testing
