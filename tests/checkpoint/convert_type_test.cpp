#include "checkpoint/convert_type.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace annulus::checkpoint {
namespace {

// The nearest bf16 by comparing distances in long double (64-bit mantissa: exact for the neighbours of a double).
std::uint16_t nearest_bf16(double x) {
  const auto value = [](std::uint32_t bits) {
    return static_cast<long double>(to_float(BFloat16{static_cast<std::uint16_t>(bits)}));
  };
  const std::uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
  const long double size = std::abs(static_cast<long double>(x));
  if (size >= 0x1.ffp127L)
    return static_cast<std::uint16_t>(sign | 0x7f80u);  // from half way beyond the largest: infinity
  std::uint32_t low = 0, high = 0x7f80;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (value(middle) <= size ? low : high) = middle;
  }
  if (high == 0x7f80) return static_cast<std::uint16_t>(sign | low);
  const long double down = size - value(low), up = value(high) - size;
  return static_cast<std::uint16_t>(sign | (down < up || (down == up && low % 2 == 0) ? low : high));
}

TEST(ConvertType, DoubleToBf16RoundsOnceToNearestEven) {
  std::vector<double> cases{0.0, -0.0, 1.0, 1e-45, 1e-60, 5e-41, 3.5e38, 1e300, std::numeric_limits<float>::max()};
  for (const std::uint32_t bits : {0x0000u, 0x0001u, 0x007fu, 0x0080u, 0x3f80u, 0x3f81u, 0x7f7eu, 0x7f7fu}) {
    const auto low = static_cast<double>(to_float(BFloat16{static_cast<std::uint16_t>(bits)}));
    const double half = bits == 0x7f7fu
                            ? 0x1.ffp127
                            : (low + static_cast<double>(to_float(BFloat16{static_cast<std::uint16_t>(bits + 1)}))) / 2;
    // Next to the half by less than a float can tell: rounding to float first would lose it.
    for (const double x :
         {low, half, std::nextafter(half, 0.0), std::nextafter(half, 1e300), half * (1 + 1e-12), half * (1 - 1e-12)})
      cases.push_back(x);
  }
  for (const double x : cases) {
    for (const double y : {x, -x}) EXPECT_EQ(to_bfloat16(y).bits, nearest_bf16(y)) << std::hexfloat << y;
  }
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(std::nan("")))));
  EXPECT_EQ(to_bfloat16(std::numeric_limits<double>::infinity()).bits, 0x7f80);
}

// Bits that HDF5's own conversion gets wrong.
TEST(ConvertType, FloatToBf16IsOurs) {
  const std::vector<std::pair<std::uint32_t, std::uint16_t>> cases{{0x3f808000, 0x3f80}, {0x3f818000, 0x3f82},
                                                                   {0x00018000, 0x0002}, {0x7f7fffff, 0x7f80},
                                                                   {0xff800000, 0xff80}, {0x80000000, 0x8000}};
  for (const auto& [from, to] : cases) {
    BFloat16 out{0xAAAA};
    convert_type(DType::f32, &from, DType::bf16, &out, 1);
    EXPECT_EQ(out.bits, to) << std::hex << from;
  }
}

TEST(ConvertType, WideningIsExactAndEveryBf16Survives) {
  std::vector<BFloat16> all(65536), back(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) all[i].bits = static_cast<std::uint16_t>(i);
  for (const DType wide : {DType::f32, DType::f64}) {
    std::vector<double> memory(65536, std::nan(""));
    convert_type(DType::bf16, all.data(), wide, memory.data(), 65536);
    convert_type(wide, memory.data(), DType::bf16, back.data(), 65536);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const bool nan = (i & 0x7fffu) > 0x7f80u;
      EXPECT_TRUE(nan ? (back[i].bits & 0x7fffu) > 0x7f80u : back[i].bits == i) << i;
    }
  }
  const double tenth = 0.1;
  float narrow = 0;
  convert_type(DType::f64, &tenth, DType::f32, &narrow, 1);
  EXPECT_EQ(narrow, 0.1f);
}

}  // namespace
}  // namespace annulus::checkpoint
