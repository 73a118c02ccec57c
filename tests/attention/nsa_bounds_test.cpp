// attention::nsa_bounds against the definition of what is visible, walked through for every row.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention/compress.h"
#include "attention/nsa_shape.h"
#include "parallel/layout.h"

namespace annulus::attention {
namespace {

using Indices = std::vector<std::int32_t>;
using parallel::LayoutKind;
using parallel::SequenceLayout;

struct Bounds {
  Indices compressed_first, compressed_last, window_first, window_last;
};

struct Buffer {  // the window's keys on one rank
  std::int64_t halo, chunk, begin[2];

  // The token of every row; in halos also such as no sequence has.
  std::vector<std::int64_t> tokens() const {
    std::vector<std::int64_t> result;
    for (const std::int64_t b : begin) {
      for (std::int64_t t = b - halo; b >= 0 && t < b + chunk; ++t) result.push_back(t);
    }
    return result;
  }
};

Bounds run(const NsaShape& shape, std::int64_t num_blocks, const Buffer& buffer, Indices token, Indices start,
           std::int64_t batch) {
  const Shape rows{batch, static_cast<std::int64_t>(token.size()) / batch};
  const Indices poison(token.size(), 123456789);
  Bounds out{poison, poison, poison, poison};
  Context ctx;
  nsa_bounds(ctx, {.token = host_view(token.data(), rows),
                   .start = host_view(start.data(), rows),
                   .compressed_first = host_view(out.compressed_first.data(), rows),
                   .compressed_last = host_view(out.compressed_last.data(), rows),
                   .window_first = host_view(out.window_first.data(), rows),
                   .window_last = host_view(out.window_last.data(), rows),
                   .block = shape.block,
                   .stride = shape.stride,
                   .num_blocks = num_blocks,
                   .window = shape.window,
                   .halo = buffer.halo,
                   .chunk = buffer.chunk,
                   .chunk_begin = {buffer.begin[0], buffer.begin[1]}});
  return out;
}

// One row: the blocks and the keys between its bounds are those it may see.
void expect_row(const NsaShape& shape, std::int64_t num_blocks, const Buffer& buffer, const Bounds& bounds,
                std::size_t r, std::int64_t t, std::int64_t start) {
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const std::int64_t begin = i * shape.stride, end = begin + shape.block;
    ASSERT_EQ(bounds.compressed_first[r] <= i && i <= bounds.compressed_last[r], end - 1 <= t && begin >= start)
        << "token " << t << " of the document at " << start << ", block " << i;
  }
  ASSERT_GE(bounds.compressed_first[r], 0);
  ASSERT_LT(bounds.compressed_last[r], num_blocks);
  const auto rows = buffer.tokens();
  const std::int64_t first = std::max(start, t - shape.window + 1);
  ASSERT_GE(bounds.window_first[r], 0);
  ASSERT_LT(bounds.window_last[r], static_cast<std::int64_t>(rows.size()));
  ASSERT_EQ(bounds.window_last[r] - bounds.window_first[r], t - first) << "token " << t << " at " << start;
  for (std::int64_t key = first; key <= t; ++key) {
    ASSERT_EQ(rows[static_cast<std::size_t>(bounds.window_first[r] + key - first)], key) << "token " << t;
  }
  const int slot = buffer.begin[1] >= 0 && t >= buffer.begin[1];
  ASSERT_EQ(bounds.window_last[r] / (buffer.halo + buffer.chunk), slot)
      << "the token's own row, not its copy in a halo";
}

Indices starts_of(const std::vector<std::int32_t>& lengths, std::int64_t tokens) {
  Indices start;
  for (std::size_t i = 0; static_cast<std::int64_t>(start.size()) < tokens; ++i) {
    start.insert(start.end(), static_cast<std::size_t>(lengths[i % lengths.size()]),
                 static_cast<std::int32_t>(start.size()));
  }
  start.resize(static_cast<std::size_t>(tokens));
  return start;
}

// Two sequences with other documents, every rank of a layout.
void check(const NsaShape& shape, const SequenceLayout& layout, const Indices (&start)[2]) {
  const std::int64_t local = layout.local_tokens();
  const std::int64_t halo = layout.ranks() > 1 ? shape.window - 1 : 0, blocks = shape.num_blocks(layout.tokens());
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto begin = layout.chunk_begin(rank);
    const Buffer buffer{halo, layout.chunk(), {begin[0], begin[1]}};
    Indices token, own_start;
    for (const Indices& sequence : start) {
      for (std::int64_t row = 0; row < local; ++row) {
        token.push_back(static_cast<std::int32_t>(layout.global_index(rank, row)));
        own_start.push_back(sequence[static_cast<std::size_t>(token.back())]);
      }
    }
    const Bounds bounds = run(shape, blocks, buffer, token, own_start, 2);
    for (std::size_t r = 0; r < token.size(); ++r) {
      expect_row(shape, blocks, buffer, bounds, r, token[r], own_start[r]);
      if (::testing::Test::HasFatalFailure()) return;
      if (static_cast<std::int64_t>(r) % local == 0) continue;
      for (const Indices* list :
           {&bounds.compressed_first, &bounds.compressed_last, &bounds.window_first, &bounds.window_last}) {
        ASSERT_LE((*list)[r - 1], (*list)[r]) << "a bound decreases at token " << token[r];
      }
    }
  }
}

