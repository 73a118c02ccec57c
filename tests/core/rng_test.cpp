// The generator against Random123's known answers, and what is built on it.
#include "core/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <set>
#include <vector>

#include "core/error.h"

namespace annulus {
namespace {

using Block = std::array<std::uint32_t, 4>;

TEST(Philox, KnownAnswers) {  // Random123, kat_vectors, philox4x32 with 10 rounds
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(HashName, KnownAnswers) {  // FNV-1a, 64 bit
  EXPECT_EQ(hash_name(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(hash_name("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(hash_name("foobar"), 0x85944171f73967e8ull);
}

TEST(CounterRng, DependsOnSeedStreamAndIndexAlone) {
  const CounterRng rng(5, "model.norm.weight");
  EXPECT_EQ(rng.bits(77), CounterRng(5, "model.norm.weight").bits(77));
  EXPECT_NE(rng.bits(77), rng.bits(78));
  EXPECT_NE(rng.bits(77), CounterRng(6, "model.norm.weight").bits(77));
  EXPECT_NE(rng.bits(77), CounterRng(5 + (1ull << 32), "model.norm.weight").bits(77));
  EXPECT_NE(rng.bits(77), CounterRng(5, "lm_head.weight").bits(77));
  EXPECT_NE(rng.bits(77), rng.bits(77 + (1ull << 32)));
  // The counter is (index, stream), the key is the seed, low words first: these bits are part of every checkpoint.
  const std::uint64_t stream = hash_name("s");
  const Block block =
      philox({9, 1, static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)}, {3, 2});
  EXPECT_EQ(CounterRng(3 + (2ull << 32), "s").bits(9 + (1ull << 32)),
            static_cast<std::uint64_t>(block[1]) << 32 | block[0]);
  // Box-Muller on the two halves of the block, the first in (0, 1].
  const auto half = [&](std::size_t low) {
    return static_cast<double>((static_cast<std::uint64_t>(block[low + 1]) << 32 | block[low]) >> 11);
  };
  const double u = (half(0) + 0.5) / 9007199254740992.0, v = half(2) / 9007199254740992.0;
  EXPECT_NEAR(CounterRng(3 + (2ull << 32), "s").normal(9 + (1ull << 32)),
              std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v), 1e-14);
}

// Of n draws: a mean is off by sigma/√n, a k-th moment by its own standard deviation/√n; five of those are allowed.
TEST(CounterRng, Uniform) {
  const CounterRng rng(1, "uniform");
  constexpr std::uint64_t n = 200000;
  double sum = 0, squares = 0, lowest = 1, highest = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double x = rng.uniform(i);
    sum += x;
    squares += (x - 0.5) * (x - 0.5);
    lowest = std::min(lowest, x);
    highest = std::max(highest, x);
  }
  EXPECT_GE(lowest, 0);
  EXPECT_LT(highest, 1);
  EXPECT_LT(lowest, 1e-4);
  EXPECT_GT(highest, 1 - 1e-4);
  EXPECT_NEAR(sum / n, 0.5, 5 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(squares / n, 1.0 / 12, 5 * std::sqrt(1.0 / 180 / n));
}

TEST(CounterRng, Normal) {
  const CounterRng rng(1, "normal");
  constexpr std::uint64_t n = 200000;
  double sum = 0, squares = 0, fourth = 0, neighbours = 0, previous = 0;
  std::uint64_t beyond_two = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double x = rng.normal(i);
    ASSERT_TRUE(std::isfinite(x));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    neighbours += x * previous;
    beyond_two += std::abs(x) > 2;
    previous = x;
  }
  EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourth / n, 3, 5 * std::sqrt(96.0 / n));
  EXPECT_NEAR(neighbours / n, 0, 5 / std::sqrt(n));
  const double p = 0.0455002639;
  EXPECT_NEAR(static_cast<double>(beyond_two) / n, p, 5 * std::sqrt(p * (1 - p) / n));
}

TEST(KeyedPermutation, IsABijection) {
  std::vector<std::uint64_t> sizes{1, 2, 3, 5, 6, 7, 100, 1000, 12345};
  for (std::uint64_t power = 4; power <= 16384; power *= 2) sizes.insert(sizes.end(), {power - 1, power, power + 1});
  for (const std::uint64_t size : sizes) {
    const KeyedPermutation permutation(size, 11, "order");
    std::vector<bool> hit(size);
    for (std::uint64_t i = 0; i < size; ++i) {
      const std::uint64_t to = permutation(i);
      ASSERT_LT(to, size);
      ASSERT_FALSE(hit[to]) << "size " << size << ": " << to << " is hit twice";
      hit[to] = true;
    }
    EXPECT_THROW(permutation(size), Error);
  }
  EXPECT_THROW(KeyedPermutation(0, 11, "order"), Error);
}

TEST(KeyedPermutation, LargeSizesStayInRangeAndApart) {
  const std::uint64_t size = (1ull << 40) + 12345;
  const KeyedPermutation permutation(size, 2, "order");
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 5000; ++i) {
    ASSERT_LT(permutation(i), size);
    ASSERT_TRUE(seen.insert(permutation(i)).second);
  }
}

TEST(KeyedPermutation, ShufflesAndDependsOnItsKey) {
  constexpr std::uint64_t n = 10000;
  const KeyedPermutation a(n, 1, "order"), b(n, 2, "order"), c(n, 1, "other");
  std::uint64_t fixed = 0, like_b = 0, like_c = 0, neighbours = 0;
  double correlation = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    fixed += a(i) == i;
    like_b += a(i) == b(i);
    like_c += a(i) == c(i);
    neighbours += i > 0 && a(i) == a(i - 1) + 1;
    correlation += (static_cast<double>(i) / n - 0.5) * (static_cast<double>(a(i)) / n - 0.5) * 12 / n;
  }
  EXPECT_LT(fixed, 10u);  // each of these counts is about 1 for a random permutation
  EXPECT_LT(like_b, 10u);
  EXPECT_LT(like_c, 10u);
  EXPECT_LT(neighbours, 10u);
  EXPECT_NEAR(correlation, 0, 5 / std::sqrt(n));
}

}  // namespace
}  // namespace annulus
