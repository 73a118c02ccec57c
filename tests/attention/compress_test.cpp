// Compression blocks against the naive reference, as maps and their transposes, in ranges, on any number of threads;
// and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <limits>
#include <string>

#include "attention/compress_run.h"
#include "attention/select.h"
#include "ops/cuda_missing.h"

namespace annulus::testing::compression {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TestDevice& cpu() {
  static TestDevice device(DeviceKind::cpu);
  return device;
}

// At most twice the naive implementation's error in the same precision, or one rounding of the largest element.
template <class T>
void expect_close(const std::vector<T>& found, const std::vector<T>& naive, const std::vector<long double>& truth) {
  ASSERT_EQ(found.size(), truth.size());
  long double error = 0, allowed = 0, largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(std::isfinite(found[i])) << "element " << i;
    error = std::max(error, std::fabs(found[i] - truth[i]));
    allowed = std::max(allowed, std::fabs(naive[i] - truth[i]));
    largest = std::max(largest, std::fabs(truth[i]));
  }
  EXPECT_LE(error, std::max(2 * allowed, static_cast<long double>(std::numeric_limits<T>::epsilon()) * largest));
}
template <class T>
void expect_close(const Rows<T>& found, const Rows<T>& naive, const Rows<long double>& truth) {
  expect_close(found.x, naive.x, truth.x);
  expect_close(found.halo, naive.halo, truth.halo);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
template <class T>
bool same_bits(const Rows<T>& a, const Rows<T>& b) {
  return same_bits(a.x, b.x) && same_bits(a.halo, b.halo);
}

template <class T>
struct Compression : ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Compression, Types);

// Rows that no block covers hold NaN; padding comes out as 0.
TYPED_TEST(Compression, Mean) {
  using T = TypeParam;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Rows<T> rows = draw_rows<T>(c);
    poison_uncovered(c, rows);
    const auto y = block_mean(cpu(), c, rows);
    expect_close(y, naive_mean(c, rows), naive_mean(c, Rows<long double>(rows)));
    EXPECT_TRUE(c.blocks.block > 1 || same_bits(y, rows.x)) << "blocks of single rows";
  }
}

// Gradients are added; those of padding hold NaN; rows that no block covers keep their bits.
TYPED_TEST(Compression, MeanBackward) {
  using T = TypeParam;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    auto d_y = draw<T>("d_y", c.y().numel());
    poison_padding(c, d_y);
    const Rows<T> before = draw_rows<T>(c);
    Rows<T> naive = before;
    Rows<long double> truth(before);
    naive_mean_backward(c, d_y, naive);
    naive_mean_backward(c, std::vector<long double>(d_y.begin(), d_y.end()), truth);
    const Rows<T> after = block_mean_backward(cpu(), c, d_y, before);
    expect_close(after, naive, truth);
    Rows<T> covered = before;
    poison_uncovered(c, covered);
    for (std::size_t i = 0; i < before.x.size(); ++i) {
      ASSERT_TRUE(!std::isnan(covered.x[i]) || after.x[i] == before.x[i]) << "element " << i << " is in no block";
    }
    for (std::size_t i = 0; i < before.halo.size(); ++i) {
      ASSERT_TRUE(!std::isnan(covered.halo[i]) || after.halo[i] == before.halo[i]) << "halo element " << i;
    }
  }
}

TYPED_TEST(Compression, UnfoldInRanges) {
  using T = TypeParam;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Rows<T> rows = draw_rows<T>(c);
    poison_uncovered(c, rows);
    const auto whole = naive_unfold(c, rows);
    EXPECT_TRUE(same_bits(unfold_blocks(cpu(), c, rows, 0, c.vectors()), whole));
    if (c.vectors() > 60) continue;
    for (std::int64_t first = 0; first <= c.vectors(); ++first) {
      for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, (c.vectors() - first) / 2}) {
        if (first + count > c.vectors()) continue;
        const std::vector<T> wanted(whole.begin() + first * c.length(), whole.begin() + (first + count) * c.length());
        ASSERT_TRUE(same_bits(unfold_blocks(cpu(), c, rows, first, count), wanted)) << first << " " << count;
      }
    }
  }
}

// Ranges of block vectors one after the other add what one call over all adds.
TYPED_TEST(Compression, FoldInRanges) {
  using T = TypeParam;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    auto d_u = draw<T>("d_u", c.vectors() * c.length());
    poison_padding(c, d_u);
    const Rows<T> before = draw_rows<T>(c);
    Rows<T> naive = before;
    Rows<long double> truth(before);
    naive_fold(c, d_u, naive);
    naive_fold(c, std::vector<long double>(d_u.begin(), d_u.end()), truth);
    expect_close(fold_blocks(cpu(), c, d_u, before, 0, c.vectors()), naive, truth);
    for (const std::int64_t range : {std::int64_t{1}, std::int64_t{5}, c.vectors() / 2 + 1}) {
      if (c.vectors() / range > 60) continue;
      Rows<T> after = before;
      for (std::int64_t first = 0; first < c.vectors(); first += range) {
        after = fold_blocks(cpu(), c, d_u, after, first, std::min(range, c.vectors() - first));
      }
      expect_close(after, naive, truth);
    }
  }
}

