#include "checkpoint/convert_type.h"

#include <cmath>
#include <cstring>

#include "core/error.h"

namespace annulus::checkpoint {
namespace {

template <class From, class To>
To convert(From x) {
  if constexpr (std::is_same_v<From, Float16>) {
    return convert<float, To>(checkpoint::to_float(x));
  } else if constexpr (std::is_same_v<From, BFloat16>) {
    return static_cast<To>(annulus::to_float(x));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    if constexpr (std::is_same_v<From, double>) {
      return checkpoint::to_bfloat16(x);
    } else {
      return annulus::to_bfloat16(x);
    }
  } else {
    return static_cast<To>(x);
  }
}

template <class From, class To>
void convert_all(const void* in, void* out, std::int64_t count) {
  const auto* from = static_cast<const From*>(in);
  auto* to = static_cast<To*>(out);
  for (std::int64_t i = 0; i < count; ++i) to[i] = convert<From, To>(from[i]);
}

template <class From>
void convert_from(const void* in, DType to, void* out, std::int64_t count) {
  switch (to) {
    case DType::f32:
      return convert_all<From, float>(in, out, count);
    case DType::f64:
      return convert_all<From, double>(in, out, count);
    case DType::bf16:
      if constexpr (!std::is_same_v<From, BFloat16>) return convert_all<From, BFloat16>(in, out, count);
      [[fallthrough]];
    default:
      ANNULUS_CHECK(false, "no conversion to {}", name_of(to));
  }
}

}  // namespace

float to_float(Float16 x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 0x1fu, mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2^-24
    const float size = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -size : size;
  }
  const std::uint32_t wide = exponent == 0x1f ? 0xffu : exponent + 112;  // infinity and NaN keep their meaning
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

// Rounding twice, to f32 and then to bf16, can miss the nearest value. Rounding to odd first keeps what lies below the
// half visible, so that the second rounding is the only one that counts.
BFloat16 to_bfloat16(double x) {
  const float nearest = static_cast<float>(x);
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (!std::isnan(x) && static_cast<double>(nearest) != x) {
    if (std::abs(static_cast<double>(nearest)) > std::abs(x)) --bits;  // towards zero
    bits |= 1u;
  }
  return annulus::to_bfloat16(std::bit_cast<float>(bits));
}

void convert_type(DType from, const void* in, DType to, void* out, std::int64_t count) {
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * size_of(from));
    return;
  }
  switch (from) {
    case DType::f32:
      return convert_from<float>(in, to, out, count);
    case DType::f64:
      return convert_from<double>(in, to, out, count);
    case DType::bf16:
      return convert_from<BFloat16>(in, to, out, count);
    case DType::f16:
      return convert_from<Float16>(in, to, out, count);
    default:
      ANNULUS_CHECK(false, "no conversion from {}", name_of(from));
  }
}

}  // namespace annulus::checkpoint
