// RowCache: keys and values of the tokens of one sequence, appended as they come: all of them, or with a window w the
// last w − 1 before the newest. Rows lie in order, as one band: [rows, Hkv, D] each for K and V, KV heads never
// repeated. With a window a full buffer moves its last w − 1 rows to the front, once in `slack` tokens at most; nothing
// is allocated after the arena's commit.
#pragma once

#include "core/context.h"

namespace annulus::model {

struct CacheSizes {
  DType dtype = DType::f32;
  std::int64_t capacity = 0;  // tokens of the sequence
  std::int64_t max_rows = 1;  // appended at once
};

class RowCache {
 public:
  RowCache() = default;
  // window 0: every token stays.
  RowCache(Arena& arena, const char* name, const CacheSizes& sizes, std::int64_t window, std::int64_t kv_heads,
           std::int64_t head_dim);

  // Rows of a window w: w − 1 and `slack` = max(max_rows, w), no more than the sequence has tokens.
  static std::int64_t num_rows(const CacheSizes& sizes, std::int64_t window);

  // Makes room for tokens position … position + count − 1, which must follow those held; 0 starts afresh.
  void append(Context& ctx, std::int64_t position, std::int64_t count);
  TensorView fresh_k() const { return kv_[0].rows(used_ - fresh_, fresh_); }  // to be written, [count, Hkv, D]
  TensorView fresh_v() const { return kv_[1].rows(used_ - fresh_, fresh_); }

  std::int64_t begin() const { return begin_; }  // the token of row 0
  std::int64_t used() const { return used_; }
  TensorView k() const { return rows(0, 0, used_); }  // [1, used, Hkv, D]
  TensorView v() const { return rows(1, 0, used_); }
  // Rows of K (0) or V (1) as a sequence of their own.
  TensorView rows(int which, std::int64_t first, std::int64_t count) const;

 private:
  TensorView kv_;  // [2, rows, Hkv, D]
  std::int64_t window_ = 0, begin_ = 0, used_ = 0, fresh_ = 0;
};

}  // namespace annulus::model
