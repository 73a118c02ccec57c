#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/band.h"

namespace annulus::attention {
namespace {

struct Buffer {
  std::int64_t chunk, begin[2];
  std::vector<std::int64_t> tokens() const {  // by row
    std::vector<std::int64_t> result;
    for (const std::int64_t b : begin) {
      for (std::int64_t i = 0; b >= 0 && i < chunk; ++i) result.push_back(b + i);
    }
    return result;
  }
};

std::vector<Buffer> buffers_of(std::int64_t tokens, int ranks, bool zigzag) {
  if (ranks == 1) return {{tokens, {0, -1}}};
  const std::int64_t chunk = tokens / (2 * ranks);
  std::vector<Buffer> buffers;
  for (int r = 0; r < ranks; ++r) {
    if (zigzag) buffers.push_back({chunk, {r * chunk, (2 * ranks - 1 - r) * chunk}});
    else buffers.push_back({chunk, {2 * r * chunk, (2 * r + 1) * chunk}});
  }
  return buffers;
}

// The band of every row, against a walk over the buffer: exactly its visible tokens, and non-decreasing.
void expect_exact(const std::vector<std::int32_t>& global_first, const std::vector<std::int32_t>& global_last,
                  const Buffer& buffer) {
  auto in_first = global_first, in_last = global_last;
  const auto count = static_cast<std::int64_t>(in_first.size());
  std::vector<std::int32_t> first(in_first.size(), 12345), last(in_first.size(), 12345);
  Context ctx;
  band_bounds(ctx, {.global_first = host_view(in_first.data(), {1, count}),
                    .global_last = host_view(in_last.data(), {1, count}),
                    .first = host_view(first.data(), {1, count}),
                    .last = host_view(last.data(), {1, count}),
                    .chunk = buffer.chunk,
                    .chunk_begin = {buffer.begin[0], buffer.begin[1]}});
  const auto tokens = buffer.tokens();
  for (std::size_t i = 0; i < first.size(); ++i) {
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(tokens.size()); ++row) {
      const std::int64_t token = tokens[static_cast<std::size_t>(row)];
      ASSERT_EQ(first[i] <= row && row <= last[i], global_first[i] <= token && token <= global_last[i])
          << "query " << i << " row " << row << " token " << token;
    }
    ASSERT_GE(first[i], 0);
    ASSERT_LT(last[i], static_cast<std::int64_t>(tokens.size()));
    if (i > 0) {
      ASSERT_LE(first[i - 1], first[i]);
      ASSERT_LE(last[i - 1], last[i]);
    }
  }
}

TEST(BandBounds, ExactlyTheVisibleTokensOfTheBuffer) {
  constexpr std::int64_t kTokens = 180;
  for (const int ranks : {1, 2, 3, 5}) {
    for (const bool zigzag : {true, false}) {
      for (const std::int32_t document : {1, 7, 31, 180}) {
        for (const std::int32_t window : {1, 10, 77, 180}) {
          for (const std::int32_t ahead : {0, 5}) {
            std::vector<std::int32_t> first, last;
            for (std::int32_t t = 0; t < kTokens; ++t) {
              first.push_back(std::max(t / document * document, t - window + 1));
              last.push_back(t + ahead);
            }
            for (const auto& buffer : buffers_of(kTokens, ranks, zigzag)) expect_exact(first, last, buffer);
          }
        }
      }
    }
  }
}

TEST(BandBounds, EmptyAndOutside) {
  // Rows before the sequence, past its end, and with first > last.
  expect_exact({-9, -3, 0, 20, 20, 50}, {-5, -1, 3, 19, 35, 60}, {10, {10, 30}});
  expect_exact({-9, -3, 0, 20, 20, 50}, {-5, -1, 3, 19, 35, 60}, {40, {0, -1}});
}

TEST(BandBounds, PlanningTouchesNothing) {
  std::vector<std::int32_t> global(4, 3), out(4, 77);
  Context ctx;
  ctx.planning = true;
  const auto view = host_view(out.data(), {1, 4}), in = host_view(global.data(), {1, 4});
  band_bounds(ctx, {.global_first = in, .global_last = in, .first = view, .last = view, .chunk = 8});
  EXPECT_EQ(out, std::vector<std::int32_t>(4, 77));
}

}  // namespace
}  // namespace annulus::attention
