// exp and exp2 for host loops against long double, in units of the last place.
#include "core/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace annulus {
namespace {

// The largest error over [low, high] of f, evaluated as the operations do, in a vectorised loop.
template <class T, class F, class Truth>
double largest_error(double low, double high, const F& f, const Truth& truth) {
  constexpr std::size_t n = 200003;
  std::vector<T> x(n), y(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<T>(low + (high - low) * static_cast<double>(i) / (n - 1));
#pragma omp simd
  for (std::size_t i = 0; i < n; ++i) y[i] = f(x[i]);
  double worst = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const long double exact = truth(static_cast<long double>(x[i]));
    const T nearest = static_cast<T>(exact);
    const T ulp = nearest - std::nextafter(nearest, T(0));
    const double error = static_cast<double>(std::fabs(static_cast<long double>(y[i]) - exact) / ulp);
    worst = error <= worst ? worst : error;  // a NaN is the worst
  }
  return worst;
}

TEST(VectorMath, ErrorInUnitsOfTheLastPlace) {
  // ulp here is the spacing below a number: twice as fine at a power of two as the usual one.
  const auto exp = [](auto x) { return vector_exp(x); };
  const auto exp2 = [](auto x) { return vector_exp2(x); };
  const auto true_exp = [](long double x) { return std::exp(x); };
  const auto true_exp2 = [](long double x) { return std::exp2(x); };
  EXPECT_LT(largest_error<float>(-87.33, 88.72, exp, true_exp), 1.2);
  EXPECT_LT(largest_error<float>(-1, 1, exp, true_exp), 1.2);
  EXPECT_LT(largest_error<float>(-126, 127.99, exp2, true_exp2), 1.2);
  EXPECT_LT(largest_error<double>(-708.39, 709.78, exp, true_exp), 1.2);
  EXPECT_LT(largest_error<double>(-1, 1, exp, true_exp), 1.2);
  EXPECT_LT(largest_error<double>(-1022, 1023.99, exp2, true_exp2), 1.2);
}

template <class T>
void test_limits() {
  constexpr T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  constexpr T largest = std::numeric_limits<T>::max();
  EXPECT_EQ(vector_exp(T(0)), T(1));
  EXPECT_EQ(vector_exp(-T(0)), T(1));
  EXPECT_EQ(vector_exp2(T(-3)), T(0.125));
  EXPECT_EQ(vector_exp2(T(10)), T(1024));
  for (const T low : {-inf, -largest, T(-800) * 2}) {
    EXPECT_EQ(vector_exp(low), T(0));
    EXPECT_EQ(vector_exp2(low), T(0));
  }
  for (const T high : {inf, largest, T(800) * 2}) {
    EXPECT_EQ(vector_exp(high), inf);
    EXPECT_EQ(vector_exp2(high), inf);
  }
  EXPECT_TRUE(std::isnan(vector_exp(nan)));
  EXPECT_TRUE(std::isnan(vector_exp2(nan)));
  EXPECT_TRUE(std::isnan(vector_exp(-nan)));
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  const T marked = std::bit_cast<T>(std::bit_cast<Bits>(nan) | Bits{1});  // a payload where n would stand
  EXPECT_TRUE(std::isnan(vector_exp(marked)));
  EXPECT_TRUE(std::isnan(vector_exp2(marked)));
  // Next to overflow, and next to the smallest normal number, below which results are 0.
  const T top = std::log(largest), bottom = std::log(std::numeric_limits<T>::min());
  EXPECT_TRUE(std::isfinite(vector_exp(std::nextafter(top, T(0)))));
  EXPECT_EQ(vector_exp(top + T(0.01)), inf);
  EXPECT_NEAR(vector_exp(bottom + T(0.01)) / std::numeric_limits<T>::min(), std::exp(T(0.01)), 1e-4);
  EXPECT_EQ(vector_exp(bottom - T(0.01)), T(0));
}

TEST(VectorMath, LimitsFloat) { test_limits<float>(); }
TEST(VectorMath, LimitsDouble) { test_limits<double>(); }

}  // namespace
}  // namespace annulus
