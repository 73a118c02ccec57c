// bf16 against a bit-exact reference: of the two neighbours that a float lies between, the nearer, or the even one.
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/rng.h"

namespace annulus {
namespace {

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// By comparing distances in double: float and bf16 numbers, their differences here, and 2^128 in infinity's place,
// which is where the next bf16 number would be, are all exact in it.
std::uint16_t nearest_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto value = [](std::uint32_t magnitude) {
    return magnitude == 0x7f80u ? 0x1p128 : static_cast<double>(from_bits(magnitude << 16));
  };
  const std::uint32_t sign = bits >> 31 << 15, below = bits << 1 >> 17, above = below + 1;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | 0x7f80u);
  const double to_below = magnitude - value(below), to_above = value(above) - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? above : below));
}

TEST(BFloat16, RoundsToNearestEven) {
  // Every upper half with the low halves around zero, the tie and the top: every exponent, denormals, the largest.
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = from_bits(high << 16 | low);
      if (std::isnan(x)) continue;
      ASSERT_EQ(to_bfloat16(x).bits, nearest_bf16(x)) << std::hex << (high << 16 | low);
    }
  }
  const CounterRng rng(1, "bf16");
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const float x = from_bits(static_cast<std::uint32_t>(rng.bits(i)));
    if (std::isnan(x)) continue;
    ASSERT_EQ(to_bfloat16(x).bits, nearest_bf16(x)) << x;
  }
}

TEST(BFloat16, KnownValues) {
  EXPECT_EQ(to_bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bfloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-8f).bits, 0x3f80);      // a tie, to even
  EXPECT_EQ(to_bfloat16(1.0f + 3 * 0x1p-8f).bits, 0x3f82);  // a tie, to even upwards
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-8f + 0x1p-23f).bits, 0x3f81);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);  // rounds to infinity
  EXPECT_EQ(to_bfloat16(0x1.fep127f).bits, 0x7f7f);
  EXPECT_EQ(to_bfloat16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(to_bfloat16(0x1p-133f).bits, 1);  // the smallest bf16 denormal
}

TEST(BFloat16, NanStaysNan) {
  for (std::uint32_t high : {0x7f80u, 0x7fc0u, 0xff80u, 0xffc0u, 0x7fffu, 0xffffu}) {
    for (std::uint32_t low : {0x0001u, 0x7fffu, 0x8000u, 0xffffu}) {
      const float x = from_bits(high << 16 | low);
      ASSERT_TRUE(std::isnan(x));
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(x)))) << std::hex << (high << 16 | low);
      EXPECT_EQ(to_bfloat16(x).bits >> 15, high >> 15);
    }
  }
}

TEST(BFloat16, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const BFloat16 x{static_cast<std::uint16_t>(bits)};
    if (std::isnan(to_float(x))) continue;
    ASSERT_EQ(to_bfloat16(to_float(x)).bits, bits);
  }
}

TEST(DType, SizesNamesAndStatistics) {
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::f64), 8u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ(size_of(DType::i32), 4u);
  EXPECT_EQ(size_of(DType::i64), 8u);
  EXPECT_EQ(size_of(DType::u8), 1u);
  EXPECT_EQ(name_of(DType::bf16), "bfloat16");
  EXPECT_EQ(stat_type(DType::f64), DType::f64);
  EXPECT_EQ(stat_type(DType::f32), DType::f32);
  EXPECT_EQ(stat_type(DType::bf16), DType::f32);
}

}  // namespace
}  // namespace annulus
