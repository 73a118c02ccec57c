// The input is a model.safetensors.index.json. What is accepted are plain names.
#include <cstdlib>
#include <string>

#include "checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace annulus::checkpoint;
  try {
    for (const auto& [tensor, file] : parse_safetensors_index({reinterpret_cast<const char*>(data), size}, "fuzz")) {
      if (file.empty() || file[0] == '/' || file.find('/') != file.npos || file.find('\0') != file.npos ||
          file == "..") {
        std::abort();
      }
    }
  } catch (const annulus::CheckpointError&) {  // any other exception is a fault
  }
  return 0;
}
