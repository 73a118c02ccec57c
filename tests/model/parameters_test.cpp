// Names and shapes of spec/model.md, initial values, and how flat ranges map to parameters.
#include "model/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace annulus::model {
namespace {

ModelConfig config() {
  ModelConfig c;
  c.vocab_size = 300;
  c.hidden_size = 64;
  c.intermediate_size = 96;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 10;
  c.resolve();
  return c;
}

TEST(Parameters, NamesAndShapes) {
  ModelConfig c = config();
  c.qk_norm = c.attention_bias = true;
  c.tie_word_embeddings = false;
  Transformer model(c);
  std::map<std::string, std::string> found;
  model.visit_parameters([&](Parameter& p) { found[p.name] = p.shape.str(); });
  const std::map<std::string, std::string> layer = {
      {"input_layernorm.weight", "[64]"},      {"post_attention_layernorm.weight", "[64]"},
      {"self_attn.q_proj.weight", "[40, 64]"}, {"self_attn.q_proj.bias", "[40]"},
      {"self_attn.k_proj.weight", "[20, 64]"}, {"self_attn.k_proj.bias", "[20]"},
      {"self_attn.v_proj.weight", "[20, 64]"}, {"self_attn.v_proj.bias", "[20]"},
      {"self_attn.q_norm.weight", "[10]"},     {"self_attn.k_norm.weight", "[10]"},
      {"self_attn.o_proj.weight", "[64, 40]"}, {"mlp.gate_proj.weight", "[96, 64]"},
      {"mlp.up_proj.weight", "[96, 64]"},      {"mlp.down_proj.weight", "[64, 96]"}};
  std::map<std::string, std::string> wanted = {
      {"model.embed_tokens.weight", "[300, 64]"}, {"model.norm.weight", "[64]"}, {"lm_head.weight", "[300, 64]"}};
  for (const auto& [name, shape] : layer) {
    wanted["model.layers.0." + name] = shape;
    wanted["model.layers.1." + name] = shape;
  }
  EXPECT_EQ(found, wanted);
  c.tie_word_embeddings = true;
  Transformer tied(c);
  tied.visit_parameters([&](Parameter& p) { EXPECT_NE(p.name, "lm_head.weight"); });
}

// Any cut into shards draws the same weights; deviations and kinds are the spec's.
TEST(Parameters, InitialValuesDependOnNameAndElementAlone) {
  Transformer model(config());
  ParameterStore store(model, 0, 1);
  const auto total = static_cast<std::size_t>(store.shards().total());
  std::vector<double> whole(total), pieces(total);
  store.initial_values(7, 0, std::span<double>(whole));
  for (std::size_t at = 0; at < total; at += 1001) {
    store.initial_values(7, static_cast<std::int64_t>(at),
                         std::span<double>(pieces).subspan(at, std::min<std::size_t>(1001, total - at)));
  }
  EXPECT_EQ(whole, pieces);
  std::vector<double> other(total);
  store.initial_values(8, 0, std::span<double>(other));
  EXPECT_NE(whole, other);
  for (const auto& e : store.entries()) {
    double sum = 0, squares = 0;
    for (std::int64_t i = e.offset; i < e.offset + e.count; ++i) {
      sum += whole[static_cast<std::size_t>(i)];
      squares += whole[static_cast<std::size_t>(i)] * whole[static_cast<std::size_t>(i)];
    }
    const double n = static_cast<double>(e.count), std = std::sqrt(squares / n);
    const bool residual = e.name.ends_with("o_proj.weight") || e.name.ends_with("down_proj.weight");
    if (e.init == Init::ones) {
      EXPECT_EQ(sum, n) << e.name;
    } else {
      const double wanted = residual ? 0.02 / std::sqrt(4.0) : 0.02;
      EXPECT_NEAR(std, wanted, 5 * wanted / std::sqrt(2 * n)) << e.name;  // five standard errors
      EXPECT_NEAR(sum / n, 0, 5 * wanted / std::sqrt(n)) << e.name;
    }
  }
}

TEST(Parameters, PartsTileTheFlatBuffer) {
  Transformer model(config());
  for (const int ranks : {1, 2, 3, 7}) {
    std::map<std::string, std::int64_t> next;
    for (int rank = 0; rank < ranks; ++rank) {
      const ParameterStore store(model, rank, ranks);
      for (const auto& part : store.parts(store.shards().begin(), store.shards().shard())) {
        EXPECT_EQ(part.begin, next[part.entry->name]);
        EXPECT_EQ(part.flat, part.entry->offset + part.begin);
        next[part.entry->name] += part.count;
      }
    }
    const ParameterStore store(model, 0, ranks);
    for (const auto& e : store.entries()) {
      EXPECT_EQ(next[e.name], e.count) << e.name;
      EXPECT_EQ(e.offset % 64, 0);
    }
  }
}

// 6 · (matrix parameters) per token, and 3.5 · 4 · pairs · Hq · D for attention: counted by hand.
TEST(Parameters, TrainingFlops) {
  Transformer model(config());
  const double matrices = 300 * 64 + 2 * (40 * 64 + 2 * 20 * 64 + 64 * 40 + 3 * 96 * 64);
  EXPECT_DOUBLE_EQ(model.training_flops(8), 6 * matrices * 8 + 2 * 3.5 * 4 * 36 * 40);
  ModelConfig windowed = config();
  windowed.sliding_window = 3;
  Transformer narrow(windowed);  // rows see 1, 2, 3, 3, 3, 3, 3, 3 keys
  EXPECT_DOUBLE_EQ(narrow.training_flops(8), 6 * matrices * 8 + 2 * 3.5 * 4 * 21 * 40);
}

// Sparse layers: compression's matrices once per block and KV head, the gate, three pairs of projections, and pairs of
// the branches: 8 tokens in blocks of 2 from each token on are 7, seen by 7, 6, … 1 queries; 2 blocks of 2 selected, so
// rows see 1, 2, 3, 4, 4 … keys; a window of 3 as above.
TEST(Parameters, SparseTrainingFlops) {
  ModelConfig sparse = config();
  sparse.attention = {AttentionKind::nsa};
  sparse.nsa = {
      .block = 2, .stride = 1, .hidden = 3, .select_block = 2, .select_count = 2, .local_blocks = 1, .window = 3};
  sparse.resolve();
  Transformer model(sparse);
  const auto& c = sparse;
  const double d = static_cast<double>(c.head_dim), kv = static_cast<double>(c.num_key_value_heads), hq = 40 / d;
  const double compression = 2 * kv * (3 * 2 * d + d * 3);
  const double matrices = 300 * 64 + 2 * (40 * 64 + 6 * 20 * 64 + 3 * hq * 64 + compression + 64 * 40 + 3 * 96 * 64);
  EXPECT_DOUBLE_EQ(model.training_flops(8), 6 * matrices * 8 + 2 * 3.5 * 4 * (28 + 26 + 21) * 40);
  EXPECT_DOUBLE_EQ(model.training_flops(8, true), 6 * matrices * 8 + 2 * 3.5 * 4 * 36 * 40);
}

}  // namespace
}  // namespace annulus::model
