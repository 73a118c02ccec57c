// SequenceLayout: literal ownership, exact inverses, refusal of lengths that do not fit.
#include "parallel/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace annulus::parallel {
namespace {

using Tokens = std::vector<std::int64_t>;

Tokens owned(const SequenceLayout& layout, int rank) {
  Tokens tokens;
  for (std::int64_t row = 0; row < layout.local_tokens(); ++row) tokens.push_back(layout.global_index(rank, row));
  return tokens;
}

TEST(Layout, LiteralOwnership) {
  const SequenceLayout two(LayoutKind::zigzag, 8, 2);
  EXPECT_EQ(owned(two, 0), (Tokens{0, 1, 6, 7}));
  EXPECT_EQ(owned(two, 1), (Tokens{2, 3, 4, 5}));
  const SequenceLayout three(LayoutKind::zigzag, 12, 3);
  EXPECT_EQ(owned(three, 0), (Tokens{0, 1, 10, 11}));
  EXPECT_EQ(owned(three, 1), (Tokens{2, 3, 8, 9}));
  EXPECT_EQ(owned(three, 2), (Tokens{4, 5, 6, 7}));
  const SequenceLayout contiguous(LayoutKind::contiguous, 12, 3);
  EXPECT_EQ(owned(contiguous, 1), (Tokens{4, 5, 6, 7}));
  EXPECT_EQ(contiguous.chunk_begin(1), (std::array<std::int64_t, 2>{4, 6}));
  const SequenceLayout one(LayoutKind::zigzag, 7, 1);
  EXPECT_EQ(owned(one, 0), (Tokens{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(one.chunk_begin(0), (std::array<std::int64_t, 2>{0, -1}));
  EXPECT_EQ(one.chunk(), 7);
}

TEST(Layout, ShardsAndBackIsTheIdentity) {
  for (const LayoutKind kind : {LayoutKind::zigzag, LayoutKind::contiguous}) {
    for (const int ranks : {1, 2, 3, 5, 8}) {
      for (const std::int64_t chunk : {1, 2, 7}) {
        const std::int64_t tokens = ranks == 1 ? 2 * chunk + 1 : 2 * ranks * chunk;
        const SequenceLayout layout(kind, tokens, ranks);
        Tokens sequence(static_cast<std::size_t>(tokens)), back(sequence.size(), -1);
        std::iota(sequence.begin(), sequence.end(), 100);
        for (int r = 0; r < ranks; ++r) {
          Tokens local(static_cast<std::size_t>(layout.local_tokens()), -1);
          layout.shard<std::int64_t>(r, sequence, local);
          EXPECT_TRUE(std::is_sorted(local.begin(), local.end()));
          layout.unshard<std::int64_t>(r, local, back);
        }
        EXPECT_EQ(back, sequence) << "ranks " << ranks << " chunk " << chunk;
      }
    }
  }
}

TEST(Layout, RowsBeforeCountsOwnedTokens) {
  for (const LayoutKind kind : {LayoutKind::zigzag, LayoutKind::contiguous}) {
    for (const int ranks : {1, 2, 3}) {
      const SequenceLayout layout(kind, 18 * ranks, ranks);
      for (int r = 0; r < ranks; ++r) {
        const Tokens mine = owned(layout, r);
        for (std::int64_t token = 0; token <= layout.tokens(); ++token) {
          const auto expected = std::count_if(mine.begin(), mine.end(), [&](auto t) { return t < token; });
          EXPECT_EQ(layout.rows_before(r, token), expected);
        }
      }
    }
  }
}

std::string refusal(std::int64_t tokens, int ranks, std::int64_t multiple = 1, std::int64_t least = 1) {
  try {
    SequenceLayout(LayoutKind::zigzag, tokens, ranks, multiple, least);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

TEST(Layout, RefusalNamesLengthsThatFit) {
  EXPECT_NE(refusal(13, 3).find("Lengths that fit: 12 and 18"), std::string::npos) << refusal(13, 3);
  EXPECT_NE(refusal(5, 3).find("Lengths that fit: 6"), std::string::npos) << refusal(5, 3);
  EXPECT_NE(refusal(0, 2).find("Lengths that fit: 4"), std::string::npos) << refusal(0, 2);
  EXPECT_NE(refusal(0, 1), "");
  EXPECT_EQ(refusal(12, 3), "");
  // Chunks of a multiple of 16 and at least 40 tokens: 48 a chunk, 192 for two ranks.
  EXPECT_NE(refusal(128, 2, 16, 40).find("Lengths that fit: 192"), std::string::npos) << refusal(128, 2, 16, 40);
  EXPECT_NE(refusal(10, 2, 16, 40).find("Lengths that fit: 192"), std::string::npos) << refusal(10, 2, 16, 40);
  EXPECT_NE(refusal(200, 2, 16, 40).find("Lengths that fit: 192 and 256"), std::string::npos);
  EXPECT_EQ(refusal(192, 2, 16, 40), "");
  EXPECT_EQ(refusal(33, 1, 16, 40), "");  // one rank takes any length
}

}  // namespace
}  // namespace annulus::parallel
