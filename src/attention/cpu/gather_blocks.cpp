// gather_blocks: copies, by block and KV head.
#include <algorithm>

#include "attention/select.h"
#include "ops/cpu/parallel.h"

namespace annulus::attention::cpu {

void gather_blocks(Context&, const GatherBlocks& args) {
  const std::int64_t rows = args.k_out.dim(1), kv_heads = args.k.dim(2), depth = args.k.dim(3);
  const std::int64_t count = args.selected.dim(3), blocks = (rows + args.select_block - 1) / args.select_block;
  const auto* selected = args.selected.as<std::int32_t>();
  ops::cpu::for_type(args.k, [&](auto type) {
    using T = decltype(type);
    const T* from[2] = {args.k.as<T>(), args.v.as<T>()};
    T* to[2] = {args.k_out.as<T>(), args.v_out.as<T>()};
    ops::cpu::for_rows(2 * blocks, args.select_block * kv_heads * depth, [&](std::int64_t i) {
      const std::int64_t which = i / blocks, block = i % blocks, begin = block * args.select_block;
      const std::int64_t end = std::min(begin + args.select_block, rows);
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t head = 0; head < kv_heads; ++head) {
          const std::int64_t token = selected[head * count + block] * args.select_block + row - begin;
          std::copy_n(from[which] + (token * kv_heads + head) * depth, depth,
                      to[which] + (row * kv_heads + head) * depth);
        }
      }
    });
  });
}

}  // namespace annulus::attention::cpu
