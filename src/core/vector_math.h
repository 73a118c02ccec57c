// Branch-free exp and exp2 for host loops: written so that a `#pragma omp simd` loop around them becomes vector code,
// which a call into libm does not. Error below 1 ulp (float) and 1.1 ulp (double). Results below the smallest normal
// number are flushed to 0 (denormal results cost a microcode assist each, and masked scores produce many); −∞ gives 0,
// overflow and +∞ give +∞, NaN stays NaN.
//
// Cody-Waite reduction x = n·ln 2 + r, |r| <= ln 2 / 2, then a polynomial in r, then n is added to the exponent.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace annulus {

namespace detail {

// e^r = 1 + r + r²·q(r); q is the minimax polynomial for the relative error of e^r, 3e-9.
inline float exp_reduced(float r) {
  float q = 1.38145370821e-3f;
  q = q * r + 8.36874508092e-3f;
  q = q * r + 4.16683908344e-2f;
  q = q * r + 1.66665203995e-1f;
  q = q * r + 4.99999934320e-1f;
  return (r * r) * q + r + 1.0f;
}

// Taylor to degree 13: truncation 6e-18.
inline double exp_reduced(double r) {
  double q = 1.0 / 6227020800.0;
  q = q * r + 1.0 / 479001600.0;
  q = q * r + 1.0 / 39916800.0;
  q = q * r + 1.0 / 3628800.0;
  q = q * r + 1.0 / 362880.0;
  q = q * r + 1.0 / 40320.0;
  q = q * r + 1.0 / 5040.0;
  q = q * r + 1.0 / 720.0;
  q = q * r + 1.0 / 120.0;
  q = q * r + 1.0 / 24.0;
  q = q * r + 1.0 / 6.0;
  q = q * r + 1.0 / 2.0;
  return (r * r) * q + r + 1.0;
}

// Adding 1.5·2^23 (2^52) rounds to an integer, which then stands in the low bits; they move to the exponent's place.
constexpr float kRoundFloat = 0x1.8p23f;
constexpr double kRoundDouble = 0x1.8p52;

inline float add_exponent(float p, float rounded) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + (std::bit_cast<std::uint32_t>(rounded) << 23));
}
inline double add_exponent(double p, double rounded) {
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(p) + (std::bit_cast<std::uint64_t>(rounded) << 52));
}

template <class T>
T exp_limits(T x, T y, T lowest, T highest) {
  y = x > highest ? std::numeric_limits<T>::infinity() : y;
  y = x < lowest ? T(0) : y;
  return x == x ? y : x;
}

}  // namespace detail

inline float vector_exp(float x) {
  const float t = x * 0x1.715476p+0f + detail::kRoundFloat;
  const float n = t - detail::kRoundFloat;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // the first product is exact, with or without FMA
  return detail::exp_limits(x, detail::add_exponent(detail::exp_reduced(r), t), -0x1.5d589cp+6f, 0x1.62e42ep+6f);
}

inline double vector_exp(double x) {
  const double t = x * 0x1.71547652b82fep+0 + detail::kRoundDouble;
  const double n = t - detail::kRoundDouble;
  const double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  return detail::exp_limits(x, detail::add_exponent(detail::exp_reduced(r), t), -0x1.6232bdd7abcd2p+9,
                            0x1.62e42fefa39efp+9);
}

inline float vector_exp2(float x) {
  const float t = x + detail::kRoundFloat;
  const float r = (x - (t - detail::kRoundFloat)) * 0x1.62e430p-1f;
  return detail::exp_limits(x, detail::add_exponent(detail::exp_reduced(r), t), -126.0f, 0x1.fffffep+6f);
}

inline double vector_exp2(double x) {
  const double t = x + detail::kRoundDouble;
  const double r = (x - (t - detail::kRoundDouble)) * 0x1.62e42fefa39efp-1;
  return detail::exp_limits(x, detail::add_exponent(detail::exp_reduced(r), t), -1022.0, 0x1.fffffffffffffp+9);
}

}  // namespace annulus
