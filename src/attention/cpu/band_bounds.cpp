// Global bounds of visibility to rows of a visiting key buffer: arithmetic only (band.h).
#include <algorithm>

#include "attention/band.h"

namespace annulus::attention::cpu {

void band_bounds(Context&, const BandBounds& args) {
  const auto rows_before = [&](std::int64_t token) {
    std::int64_t rows = 0;
    for (const std::int64_t begin : args.chunk_begin) {
      if (begin >= 0) rows += std::clamp<std::int64_t>(token - begin, 0, args.chunk);
    }
    return rows;
  };
  const auto *global_first = args.global_first.as<std::int32_t>(), *global_last = args.global_last.as<std::int32_t>();
  auto *first = args.first.as<std::int32_t>(), *last = args.last.as<std::int32_t>();
  const std::int64_t count = args.first.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    // Through temporaries: the outputs may be the inputs.
    const std::int64_t begin = rows_before(global_first[i]), end = rows_before(std::int64_t{global_last[i]} + 1);
    first[i] = static_cast<std::int32_t>(begin);
    last[i] = static_cast<std::int32_t>(end - 1);
  }
}

}  // namespace annulus::attention::cpu