long double dot(const std::vector<double>& a, const std::vector<double>& b) {
  long double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<long double>(a[i]) * b[i];
  return sum;
}
long double dot(const Rows<double>& a, const Rows<double>& b) { return dot(a.x, b.x) + dot(a.halo, b.halo); }

// <fold(u), x> = <u, unfold(x)>, and so for the mean. Rounding: eps times the sum of absolute products, some of them
// after a sum of l terms.
TEST(Compression, BackwardIsTheTranspose) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto x = draw_rows<double>(c);
    Rows<double> zero = x;
    std::fill(zero.x.begin(), zero.x.end(), 0);
    std::fill(zero.halo.begin(), zero.halo.end(), 0);
    const auto d_u = draw<double>("d_u", c.vectors() * c.length());
    const auto d_y = draw<double>("d_y", c.y().numel());
    const auto allowed = [&](const std::vector<double>& d) {
      return 0x1p-52L * static_cast<long double>(c.blocks.block * static_cast<std::int64_t>(d.size() + 1));
    };
    EXPECT_NEAR(static_cast<double>(dot(fold_blocks(cpu(), c, d_u, zero, 0, c.vectors()), x) -
                                    dot(d_u, unfold_blocks(cpu(), c, x, 0, c.vectors()))),
                0, static_cast<double>(allowed(d_u)));
    EXPECT_NEAR(
        static_cast<double>(dot(block_mean_backward(cpu(), c, d_y, zero), x) - dot(d_y, block_mean(cpu(), c, x))), 0,
        static_cast<double>(allowed(d_y)));
  }
}

TYPED_TEST(Compression, AnyNumberOfThreadsGivesTheSameBits) {
  using T = TypeParam;
  const int threads = omp_get_max_threads();
  for (const Case& c : {spread("wide", 2, 192, 4, 33, 32, 4, 7), alone("narrow", 1, 2000, 1, 3, 32, 1)}) {
    SCOPED_TRACE(c.name);
    const Rows<T> rows = draw_rows<T>(c);
    const auto d_y = draw<T>("d_y", c.y().numel()), d_u = draw<T>("d_u", c.vectors() * c.length());
    const auto y = block_mean(cpu(), c, rows), u = unfold_blocks(cpu(), c, rows, 0, c.vectors());
    const auto d_mean = block_mean_backward(cpu(), c, d_y, rows);
    const auto d_fold = fold_blocks(cpu(), c, d_u, rows, 0, c.vectors());
    for (const int n : {1, 2, 3, 7}) {
      omp_set_num_threads(n);
      EXPECT_TRUE(same_bits(block_mean(cpu(), c, rows), y));
      EXPECT_TRUE(same_bits(unfold_blocks(cpu(), c, rows, 0, c.vectors()), u));
      EXPECT_TRUE(same_bits(block_mean_backward(cpu(), c, d_y, rows), d_mean));
      EXPECT_TRUE(same_bits(fold_blocks(cpu(), c, d_u, rows, 0, c.vectors()), d_fold));
    }
    omp_set_num_threads(threads);
  }
}

struct Refused : ::testing::Test {
  Context ctx;
  std::vector<float> x = std::vector<float>(400), halo = x, y = x;
  std::vector<double> wide = std::vector<double>(400);
  std::vector<BFloat16> half = std::vector<BFloat16>(400);
  const LocalBlocks blocks{4, 2, 2, 3, {3, 2}};  // chunks of 6 rows
  const Shape rows{1, 12, 2, 3}, halo_rows{1, 2, 2, 2, 3}, means{1, 2, 3, 2, 3};

