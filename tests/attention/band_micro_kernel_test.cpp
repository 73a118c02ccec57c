// The register-blocked products (attention/cpu/micro_kernel.h) against plain sums, for every remainder of their groups,
// and that nothing beside the result is touched.
#include "attention/cpu/micro_kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"

namespace annulus::attention::cpu {
namespace {

// Aligned, with room behind that holds −0: adding a zero to it would show.
template <class T>
class Buffer {
 public:
  Buffer(std::int64_t size, const char* stream) : storage_(static_cast<std::size_t>(size + 128), T(-0.0)) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(storage_.data()) % kVectorBytes;
    data_ = storage_.data() + (misaligned ? (kVectorBytes - misaligned) / sizeof(T) : 0);
    const CounterRng rng(31, stream);
    for (std::int64_t i = 0; i < size; ++i) data_[i] = static_cast<T>(rng.normal(static_cast<std::uint64_t>(i)));
  }
  T* data() { return data_; }
  T operator[](std::int64_t i) const { return data_[i]; }

 private:
  std::vector<T> storage_;
  T* data_;
};

template <class T>
constexpr T kTolerance = 200 * std::numeric_limits<T>::epsilon();  // sums of up to 200 products of normal numbers

template <class T, int N>
void test_strip_products() {
  constexpr std::int64_t kWidth = N * kLanes<T>;
  for (std::int64_t count = 1; count <= 19; ++count) {
    for (const std::int64_t depth : {1, 7, 16, 45}) {
      const std::int64_t stride = depth + 3;
      Buffer<T> rows(count * stride, "rows"), columns(depth * kWidth, "columns"), scores(count * kWidth, "scores");
      multiply_strip<T, N>(rows.data(), stride, columns.data(), depth, count, scores.data());
      Buffer<T> sum(depth * kWidth, "sum"), before(depth * kWidth, "sum"), factor(kWidth, "factor");
      gather_strip<T, N>(rows.data(), stride, scores.data(), count, depth, factor.data(), sum.data());
      for (std::int64_t x = 0; x < kWidth; ++x) {
        std::vector<T> expected(static_cast<std::size_t>(depth));
        for (std::int64_t d = 0; d < depth; ++d)
          expected[static_cast<std::size_t>(d)] = before[d * kWidth + x] * factor[x];
        for (std::int64_t j = 0; j < count; ++j) {
          T score = 0;
          for (std::int64_t d = 0; d < depth; ++d) score += rows[j * stride + d] * columns[d * kWidth + x];
          ASSERT_NEAR(scores[j * kWidth + x], score, kTolerance<T>);
          for (std::int64_t d = 0; d < depth; ++d)
            expected[static_cast<std::size_t>(d)] += score * rows[j * stride + d];
        }
        for (std::int64_t d = 0; d < depth; ++d) {
          ASSERT_NEAR(sum[d * kWidth + x], expected[static_cast<std::size_t>(d)], 20 * kTolerance<T>);
        }
      }
      ASSERT_TRUE(std::signbit(scores[count * kWidth]) && std::signbit(sum[depth * kWidth]));
    }
  }
}

template <class T>
void test_scatter() {
  constexpr std::int64_t kWidth = 3 * kLanes<T>;
  for (std::int64_t keys = 1; keys <= 13; ++keys) {
    for (const std::int64_t depth : {1, 3, 16, 17, 32, 40, 64, 100, 129}) {
      const std::int64_t padded = (depth + kLanes<T> - 1) / kLanes<T> * kLanes<T>, stride = depth + 5, count = 11;
      Buffer<T> weights(keys * kWidth, "weights"), rows(count * padded, "rows");
      std::vector<T> sum(static_cast<std::size_t>(keys * stride + 64), T(-0.0));
      for (std::int64_t x = 0; x < count; ++x) {
        for (std::int64_t d = depth; d < padded; ++d) rows.data()[x * padded + d] = 0;
      }
      scatter_strip<T>(weights.data(), kWidth, rows.data(), padded, count, T(0.5), sum.data() + 1, stride, keys, depth);
      for (std::int64_t j = 0; j < keys; ++j) {
        for (std::int64_t d = 0; d < stride; ++d) {
          const T got = sum[static_cast<std::size_t>(1 + j * stride + d)];
          T expected = 0;
          for (std::int64_t x = 0; d < depth && x < count; ++x) {
            expected += weights[j * kWidth + x] * rows[x * padded + d] / 2;
          }
          ASSERT_NEAR(got, expected, kTolerance<T>);
          if (d >= depth) {
            ASSERT_TRUE(std::signbit(got)) << "column " << d << " of depth " << depth << " was written";
          }
        }
      }
      for (std::size_t i = static_cast<std::size_t>(1 + keys * stride); i < sum.size(); ++i) {
        ASSERT_TRUE(std::signbit(sum[i]));
      }
    }
  }
}

TEST(MicroKernel, StripProducts) {
  test_strip_products<float, 1>();
  test_strip_products<float, kStripVectors>();
  test_strip_products<double, 2>();
  test_strip_products<double, kStripVectors>();
}

TEST(MicroKernel, Scatter) {
  test_scatter<float>();
  test_scatter<double>();
}

}  // namespace
}  // namespace annulus::attention::cpu
