// Generation: every step's logits and selected blocks are those of a fresh forward pass over the whole sequence,
// however the prompt is cut; what the cache holds; that a step allocates nothing.
#include <gtest/gtest.h>

#include <cmath>

#include "core/rng.h"
#include "train/generator.h"
#include "train/sampler.h"

namespace annulus::testing {
std::int64_t heap_bytes();
}

namespace annulus::train {
namespace {

constexpr std::int64_t kTokens = 40, kVocab = 19;

model::ModelConfig dense_model(std::int64_t kv_heads = 2) {
  model::ModelConfig m;
  m.vocab_size = kVocab;
  m.hidden_size = 16;
  m.intermediate_size = 20;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 4;
  m.num_key_value_heads = kv_heads;
  m.head_dim = 6;
  m.resolve();
  return m;
}

// Overlapping compression blocks; 10 selection blocks of which 4 are read, one of them by score alone.
model::ModelConfig sparse_model(std::int64_t kv_heads = 2) {
  auto m = dense_model(kv_heads);
  m.attention = {model::AttentionKind::nsa};
  m.nsa = {.block = 4, .stride = 2, .hidden = 3, .select_block = 4, .select_count = 4, .window = 7};
  m.resolve();
  m.validate();
  return m;
}

using Selections = std::vector<std::vector<std::int32_t>>;  // by layer: [T, Hkv, n]

struct Rig {
  // With the weights of `like`, if given.
  Rig(const model::ModelConfig& config, DType dtype, Rig* like = nullptr)
      : mesh(*world, {{"data", 1}, {"sequence", 1}}),
        engine(make_compute_device(DeviceKind::cpu), mesh,
               {.model = config,
                .dtype = dtype,
                .layout = parallel::LayoutKind::zigzag,
                .sequence_length = kTokens,
                .batch = 1,
                .training = false,
                .recompute = model::Recompute::none,
                .deterministic = true,
                .optimizer = {}}) {
    engine.plan();
    engine.commit();
    engine.initialize(1);
    const CounterRng rng(2, "weights");  // larger than the initial ones: attention is far from even
    const TensorView& w = engine.store().values();
    for (std::int64_t i = 0; i < w.numel(); ++i) {
      const double more = 0.2 * rng.normal(static_cast<std::uint64_t>(i));
      if (dtype == DType::f32) w.as<float>()[i] += static_cast<float>(more);
      else if (like) w.as<double>()[i] = static_cast<double>(like->engine.store().values().as<float>()[i]);
      else w.as<double>()[i] += more;
    }
    for (std::int64_t t = 0; t < kTokens; ++t) {
      token.push_back(static_cast<std::int32_t>(rng.bits(static_cast<std::uint64_t>(t) + 50000) % kVocab));
    }
    engine.model().on_attention([this](Context& ctx, std::int64_t layer, const model::AttentionLayer::View& view) {
      if (ctx.planning || !view.selected.shape.rank()) return;
      const auto* s = view.selected.as<std::int32_t>();
      seen[static_cast<std::size_t>(layer)].assign(s, s + view.selected.numel());
    });
    seen.resize(static_cast<std::size_t>(config.num_hidden_layers));
    const std::vector<std::int32_t> none(kTokens, -1), start(kTokens, 0);
    engine.load({token, none, start});
    full.resize(kTokens * kVocab);
    if (dtype == DType::f64) {
      engine.logits(host_view(full.data(), {kTokens, kVocab}));
    } else {
      std::vector<float> narrow(full.size());
      engine.logits(host_view(narrow.data(), {kTokens, kVocab}));
      full.assign(narrow.begin(), narrow.end());
    }
    full_seen = seen;
  }
  // |logits − full| / max |full row t|.
  double error(std::span<const double> logits, std::int64_t t) const {
    double most = 0, scale = 0;
    for (std::size_t i = 0; i < kVocab; ++i) {
      const double want = full[static_cast<std::size_t>(t * kVocab) + i], e = std::abs(logits[i] - want);
      most = e <= most ? most : e;  // NaN stays
      scale = std::max(scale, std::abs(want));
    }
    return most / scale;
  }
  double error(const TensorView& logits, std::int64_t t) const {
    std::vector<double> row(kVocab);
    for (std::size_t i = 0; i < kVocab; ++i)
      row[i] = logits.dtype == DType::f64 ? logits.as<double>()[i] : static_cast<double>(logits.as<float>()[i]);
    return error(row, t);
  }
  // The last `rows` rows up to token t.
  void expect_selection(std::int64_t t, std::int64_t rows) const {
    for (std::size_t layer = 0; layer < seen.size(); ++layer) {
      if (full_seen[layer].empty()) continue;
      const std::size_t size = full_seen[layer].size() / kTokens;
      ASSERT_EQ(seen[layer].size(), static_cast<std::size_t>(rows) * size);
      const auto from =
          full_seen[layer].begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(t + 1 - rows) * size);
      EXPECT_TRUE(std::equal(seen[layer].begin(), seen[layer].end(), from)) << "layer " << layer << ", token " << t;
    }
  }
  std::unique_ptr<parallel::Communicator> world = parallel::make_self_communicator();
  parallel::Mesh mesh;
  Engine engine;
  std::vector<std::int32_t> token;
  std::vector<double> full;
  Selections seen, full_seen;
};

// What any forward may be off, cached or not: twice what a fresh one in float is off the same weights' forward in
// double; in double 2⁻²⁹ of that, and the fresh forward there may be as much off the truth as the cached one.
void check(const model::ModelConfig& config, DType dtype = DType::f64) {
  Rig narrow(config, DType::f32), truth(config, DType::f64, &narrow);
  ASSERT_EQ(narrow.full_seen, truth.full_seen) << "a selection so close that rounding decides it tests nothing here";
  double naive = 0;
  for (std::int64_t t = 0; t < kTokens; ++t)
    naive =
        std::max(naive, truth.error(std::span(narrow.full).subspan(static_cast<std::size_t>(t * kVocab), kVocab), t));
  ASSERT_GT(naive, 0);
  const double tolerance = 2 * naive * (dtype == DType::f64 ? 2 * 0x1p-29 : 1);
  Rig& rig = dtype == DType::f64 ? truth : narrow;
  for (const std::int64_t max_rows : {3, 64}) {
    Generator generator(rig.engine, kTokens, max_rows);
    // One token, less than a compression block, exactly one, one more, a selection block and more of them.
    for (const std::int64_t prompt : {1, 3, 4, 5, 8, 13, 33}) {
      SCOPED_TRACE("prompt " + std::to_string(prompt) + ", at once " + std::to_string(max_rows));
      generator.clear();
      const std::span<const std::int32_t> tokens(rig.token);
      const TensorView logits = generator.append(tokens.first(static_cast<std::size_t>(prompt)));
      ASSERT_LE(truth.error(logits, prompt - 1), tolerance);
      rig.expect_selection(prompt - 1, prompt <= max_rows ? prompt : (prompt - 1) % max_rows + 1);
      for (std::int64_t t = prompt; t < kTokens; ++t) {
        const TensorView step = generator.append(tokens.subspan(static_cast<std::size_t>(t), 1));
        ASSERT_LE(truth.error(step, t), tolerance) << "token " << t;
        rig.expect_selection(t, 1);
      }
    }
  }
}

TEST(Generate, DenseEqualsAFreshForward) {
  for (const std::int64_t kv_heads : {4, 2, 1}) {
    check(dense_model(kv_heads));
    check(dense_model(kv_heads), DType::f32);
  }
}

TEST(Generate, DenseWithEveryOption) {
  auto m = dense_model();
  m.qk_norm = m.attention_bias = true;
  m.tie_word_embeddings = false;
  m.rope_scaling = {.rope_type = "yarn", .factor = 4, .original_max_position_embeddings = 16};
  check(m);
  for (const std::int64_t window : {1, 2, 5, 39, 64}) {
    m.sliding_window = window;
    SCOPED_TRACE("sliding window " + std::to_string(window));
    check(m);
  }
}

TEST(Generate, SparseEqualsAFreshForward) {
  for (const char* kv : {"per_branch", "shared"}) {
    for (const char* rope : {"after", "before"}) {
      for (const char* compression : {"mlp", "mean"}) {
        SCOPED_TRACE(std::string(kv) + " " + rope + " " + compression);
        auto m = sparse_model();
        m.nsa.kv = kv;
        m.nsa.rope = rope;
        m.nsa.compression = compression;
        check(m);
        m.qk_norm = m.attention_bias = true;
        check(m, DType::f32);
      }
    }
  }
}

TEST(Generate, SparseGroupsAndMixedLayers) {
  for (const std::int64_t kv_heads : {4, 1}) {
    auto m = sparse_model(kv_heads);
    check(m);
    m.attention = {model::AttentionKind::dense, model::AttentionKind::nsa};
    m.nsa.window = 1;
    m.sliding_window = 6;
    check(m);
  }
}

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

TEST(Generate, CacheBytesAreTheFormulas) {
  const std::int64_t row = 2 * 2 * 6 * 8;  // K and V of two heads of 6 in double
  const std::int64_t rows = 8;             // at once
  auto bytes = [&](const model::ModelConfig& m) {
    Rig rig(m, DType::f64);
    return Generator(rig.engine, kTokens, rows).cache_bytes();
  };
  EXPECT_EQ(bytes(dense_model()), 2 * aligned(kTokens * row));
  auto m = dense_model();
  m.sliding_window = 5;
  EXPECT_EQ(bytes(m), 2 * aligned((5 - 1 + rows) * row));
  m = sparse_model();
  const std::int64_t blocks = (kTokens - 4) / 2 + 1, window = 7 - 1 + rows, open = 4 - 1 + rows;
  EXPECT_EQ(bytes(m),
            2 * (aligned(kTokens * row) + aligned(window * row) + aligned(open * row) + aligned(blocks * row)));
  m.nsa.kv = "shared";
  EXPECT_EQ(bytes(m), 2 * (aligned(kTokens * row) + aligned(open * row) + aligned(blocks * row)));
  m.nsa.rope = "before";
  EXPECT_EQ(bytes(m), 2 * (aligned(kTokens * row) + aligned(blocks * row)));
}

TEST(Generate, AStepAllocatesNothing) {
  for (const auto& config : {dense_model(), sparse_model()}) {
    Rig rig(config, DType::f32);
    rig.engine.model().on_attention(nullptr);
    Generator generator(rig.engine, kTokens, 8);
    Sampler sampler({.temperature = 0.7, .top_p = 0.9, .seed = 1}, kVocab);
    (void)generator.append(std::span<const std::int32_t>(rig.token).first(9));
    std::int32_t next = sampler(generator.append({rig.token.data(), 1}), 0);
    const auto heap = testing::heap_bytes(), commits = Arena::num_commits();
    for (std::int64_t t = 10; t < kTokens; ++t) next = sampler(generator.append({&next, 1}), t);
    EXPECT_EQ(testing::heap_bytes(), heap);
    EXPECT_EQ(Arena::num_commits(), commits);
  }
}

TEST(Generate, RefusesMoreThanItsCapacity) {
  Rig rig(dense_model(), DType::f32);
  Generator generator(rig.engine, 8, 4);
  (void)generator.append(std::span<const std::int32_t>(rig.token).first(8));
  EXPECT_THROW((void)generator.append({rig.token.data(), 1}), Error);
}

}  // namespace
}  // namespace annulus::train