  template <class T>
  static TensorView view(std::vector<T>& values, const Shape& shape) {
    return host_view(values.data(), shape);
  }
  template <class Run>
  static std::string message_of(const Run& run) {
    try {
      run();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  std::string mean(const TensorView& x_in, const TensorView& halo_in, const TensorView& y_in, const LocalBlocks& b) {
    return message_of([&] { attention::block_mean(ctx, {x_in, halo_in, y_in, b}); });
  }
};

TEST_F(Refused, Shapes) {
  const TensorView vx = view(x, rows), vh = view(halo, halo_rows), vy = view(y, means);
  EXPECT_EQ(mean(vx, vh, vy, blocks), "no error");
  EXPECT_THAT(mean(view(x, {12, 2, 3}), vh, vy, blocks), AllOf(HasSubstr("block_mean"), HasSubstr("[B, C·c, Hkv, D]")));
  EXPECT_THAT(mean(vx, view(halo, {1, 2, 3, 2, 3}), vy, blocks), HasSubstr("expected float32 [1, 2, 2, 2, 3]"));
  EXPECT_THAT(mean(vx, vh, view(y, {1, 2, 4, 2, 3}), blocks), HasSubstr("expected float32 [1, 2, 3, 2, 3]"));
  EXPECT_THAT(mean(vx, vh, view(wide, means), blocks), HasSubstr("y is float64"));
  EXPECT_THAT(mean(view(half, rows), view(half, halo_rows), view(half, means), blocks),
              AllOf(HasSubstr("x is bfloat16"), HasSubstr("float32 or float64")));
  EXPECT_THAT(mean(view(x, {1, 13, 2, 3}), vh, vy, blocks), HasSubstr("13 rows in 2 chunks"));
  EXPECT_THAT(mean(vx, vh, vy, {4, 3, 2, 3, {3, 2}}), HasSubstr("blocks of 4 every 3"));
  EXPECT_THAT(mean(vx, vh, vy, {4, 0, 2, 3, {3, 2}}), HasSubstr("blocks of 4 every 0"));
  EXPECT_THAT(mean(vx, vh, vy, {4, 2, 3, 3, {3, 2}}), HasSubstr("in 3 chunks"));
  EXPECT_THAT(mean(vx, vh, vy, {4, 2, 2, 3, {3, 4}}), HasSubstr("4 blocks"));
  EXPECT_THAT(mean(vx, vh, vy, {4, 2, 2, 3, {-1, 3}}), HasSubstr("-1 blocks"));
  EXPECT_THAT(mean(vx, TensorView{}, vy, blocks), HasSubstr("3 blocks of 4 every 2 in 6 rows"));
  EXPECT_EQ(mean(vx, TensorView{}, vy, {4, 2, 2, 3, {2, 2}}), "no error");
}

TEST_F(Refused, GradientsAndRanges) {
  const auto backward = [&](const TensorView& d_y, const TensorView& d_x) {
    return message_of([&] { attention::block_mean_backward(ctx, {d_y, d_x, view(halo, halo_rows), blocks}); });
  };
  EXPECT_EQ(backward(view(y, means), view(x, rows)), "no error");
  EXPECT_THAT(backward(view(wide, means), view(x, rows)), HasSubstr("d_y is float64"));
  EXPECT_THAT(backward(view(half, means), view(x, rows)), HasSubstr("d_y is bfloat16"));
  EXPECT_THAT(backward(view(y, means), view(half, rows)), HasSubstr("bfloat16"));
  const auto unfold = [&](std::int64_t count, std::int64_t length, std::int64_t first) {
    return message_of([&] {
      attention::unfold_blocks(ctx, {view(x, rows), view(halo, halo_rows), view(y, {count, length}), first, blocks});
    });
  };
  const auto fold = [&](std::int64_t count, std::int64_t length, std::int64_t first) {
    return message_of([&] {
      attention::fold_blocks(ctx, {view(y, {count, length}), view(x, rows), view(halo, halo_rows), first, blocks});
    });
  };
  EXPECT_EQ(unfold(12, 12, 0), "no error");
  EXPECT_EQ(fold(3, 12, 9), "no error");
  EXPECT_THAT(unfold(12, 12, 1), AllOf(HasSubstr("1 … 12"), HasSubstr("of 12")));
  EXPECT_THAT(fold(4, 12, 9), HasSubstr("9 … 12"));
  EXPECT_THAT(fold(1, 12, -1), HasSubstr("-1"));
  EXPECT_THAT(unfold(3, 6, 0), HasSubstr("expected float32 [3, 12]"));
  EXPECT_THAT(fold(3, 6, 0), HasSubstr("expected float32 [3, 12]"));
}

TEST_F(Refused, PlanningTouchesNothing) {
  y.assign(y.size(), 7);
  ctx.planning = true;
  EXPECT_EQ(mean(view(x, rows), view(halo, halo_rows), view(y, means), blocks), "no error");
  EXPECT_EQ(y, std::vector<float>(y.size(), 7));
  EXPECT_THAT(mean(view(x, rows), view(halo, halo_rows), view(y, rows), blocks), HasSubstr("y is"));
}

// What has no CUDA twin, or no CUDA at all, says so by name.
TEST_F(Refused, WithoutACudaTwin) {
  ctx.device = DeviceKind::cuda;
#ifdef ANNULUS_CUDA
#define ANNULUS_EXPECT_REFUSED(name, Args)                                      \
  EXPECT_EQ(message_of([&] { attention::cuda::name(ctx, attention::Args{}); }), \
            "operation " #name " has no CUDA twin yet");
  ANNULUS_NSA_OPS_WITHOUT_CUDA(ANNULUS_EXPECT_REFUSED)
#undef ANNULUS_EXPECT_REFUSED
#else
  TensorView vx = view(x, rows), vh = view(halo, halo_rows), vy = view(y, means);
  vx.device = vh.device = vy.device = DeviceKind::cuda;
  EXPECT_THAT(mean(vx, vh, vy, blocks), AllOf(HasSubstr("operation block_mean"), HasSubstr("without CUDA")));
#endif
}

}  // namespace
}  // namespace annulus::testing::compression
