#include "checkpoint/piece.h"

#include <gtest/gtest.h>

namespace annulus::checkpoint {
namespace {

TEST(Piece, EveryRangeIsAtMostThreeRectanglesInOrder) {
  for (const std::int64_t cols : {1, 2, 5}) {
    const std::int64_t total = 4 * cols;
    for (std::int64_t begin = 0; begin < total; ++begin) {
      for (std::int64_t count = 0; begin + count <= total; ++count) {
        std::int64_t at = begin;
        const auto rects = cut(begin, count, cols);
        EXPECT_LE(rects.size(), cols == 1 ? 1u : 3u);
        for (const Rect& r : rects) {
          EXPECT_EQ(r.row * cols + r.col, at);
          EXPECT_TRUE(r.cols == cols || r.rows == 1);
          EXPECT_LE(r.col + r.cols, cols);
          EXPECT_GT(r.numel(), 0);
          at += r.numel();
        }
        EXPECT_EQ(at, begin + count);
      }
    }
  }
}

TEST(Piece, ChunksAreBetweenOneAndFourMebibytes) {
  constexpr std::int64_t kMiB = 1 << 20;
  for (const std::int64_t element : {2, 4, 8}) {
    for (const std::int64_t rows : {1, 2, 3, 7, 100, 4096, 1234567}) {
      for (const std::int64_t cols : {1, 3, 700, 4096, 262144, 300001, 700001, 2097153, 5000000}) {
        const auto [r, c] = chunk_of(rows, cols, element);
        const std::int64_t bytes = r * c * element, total = rows * cols * element;
        EXPECT_TRUE(c == cols || r == 1) << rows << "x" << cols;
        EXPECT_LE(r, rows);
        EXPECT_LE(bytes, 4 * kMiB) << rows << "x" << cols << " of " << element;
        EXPECT_GE(bytes, std::min(total, kMiB)) << rows << "x" << cols << " of " << element;
      }
    }
  }
}

TEST(Piece, NamesAreNamesOnly) {
  for (const char* good : {"model.layers.0.self_attn.q_proj.weight", "w", "a-b_C.9", "..."})
    EXPECT_TRUE(is_tensor_name(good)) << good;
  for (const char* bad : {"", ".", "..", "a/b", "/a", "a b", "a@0", "a\n", "\xc3\xa9"})
    EXPECT_FALSE(is_tensor_name(bad)) << bad;
  EXPECT_FALSE(is_tensor_name(std::string(256, 'a')));
  for (const char* good : {"model", "optimizer/m", "a/b/c"}) EXPECT_TRUE(is_group_name(good)) << good;
  for (const char* bad : {"", "/", "a/", "/a", "a//b", "..", "a/../b", "a.b", "a/b/c/d"})
    EXPECT_FALSE(is_group_name(bad)) << bad;
}

}  // namespace
}  // namespace annulus::checkpoint
