// The input is a file of the safetensors format. What is accepted must be what the reader's contract says.
#include <cstdlib>
#include <string_view>

#include "checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace annulus::checkpoint;
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  try {
    const auto length = parse_safetensors_length(file.substr(0, 8), static_cast<std::int64_t>(size), "fuzz");
    const auto header = file.substr(8, static_cast<std::size_t>(length));
    const auto data_bytes = static_cast<std::int64_t>(size) - 8 - length;
    std::int64_t end = 0;
    for (const SafetensorsEntry& e : parse_safetensors_header(header, data_bytes, "fuzz")) {
      if (e.begin != end || e.shape.numel() < 0) std::abort();
      end += e.shape.numel() * static_cast<std::int64_t>(annulus::size_of(e.dtype));
    }
    if (end != data_bytes) std::abort();
  } catch (const annulus::CheckpointError&) {  // any other exception is a fault
  }
  return 0;
}
