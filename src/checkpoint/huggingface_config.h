// HuggingFace's config.json of the families whose forward is ours: Llama, Mistral, Qwen2, Qwen3 (*ForCausalLM). Both
// generations of RoPE fields are read (rope_theta and rope_scaling at the top, or rope_parameters) and both written.
// A field that changes the forward in a way that ModelConfig cannot say is refused by name, and so is one that is not
// known, unless it is null or false.
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "model/config.h"

namespace annulus::checkpoint {

struct HuggingFaceConfig {
  model::ModelConfig model;  // resolved
  std::int64_t max_position_embeddings = 0;
  std::string tokenizer = "none";  // ours ("annulus_tokenizer"): data.tokenizer of the run
};

// CheckpointError that starts with `where` and names the field. A pure function, also fuzzed.
HuggingFaceConfig parse_huggingface_config(const std::string& text, const std::string& where);

// The family is the one that has the model's biases, norms and window. ConfigError where none has.
std::string to_huggingface_json(const HuggingFaceConfig& config, DType stored);

}  // namespace annulus::checkpoint
