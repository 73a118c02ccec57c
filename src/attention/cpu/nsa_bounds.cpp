// nsa_bounds: what rows see in compressed keys and in the window's buffer.
#include <algorithm>

#include "attention/compress.h"
#include "ops/cpu/parallel.h"

namespace annulus::attention::cpu {
namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

}  // namespace

void nsa_bounds(Context&, const NsaBounds& args) {
  const auto *token = args.token.as<std::int32_t>(), *start = args.start.as<std::int32_t>();
  auto *compressed_first = args.compressed_first.as<std::int32_t>(),
       *compressed_last = args.compressed_last.as<std::int32_t>(), *window_first = args.window_first.as<std::int32_t>(),
       *window_last = args.window_last.as<std::int32_t>();
  ops::cpu::for_ranges(args.token.numel(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t t = token[r], s = start[r];
      const int slot = args.chunk_begin[1] >= 0 && t >= args.chunk_begin[1];
      const std::int64_t row = slot * (args.halo + args.chunk) + args.halo - args.chunk_begin[slot];  // of token 0
      compressed_first[r] = static_cast<std::int32_t>((s + args.stride - 1) / args.stride);
      compressed_last[r] =
          static_cast<std::int32_t>(std::min(floor_div(t - args.block + 1, args.stride), args.num_blocks - 1));
      window_first[r] = static_cast<std::int32_t>(std::max(s, t - args.window + 1) + row);
      window_last[r] = static_cast<std::int32_t>(t + row);
    }
  });
}

}  // namespace annulus::attention::cpu
