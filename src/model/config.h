// ModelConfig: the architecture, under HuggingFace's key names (spec/model.md). validate() throws ConfigError naming
// the key, its value, what was expected and what to do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/nsa_shape.h"

namespace annulus::model {

enum class AttentionKind { dense, nsa };

struct RopeScaling {
  std::string rope_type = "default";  // default, linear, llama3, yarn
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;   // llama3
  std::int64_t original_max_position_embeddings = 0;  // llama3, yarn
  double beta_fast = 32, beta_slow = 1;               // yarn
  double attention_factor = 0;                        // yarn; 0: 0.1·ln(factor) + 1
  bool operator==(const RopeScaling&) const = default;
};

struct NsaConfig {                  // spec/nsa.md
  std::string kv = "per_branch";    // per_branch, shared
  std::string compression = "mlp";  // mlp, mean
  std::string rope = "after";       // after, before
  std::int64_t block = 32, stride = 16;
  std::int64_t hidden = 0;  // 0: head_dim
  std::int64_t select_block = 64, select_count = 16, init_blocks = 1, local_blocks = 2, window = 512;
  attention::NsaShape shape() const;
  bool operator==(const NsaConfig&) const = default;
};

struct ModelConfig {
  std::int64_t vocab_size = 257;
  std::int64_t hidden_size = 256;
  std::int64_t intermediate_size = 704;
  std::int64_t num_hidden_layers = 4;
  std::int64_t num_attention_heads = 8;
  std::int64_t num_key_value_heads = 0;  // 0: num_attention_heads
  std::int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  bool tie_word_embeddings = true;
  bool attention_bias = false;
  bool qk_norm = false;
  std::int64_t sliding_window = 0;                                // 0: none
  std::vector<AttentionKind> attention = {AttentionKind::dense};  // layer i is attention[i mod length]
  NsaConfig nsa;

  void resolve();         // fills fields that are 0 for "derived"
  void validate() const;  // of a resolved config

  AttentionKind kind(std::int64_t layer) const { return attention[static_cast<std::size_t>(layer) % attention.size()]; }
  bool has_nsa() const;
  std::int64_t group() const { return num_attention_heads / num_key_value_heads; }  // G
  bool operator==(const ModelConfig&) const = default;
};

}  // namespace annulus::model
