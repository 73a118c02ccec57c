#include "model/row_cache.h"

#include <algorithm>

#include "core/device_memory.h"

namespace annulus::model {

std::int64_t RowCache::num_rows(const CacheSizes& sizes, std::int64_t window) {
  if (window == 0) return sizes.capacity;
  return std::min(sizes.capacity, window - 1 + std::max(sizes.max_rows, window));
}

RowCache::RowCache(Arena& arena, const char* name, const CacheSizes& sizes, std::int64_t window, std::int64_t kv_heads,
                   std::int64_t head_dim)
    : kv_(arena.allocate(name, sizes.dtype, {2, num_rows(sizes, window), kv_heads, head_dim})), window_(window) {}

void RowCache::append(Context& ctx, std::int64_t position, std::int64_t count) {
  if (position == 0) begin_ = used_ = 0;
  ANNULUS_CHECK(position == begin_ + used_ && count >= 1, "token {} is appended to a cache of tokens {} to {}",
                position, begin_, begin_ + used_ - 1);
  const std::int64_t rows = kv_.dim(1), keep = std::min(used_, window_ - 1), drop = used_ - keep;
  if (used_ + count > rows && window_ > 0) {
    for (int which = 0; which < 2; ++which) {
      for (std::int64_t to = 0; to < keep; to += drop) {  // pieces that do not overlap, in order
        const std::int64_t piece = std::min(drop, keep - to);
        copy(ctx, kv_[which].rows(to + drop, piece), kv_[which].rows(to, piece));
      }
    }
    begin_ += drop;
    used_ = keep;
  }
  ANNULUS_CHECK(used_ + count <= rows, "{} rows do not fit in a cache of {} that holds {}", count, rows, used_);
  used_ += count;
  fresh_ = count;
}

TensorView RowCache::rows(int which, std::int64_t first, std::int64_t count) const {
  return kv_[which].rows(first, count).reshape({1, count, kv_.dim(2), kv_.dim(3)});
}

}  // namespace annulus::model
