// The names of the families that huggingface_config.cpp reads and huggingface_config_write.cpp writes.
#pragma once

#include <array>

namespace annulus::checkpoint {

enum class Family { llama, mistral, qwen2, qwen3 };
struct FamilyName {
  Family family;
  const char* model_type;
  const char* architecture;
};
inline constexpr std::array<FamilyName, 4> kFamilies{{{Family::llama, "llama", "LlamaForCausalLM"},
                                                      {Family::mistral, "mistral", "MistralForCausalLM"},
                                                      {Family::qwen2, "qwen2", "Qwen2ForCausalLM"},
                                                      {Family::qwen3, "qwen3", "Qwen3ForCausalLM"}}};

}  // namespace annulus::checkpoint
