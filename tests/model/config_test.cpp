// What resolve() derives and what validate() refuses, key by key (spec/model.md, spec/nsa.md).
#include "model/config.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/error.h"

namespace annulus::model {
namespace {

std::string refusal(ModelConfig config) {
  config.resolve();
  try {
    config.validate();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ModelConfig, ResolvesDerivedFields) {
  ModelConfig c;
  c.hidden_size = 96;
  c.num_attention_heads = 6;
  c.resolve();
  EXPECT_EQ(c.num_key_value_heads, 6);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.nsa.hidden, 16);
  EXPECT_EQ(c.group(), 1);
  const ModelConfig once = c;
  c.resolve();
  EXPECT_EQ(c, once);

  ModelConfig given;  // Qwen3: head_dim is not hidden_size / heads
  given.hidden_size = 1024;
  given.num_attention_heads = 16;
  given.num_key_value_heads = 8;
  given.head_dim = 128;
  given.nsa.hidden = 40;
  given.resolve();
  EXPECT_EQ(given.head_dim, 128);
  EXPECT_EQ(given.nsa.hidden, 40);
  EXPECT_EQ(given.group(), 2);
  given.validate();
}

TEST(ModelConfig, LayerKindsRepeat) {
  ModelConfig c;
  EXPECT_FALSE(c.has_nsa());
  c.attention = {AttentionKind::nsa, AttentionKind::nsa, AttentionKind::dense};
  EXPECT_TRUE(c.has_nsa());
  EXPECT_EQ(c.kind(1), AttentionKind::nsa);
  EXPECT_EQ(c.kind(2), AttentionKind::dense);
  EXPECT_EQ(c.kind(3), AttentionKind::nsa);
  EXPECT_EQ(c.kind(5), AttentionKind::dense);
}

struct Bad {
  std::function<void(ModelConfig&)> change;
  const char* message;
};

void expect_refused(std::initializer_list<Bad> all) {
  for (const Bad& bad : all) {
    ModelConfig config;
    bad.change(config);
    const std::string said = refusal(config);
    EXPECT_NE(said.find(bad.message), std::string::npos) << "wanted: " << bad.message << "\n  said: " << said;
  }
}

TEST(ModelConfig, RefusesSizesThatCannotBe) {
  EXPECT_EQ(refusal(ModelConfig{}), "accepted");
  expect_refused({
      {[](auto& c) { c.vocab_size = 0; }, "model.vocab_size = 0: expected an integer from 1"},
      {[](auto& c) { c.vocab_size = std::int64_t{1} << 40; }, "model.vocab_size = 1099511627776"},
      {[](auto& c) { c.hidden_size = -8; }, "model.hidden_size = -8"},
      {[](auto& c) { c.intermediate_size = 0; }, "model.intermediate_size = 0"},
      {[](auto& c) { c.num_hidden_layers = 0; }, "model.num_hidden_layers = 0"},
      {[](auto& c) { c.num_attention_heads = 0; }, "model.num_attention_heads = 0"},
      {[](auto& c) { c.num_attention_heads = -4; }, "model.num_attention_heads = -4"},
      {[](auto& c) { c.num_key_value_heads = -1; }, "model.num_key_value_heads = -1"},
      {[](auto& c) { c.num_key_value_heads = 3; },
       "model.num_key_value_heads = 3: expected a divisor of model.num_attention_heads = 8; these fit: 1, 2, 4, 8"},
      {[](auto& c) { c.hidden_size = 100; },
       "model.hidden_size = 100: expected a multiple of model.num_attention_heads = 8"},
      {[](auto& c) { c.hidden_size = 100; }, "96 or 104 would fit"},
      {[](auto& c) { c.head_dim = 33; }, "model.head_dim = 33: expected an even number"},
      {[](auto& c) { c.head_dim = 258; }, "model.head_dim = 258: expected an integer from 2 to 256"},
      {[](auto& c) { c.rms_norm_eps = 0; }, "model.rms_norm_eps = 0"},
      {[](auto& c) { c.sliding_window = -1; }, "model.sliding_window = -1"},
      {[](auto& c) { c.attention.clear(); }, "model.attention = []"},
      {[](auto& c) { c.attention.resize(5); },
       "model.attention = a list of 5 kinds: expected at most model.num_hidden_layers = 4"},
  });
}

TEST(ModelConfig, RefusesRopeThatCannotBe) {
  expect_refused({
      {[](auto& c) { c.rope_theta = 0; }, "model.rope_theta = 0"},
      {[](auto& c) { c.rope_scaling.rope_type = "lama3"; }, "(did you mean \"llama3\"?)"},
      {[](auto& c) { c.rope_scaling.factor = 0.5; }, "model.rope_scaling.factor = 0.5"},
      {[](auto& c) { c.rope_scaling.rope_type = "llama3"; }, "model.rope_scaling.original_max_position_embeddings = 0"},
      {[](auto& c) { c.rope_scaling.rope_type = "yarn"; }, "since rope_type = \"yarn\""},
      {[](auto& c) { c.rope_scaling.low_freq_factor = 0; }, "model.rope_scaling.low_freq_factor = 0"},
      {[](auto& c) { c.rope_scaling.high_freq_factor = 1; },
       "model.rope_scaling.high_freq_factor = 1: expected more than"},
      {[](auto& c) { c.rope_scaling.beta_fast = 1; },
       "model.rope_scaling.beta_fast = 1: expected more than beta_slow = 1"},
      {[](auto& c) { c.rope_scaling.attention_factor = -1; }, "model.rope_scaling.attention_factor = -1"},
  });
}

TEST(ModelConfig, RefusesNsaRulesBroken) {
  expect_refused({
      {[](auto& c) { c.nsa.kv = "share"; }, "model.nsa.kv = \"share\": expected \"per_branch\" or \"shared\""},
      {[](auto& c) { c.nsa.compression = "max"; }, "model.nsa.compression = \"max\""},
      {[](auto& c) { c.nsa.rope = "none"; }, "model.nsa.rope = \"none\""},
      {[](auto& c) { c.nsa.stride = 12; }, "model.nsa.stride = 12: expected a divisor of model.nsa.block = 32"},
      {[](auto& c) {
         c.nsa.stride = 32;
         c.nsa.select_block = 48;
       },
       "expected a divisor of model.nsa.select_block = 48"},
      {[](auto& c) { c.nsa.block = 128; }, "model.nsa.block = 128: expected at most model.nsa.select_block = 64"},
      {[](auto& c) { c.nsa.select_count = 2; },
       "model.nsa.select_count = 2: expected at least init_blocks + local_blocks = 3"},
      {[](auto& c) { c.nsa.select_count = 1025; }, "model.nsa.select_count = 1025: expected an integer from 1 to 1024"},
      {[](auto& c) { c.nsa.select_block = 1 << 20; }, "model.nsa.select_block = 1048576: expected an integer from 1"},
      {[](auto& c) { c.nsa.local_blocks = 0; }, "model.nsa.local_blocks = 0"},
      {[](auto& c) { c.nsa.init_blocks = -1; }, "model.nsa.init_blocks = -1"},
      {[](auto& c) { c.nsa.window = 0; }, "model.nsa.window = 0"},
      {[](auto& c) { c.nsa.stride = 0; }, "model.nsa.stride = 0"},
      {[](auto& c) { c.nsa.hidden = -1; }, "model.nsa.hidden = -1"},
  });
  ModelConfig edge;
  edge.attention = {AttentionKind::nsa};
  edge.nsa.block = edge.nsa.stride = edge.nsa.select_block = edge.nsa.window = 1;
  edge.nsa.select_count = edge.nsa.local_blocks = 1;
  edge.nsa.init_blocks = 0;
  EXPECT_EQ(refusal(edge), "accepted");
}

}  // namespace
}  // namespace annulus::model
