// The whole model's gradients against central differences in fp64: every parameter, every option; and causality:
// changing a token changes no earlier loss by one bit.
#include <gtest/gtest.h>

#include <cmath>

#include "core/rng.h"
#include "train/engine.h"

namespace annulus::train {
namespace {

model::ModelConfig tiny() {
  model::ModelConfig m;
  m.vocab_size = 11;
  m.hidden_size = 12;
  m.intermediate_size = 14;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 4;
  m.num_key_value_heads = 2;
  m.head_dim = 4;
  m.resolve();
  return m;
}

// Small sparse attention in every layer; documents of 1, 7 and more tokens make all its special rows.
model::ModelConfig tiny_nsa() {
  auto m = tiny();
  m.attention = {model::AttentionKind::nsa};
  m.nsa = {.block = 4, .stride = 2, .hidden = 3, .select_block = 4, .select_count = 2, .local_blocks = 1, .window = 3};
  m.resolve();
  m.validate();
  return m;
}

struct Rig {
  Rig(const model::ModelConfig& config, std::int64_t tokens)
      : mesh(*world, {{"data", 1}, {"sequence", 1}}),
        engine(make_compute_device(DeviceKind::cpu), mesh,
               {.model = config,
                .dtype = DType::f64,
                .layout = parallel::LayoutKind::zigzag,
                .sequence_length = tokens,
                .batch = 2,
                .training = true,
                .recompute = model::Recompute::none,
                .deterministic = true,
                .optimizer = {}}) {
    engine.plan();
    engine.commit();
    engine.initialize(1);
    // Larger weights than the initial ones, so that no gradient hides in round-off.
    double* w = engine.store().values().as<double>();
    const CounterRng rng(2, "weights");
    for (std::int64_t i = 0; i < engine.store().values().numel(); ++i)
      w[i] += 0.2 * rng.normal(static_cast<std::uint64_t>(i));
    for (std::int64_t i = 0; i < 2 * tokens; ++i) {
      const auto u = static_cast<std::uint64_t>(i);
      token.push_back(static_cast<std::int32_t>(rng.bits(u) % 11));
      target.push_back(i % 5 == 4 ? -1 : static_cast<std::int32_t>(rng.bits(u + 1000) % 11));
      const std::int64_t t = i % tokens;
      start.push_back(static_cast<std::int32_t>(t < 7 ? 0 : t < 8 ? 7 : 8));  // documents of 7, 1 and the rest
    }
  }
  double loss() {
    engine.load({token, target, start});
    double sum = 0;
    for (const double x : engine.losses()) sum += x;
    return sum;
  }
  // NSA layers keep to the blocks that they choose now: what gradients of a choice that is not continuous refer to.
  void pin_selection() {
    auto& model = engine.model();
    pinned.resize(static_cast<std::size_t>(model.config().num_hidden_layers));
    model.on_attention([&](Context&, std::int64_t layer, const model::AttentionLayer::View& view) {
      if (!view.selected.shape.rank()) return;
      auto& kept = pinned[static_cast<std::size_t>(layer)];
      kept.assign(view.selected.as<std::int32_t>(), view.selected.as<std::int32_t>() + view.selected.numel());
      model.pin_selection(layer, host_view(kept.data(), view.selected.shape));
    });
    (void)loss();
    model.on_attention(nullptr);
  }
  std::unique_ptr<parallel::Communicator> world = parallel::make_self_communicator();
  parallel::Mesh mesh;
  Engine engine;
  std::vector<std::int32_t> token, target, start;
  std::vector<std::vector<std::int32_t>> pinned;
};

void check_gradients(const model::ModelConfig& config) {
  Rig rig(config, 19);
  rig.pin_selection();
  auto& store = rig.engine.store();
  rig.engine.load({rig.token, rig.target, rig.start});
  rig.engine.zero_gradients();
  rig.engine.forward_backward(1);
  double* w = store.values().as<double>();
  const double* g = store.gradients().as<double>();
  double norm = 0;
  for (std::int64_t i = 0; i < store.gradients().numel(); ++i) norm += g[i] * g[i];
  norm = std::sqrt(norm);
  for (const auto& e : store.entries()) {
    for (std::int64_t i = e.offset; i < e.offset + e.count; i += std::max<std::int64_t>(1, e.count / 9)) {
      const double h = 1e-5, kept = w[i];
      w[i] = kept + h;
      const double up = rig.loss();
      w[i] = kept - h;
      const double down = rig.loss();
      w[i] = kept;
      // Truncation h² and cancellation u/h · loss, both about 1e-9 of the norm here.
      ASSERT_NEAR((up - down) / (2 * h), g[i], 1e-7 * norm) << e.name << ", element " << i - e.offset;
    }
  }
}

TEST(ModelGradient, Plain) { check_gradients(tiny()); }

TEST(ModelGradient, EveryOption) {
  auto m = tiny();
  m.qk_norm = m.attention_bias = true;
  m.tie_word_embeddings = false;
  m.sliding_window = 5;
  m.rope_scaling = {.rope_type = "yarn", .factor = 4, .original_max_position_embeddings = 16};
  check_gradients(m);
}

TEST(ModelGradient, OneAndAllHeadsShare) {
  auto m = tiny();
  m.num_key_value_heads = 4;
  check_gradients(m);
  m.num_key_value_heads = 1;
  check_gradients(m);
}

TEST(ModelGradient, Sparse) {
  for (const char* kv : {"per_branch", "shared"}) {
    for (const char* rope : {"after", "before"}) {
      for (const char* compression : {"mlp", "mean"}) {
        SCOPED_TRACE(std::string(kv) + " " + rope + " " + compression);
        auto m = tiny_nsa();
        m.nsa.kv = kv;
        m.nsa.rope = rope;
        m.nsa.compression = compression;
        m.qk_norm = m.attention_bias = true;
        m.rope_scaling = {.rope_type = "yarn", .factor = 4, .original_max_position_embeddings = 16};
        check_gradients(m);
      }
    }
  }
}

TEST(ModelGradient, SparseGroupsAndMixedLayers) {
  for (const std::int64_t kv_heads : {4, 1}) {
    auto m = tiny_nsa();
    m.num_key_value_heads = kv_heads;
    m.attention = {model::AttentionKind::dense, model::AttentionKind::nsa};
    check_gradients(m);
  }
}

void expect_causal(const model::ModelConfig& config) {
  Rig rig(config, 19);
  (void)rig.loss();
  const std::vector<double> before(rig.engine.losses().begin(), rig.engine.losses().end());
  for (const std::size_t t : {3u, 7u, 12u, 18u}) {
    const auto kept = rig.token[t];
    rig.token[t] = (kept + 1) % 11;
    (void)rig.loss();
    const auto after = rig.engine.losses();
    rig.token[t] = kept;
    const std::size_t end = t < 7 ? 7 : t < 8 ? 8 : 19;  // of its document
    bool changed = false;
    for (std::size_t row = 0; row < after.size(); ++row) {
      if (row < t || row >= end) EXPECT_EQ(after[row], before[row]) << "token " << t << ", row " << row;
      else changed = changed || after[row] != before[row];
    }
    EXPECT_TRUE(changed) << "token " << t;
  }
}

TEST(Causality, AChangedTokenChangesNothingBeforeItNorOtherDocuments) { expect_causal(tiny()); }

TEST(Causality, Sparse) {
  auto m = tiny_nsa();
  expect_causal(m);
  m.nsa.kv = "shared";
  m.nsa.rope = "before";
  m.nsa.compression = "mean";
  expect_causal(m);
}

// An engine for evaluation, whose blocks share memory, gives the losses of one for training, at any length.
void expect_evaluation_equals_training(const model::ModelConfig& config, std::int64_t tokens) {
  {
    Rig rig(config, tokens);
    (void)rig.loss();
    const std::vector<double> wanted(rig.engine.losses().begin(), rig.engine.losses().end());
    EngineOptions options = rig.engine.options();
    options.training = false;
    Engine evaluation(make_compute_device(DeviceKind::cpu), rig.mesh, options);
    evaluation.plan();
    evaluation.commit();
    Context ctx;
    copy(ctx, rig.engine.store().values(), evaluation.store().values());
    evaluation.load({rig.token, rig.target, rig.start});
    const std::vector<double> found(evaluation.losses().begin(), evaluation.losses().end());
    EXPECT_EQ(found, wanted) << tokens << " tokens";
    EXPECT_LT(evaluation.planned_bytes(), rig.engine.planned_bytes());
  }
}

TEST(Evaluation, HasTheLossesOfTheTrainingEngine) {
  for (const std::int64_t tokens : {1, 2, 3, 5, 8, 19, 64}) expect_evaluation_equals_training(tiny(), tokens);
}

// Sequences shorter than a block, as long, longer by one, no multiple of a selection block.
TEST(Evaluation, SparseAtAnyLength) {
  for (const std::int64_t tokens : {1, 2, 3, 4, 5, 7, 8, 9, 30, 67}) {
    expect_evaluation_equals_training(tiny_nsa(), tokens);
  }
}

// Two equal documents in one sequence have equal losses: positions and masks start anew.
TEST(Causality, EqualDocumentsHaveEqualLosses) {
  Rig rig(tiny(), 20);
  for (std::size_t i = 0; i < 20; ++i) {
    rig.token[i] = static_cast<std::int32_t>(i % 10);
    rig.target[i] = static_cast<std::int32_t>((i + 1) % 10);
    rig.start[i] = i < 10 ? 0 : 10;
  }
  (void)rig.loss();
  const auto losses = rig.engine.losses();
  for (std::size_t i = 0; i < 10; ++i) EXPECT_NEAR(losses[i], losses[i + 10], 1e-13);
}

}  // namespace
}  // namespace annulus::train
