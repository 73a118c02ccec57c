// The hash behind check_equal, the optimiser shards' arithmetic, and a communicator of one.
#include "parallel/agreement.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "parallel/shards.h"

namespace annulus::parallel {
namespace {

TEST(Agreement, HashSeesEveryBitAndTheLength) {
  std::set<std::uint64_t> seen;
  std::size_t expected = 0;
  for (std::size_t n = 0; n <= 70; ++n) {
    std::vector<std::byte> bytes(n);
    seen.insert(hash_bytes(bytes));  // zeros of every length
    ++expected;
    for (std::size_t bit = 0; bit < 8 * n; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      seen.insert(hash_bytes(bytes));
      ++expected;
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
  EXPECT_EQ(seen.size(), expected);
}

TEST(Agreement, HashSeesOrder) {
  std::vector<std::int32_t> tokens(64), swapped;
  for (int i = 0; i < 64; ++i) tokens[static_cast<std::size_t>(i)] = i;
  for (std::size_t i = 0; i < 64; ++i) {
    for (std::size_t j = i + 1; j < 64; ++j) {
      swapped = tokens;
      std::swap(swapped[i], swapped[j]);
      EXPECT_NE(hash_bytes(std::as_bytes(std::span(swapped))), hash_bytes(std::as_bytes(std::span(tokens))))
          << i << " " << j;
    }
  }
}

TEST(Shards, CoverTheFlatBufferWithoutOverlap) {
  for (const std::int64_t elements : {0, 1, 64, 65, 1000, 124'000'001}) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      std::int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        const OptimizerShards shards(elements, r, ranks);
        EXPECT_EQ(shards.begin(), next);
        EXPECT_EQ(shards.shard() % 64, 0);
        next = shards.end();
        EXPECT_EQ(shards.total(), shards.shard() * ranks);
      }
      EXPECT_GE(next, elements);
      EXPECT_LT(next - elements, 64 * ranks + ranks);  // no more padding than alignment asks for
    }
  }
}

TEST(Self, CollectivesOfOneRankAreCopies) {
  Context ctx;
  auto self = make_self_communicator();
  std::vector<float> from{1, 2, 3}, to{0, 0, 0};
  self->wait(ctx, self->all_gather(ctx, host_view(from.data(), {3}), host_view(to.data(), {3})));
  EXPECT_EQ(to, from);
  to = {0, 0, 0};
  self->wait(ctx, self->reduce_scatter(ctx, host_view(from.data(), {3}), host_view(to.data(), {3})));
  EXPECT_EQ(to, from);
  self->wait(ctx, self->all_reduce(ctx, host_view(to.data(), {3}), ReduceOp::sum));
  EXPECT_EQ(to, from);
  EXPECT_THROW(self->shift(ctx, host_view(from.data(), {3}), host_view(to.data(), {3}), 1), Error);
  ctx.planning = true;
  to = {0, 0, 0};
  self->all_gather(ctx, host_view(from.data(), {3}), host_view(to.data(), {3}));
  EXPECT_EQ(to, (std::vector<float>{0, 0, 0}));
}

}  // namespace
}  // namespace annulus::parallel