TEST(NsaBounds, ExactlyWhatIsVisible) {
  const std::vector<std::int32_t> lengths[] = {{96}, {1}, {5, 1, 17, 2, 30}, {40, 3}};
  struct Grid {
    std::int64_t block, stride;
  };
  for (const Grid grid : {Grid{1, 1}, Grid{4, 4}, Grid{8, 2}, Grid{12, 4}}) {
    for (const std::int64_t window : {1, 2, 7, 13}) {
      const NsaShape shape{.block = grid.block, .stride = grid.stride, .select_block = 12, .window = window};
      for (int ranks = 1; ranks <= 4; ++ranks) {
        for (const LayoutKind kind : {LayoutKind::zigzag, LayoutKind::contiguous}) {
          for (const auto& list : lengths) {
            const SequenceLayout layout(kind, 96, ranks, ranks == 4 || ranks == 2 ? 12 : 16, 1);
            check(shape, layout, {starts_of(list, 96), starts_of({31, 2}, 96)});
            if (HasFatalFailure()) {
              FAIL() << "l " << grid.block << " d " << grid.stride << " w " << window << " ranks " << ranks;
            }
          }
        }
      }
    }
  }
}

// l − 1, l and l + 1 tokens, and a window longer than the sequence.
TEST(NsaBounds, ShortSequences) {
  const NsaShape shape{.block = 8, .stride = 4, .select_block = 8, .window = 50};
  for (const std::int64_t tokens : {1, 7, 8, 9, 11, 12, 13}) {
    const SequenceLayout layout(LayoutKind::zigzag, tokens, 1);
    check(shape, layout, {starts_of({100}, tokens), starts_of({3, 2}, tokens)});
  }
}

// A buffer with fewer compressed rows than the tokens would make: no bound points past it.
TEST(NsaBounds, NeverPastTheLastBlock) {
  const NsaShape shape{.block = 8, .stride = 4, .select_block = 8, .window = 5};
  const Buffer buffer{0, 40, {0, -1}};
  Indices token(40), start(40, 3);
  std::iota(token.begin(), token.end(), 0);
  std::fill_n(start.begin(), 3, 0);
  for (std::int64_t num_blocks = 0; num_blocks <= 9; ++num_blocks) {
    const Bounds bounds = run(shape, num_blocks, buffer, token, start, 1);
    for (std::size_t r = 0; r < token.size(); ++r) {
      expect_row(shape, num_blocks, buffer, bounds, r, token[r], start[r]);
    }
  }
}

TEST(NsaBounds, PlanningTouchesNothing) {
  Indices in(4, 3), out(4, 77);
  const TensorView to = host_view(out.data(), {1, 4}), from = host_view(in.data(), {1, 4});
  Context ctx;
  ctx.planning = true;
  nsa_bounds(ctx, {from, from, to, to, to, to, 4, 2, 9, 5, 0, 16});
  EXPECT_EQ(out, Indices(4, 77));
}

TEST(NsaBounds, RefusesWhatCannotBe) {
  Indices token(4, 3), out(16);
  const TensorView in = host_view(token.data(), {1, 4}), to = host_view(out.data(), {1, 4});
  Context ctx;
  const NsaBounds good{in, in, to, to, to, to, 4, 2, 9, 5, 4, 16, {16, 48}};
  const auto message_of = [&](const NsaBounds& args) -> std::string {
    try {
      nsa_bounds(ctx, args);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  NsaBounds bad = good;
  token = {16, 17, 48, 49};
  EXPECT_EQ(message_of(good), "no error");
  bad.window_last = host_view(out.data(), {4});
  EXPECT_THAT(message_of(bad), ::testing::HasSubstr("window_last is int32 [4]"));
  bad = good;
  bad.stride = 3;
  EXPECT_THAT(message_of(bad), ::testing::HasSubstr("block 4, stride 3"));
  bad = good;
  bad.window = 0;
  EXPECT_THAT(message_of(bad), ::testing::HasSubstr("window 0"));
  bad = good;
  bad.halo = 3;  // the first row of a chunk would see beyond it
  EXPECT_THAT(message_of(bad), ::testing::HasSubstr("halo 3"));
}

}  // namespace
}  // namespace annulus::attention
