// Draws against the distribution that they come from, exactly known over six tokens.
#include "train/sampler.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

namespace annulus::train {
namespace {

constexpr std::int64_t kDraws = 40000;
std::array<double, 6> logits = {std::log(4.0), std::log(1.0), std::log(3.0),
                                std::log(0.5), std::log(1.0), std::log(0.5)};

std::array<double, 6> frequencies(const SamplingOptions& options) {
  Sampler sampler(options, 6);
  std::array<double, 6> out{};
  for (std::int64_t i = 0; i < kDraws; ++i)
    out[static_cast<std::size_t>(sampler(host_view(logits.data(), {1, 6}), i))] += 1;
  for (double& n : out) n /= kDraws;
  return out;
}

// A frequency of n draws is within 5 √(p(1 − p)/n) of p but for 6e-7 of all seeds; where p is 0 it is 0.
void expect_near(const std::array<double, 6>& got, const std::array<double, 6>& weights) {
  double total = 0;
  for (const double w : weights) total += w;
  for (std::size_t i = 0; i < 6; ++i) {
    const double p = weights[i] / total;
    EXPECT_LE(std::abs(got[i] - p), 5 * std::sqrt(p * (1 - p) / kDraws)) << "token " << i;
  }
}

TEST(Sampler, FollowsTheSoftmax) { expect_near(frequencies({.temperature = 1, .seed = 3}), {4, 1, 3, 0.5, 1, 0.5}); }

TEST(Sampler, TemperatureIsAnExponent) {
  expect_near(frequencies({.temperature = 0.5, .seed = 3}), {16, 1, 9, 0.25, 1, 0.25});
  expect_near(frequencies({.temperature = 2, .seed = 3}), {2, 1, std::sqrt(3.0), std::sqrt(0.5), 1, std::sqrt(0.5)});
}

TEST(Sampler, TopPKeepsTheTokenThatCrossesIt) {
  expect_near(frequencies({.temperature = 1, .top_p = 0.3, .seed = 3}), {1, 0, 0, 0, 0, 0});
  expect_near(frequencies({.temperature = 1, .top_p = 0.45, .seed = 3}), {4, 0, 3, 0, 0, 0});
  // Of equal tokens the lower id: 0.75 needs one of tokens 1 and 4.
  expect_near(frequencies({.temperature = 1, .top_p = 0.75, .seed = 3}), {4, 1, 3, 0, 0, 0});
  expect_near(frequencies({.temperature = 1, .top_p = 1 - 1e-12, .seed = 3}), {4, 1, 3, 0.5, 1, 0.5});
}

TEST(Sampler, GreedyTakesTheFirstOfTheGreatest) {
  expect_near(frequencies({}), {1, 0, 0, 0, 0, 0});
  std::array<double, 3> equal = {1, 2, 2};
  EXPECT_EQ(Sampler({}, 3)(host_view(equal.data(), {1, 3}), 0), 1);
}

TEST(Sampler, SeedAndIndexDecide) {
  Sampler a({.temperature = 1, .seed = 7}, 6), b({.temperature = 1, .seed = 7}, 6), c({.temperature = 1, .seed = 8}, 6);
  const auto view = host_view(logits.data(), {1, 6});
  int differ = 0;
  for (std::int64_t i = 100; i-- > 0;) {
    const auto x = a(view, i);
    EXPECT_EQ(x, b(view, i));
    differ += x != c(view, i);
  }
  EXPECT_GT(differ, 20);
}

TEST(Sampler, BadOptionsAreNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double t : {-0.5, nan, std::numeric_limits<double>::infinity()})
    EXPECT_THROW(Sampler({.temperature = t}, 6), UsageError) << t;
  for (const double p : {0.0, -1.0, 1.5, nan}) EXPECT_THROW(Sampler({.top_p = p}, 6), UsageError) << p;
  std::array<double, 2> bad = {0, nan};
  EXPECT_THROW(Sampler({}, 2)(host_view(bad.data(), {1, 2}), 0), DivergedError);
}

}  // namespace
}  // namespace annulus::train
