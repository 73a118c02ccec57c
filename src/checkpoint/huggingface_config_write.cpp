#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/huggingface_config.h"
#include "checkpoint/huggingface_family.h"
#include "core/error.h"

namespace annulus::checkpoint {
namespace {

nlohmann::ordered_json scaling_json(const model::RopeScaling& s) {
  nlohmann::ordered_json out{{"rope_type", s.rope_type}};
  if (s.rope_type == "default") return out;
  out["factor"] = s.factor;
  if (s.rope_type == "linear") return out;
  out["original_max_position_embeddings"] = s.original_max_position_embeddings;
  if (s.rope_type == "llama3") {
    out["low_freq_factor"] = s.low_freq_factor;
    out["high_freq_factor"] = s.high_freq_factor;
  } else {
    out["beta_fast"] = s.beta_fast;
    out["beta_slow"] = s.beta_slow;
    if (s.attention_factor > 0) out["attention_factor"] = s.attention_factor;
  }
  return out;
}

FamilyName family_of(const model::ModelConfig& m) {
  if (m.has_nsa()) {
    throw ConfigError("model.attention has \"nsa\" layers, which no HuggingFace model has; write --format checkpoint");
  }
  if (m.qk_norm && m.attention_bias) {
    throw ConfigError(
        "model.qk_norm with model.attention_bias: Qwen3 has the norms and Qwen2 the biases, no HuggingFace "
        "model has both; write --format checkpoint");
  }
  return kFamilies[m.qk_norm ? 3 : m.attention_bias ? 2 : m.sliding_window > 0 ? 1 : 0];
}

}  // namespace

std::string to_huggingface_json(const HuggingFaceConfig& config, DType stored) {
  const model::ModelConfig& m = config.model;
  const FamilyName family = family_of(m);
  const std::string_view dtype = name_of(stored);
  nlohmann::ordered_json out{{"architectures", {family.architecture}},
                             {"model_type", family.model_type},
                             {"vocab_size", m.vocab_size},
                             {"hidden_size", m.hidden_size},
                             {"intermediate_size", m.intermediate_size},
                             {"num_hidden_layers", m.num_hidden_layers},
                             {"num_attention_heads", m.num_attention_heads},
                             {"num_key_value_heads", m.num_key_value_heads},
                             {"head_dim", m.head_dim},
                             {"hidden_act", "silu"},
                             {"max_position_embeddings", config.max_position_embeddings},
                             {"rms_norm_eps", m.rms_norm_eps},
                             {"tie_word_embeddings", m.tie_word_embeddings},
                             {"attention_dropout", 0.0},
                             {"initializer_range", 0.02},
                             {"bos_token_id", nullptr},
                             {"eos_token_id", nullptr},
                             {"use_cache", true},
                             {"torch_dtype", dtype},
                             {"dtype", dtype}};
  if (family.family == Family::llama) out["mlp_bias"] = false;
  if (family.family == Family::llama || family.family == Family::qwen3) out["attention_bias"] = false;
  if (family.family == Family::mistral) out["sliding_window"] = m.sliding_window;
  if (m.qk_norm || m.attention_bias) {  // Qwen: layers from max_window_layers on have the window
    out["use_sliding_window"] = m.sliding_window > 0;
    out["sliding_window"] = m.sliding_window > 0 ? nlohmann::ordered_json(m.sliding_window) : nullptr;
    out["max_window_layers"] = m.sliding_window > 0 ? 0 : m.num_hidden_layers;
    out["layer_types"] = std::vector<std::string>(static_cast<std::size_t>(m.num_hidden_layers),
                                                  m.sliding_window > 0 ? "sliding_attention" : "full_attention");
  }
  out["rope_theta"] = m.rope_theta;  // transformers 4
  out["rope_scaling"] = m.rope_scaling.rope_type == "default" ? nullptr : scaling_json(m.rope_scaling);
  out["rope_parameters"] = scaling_json(m.rope_scaling);  // transformers 5
  out["rope_parameters"]["rope_theta"] = m.rope_theta;
  if (config.tokenizer != "none") out["annulus_tokenizer"] = config.tokenizer;
  return out.dump(2) + "\n";
}

}  // namespace annulus::checkpoint
