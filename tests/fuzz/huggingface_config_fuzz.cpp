// The input is a config.json. What is accepted is a valid config, and is written and read again without change.
#include <cstdlib>
#include <string>

#include "checkpoint/huggingface_config.h"
#include "core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace annulus;
  checkpoint::HuggingFaceConfig once;
  try {
    once = checkpoint::parse_huggingface_config({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const CheckpointError&) {  // any other exception is a fault
    return 0;
  }
  once.model.validate();
  std::string text;
  try {
    text = checkpoint::to_huggingface_json(once, DType::f32);
  } catch (const ConfigError&) {  // norms with biases: no family has both
    return 0;
  }
  const auto twice = checkpoint::parse_huggingface_config(text, "written");
  if (!(once.model == twice.model) || once.max_position_embeddings != twice.max_position_embeddings) std::abort();
  return 0;
}
