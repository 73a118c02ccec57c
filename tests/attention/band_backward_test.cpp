#include <omp.h>

#include <algorithm>

#include "attention/band_run.h"

namespace annulus::testing {
namespace {

// What cancels in d_s = p · (d_p − delta), most of all where a row sees one key: two sums of D products.
Condition cancellation(const BandInput<double>& in) {
  const double factor = std::sqrt(static_cast<double>(in.size.depth)) * in.scale;
  return {factor * max_finite(in.d_o) * max_finite(in.v) * std::max(max_finite(in.q), max_finite(in.k)),
          factor * rms(in.d_o) * rms(in.v) * std::max(rms(in.q), rms(in.k))};
}

TEST(BandBackward, EqualsTheReference) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 11);
    const auto exact = reference::band_attention(in);
    const auto mine = run_band(in);
    const auto in32 = convert<float>(in);
    const auto naive = reference::band_attention(in32);
    const auto mine32 = run_band(in32);
    for (std::size_t i = 0; i < std::size(kBandOutputs<double>); ++i) {
      const auto [name, values] = kBandOutputs<double>[i];
      const auto values32 = kBandOutputs<float>[i].values;
      const bool cancels = values == &BandOutput<double>::d_q || values == &BandOutput<double>::d_k;
      const Condition condition = cancels ? cancellation(in) : Condition{};
      expect_close(mine.*values, exact.*values, 1e-13, name, condition);
      expect_as_good(mine32.*values32, naive.*values32, exact.*values, name, condition);
    }
  }
}

TEST(BandBackward, EqualsCentralDifferences) {
  const BandCase band{"documents",
                      {.batch = 2, .queries = 6, .keys = 7, .query_heads = 2, .kv_heads = 1, .depth = 3},
                      {0, 0, 0, 3, 5, 5, 0, 1, 2, 4, 4, 6},
                      {0, 1, 2, 4, 4, 6, 1, 1, 3, 3, 5, 6}};  // row 4 of the first and row 3 of the second see nothing
  const auto in = random_input(band, 12);
  const auto gradients = run_band(in);
  const auto loss = [&](const BandInput<double>& at) {
    BandState<double> state;
    run_forward(at, state, false);
    double sum = 0;
    for (std::size_t i = 0; i < state.o.size(); ++i) sum += state.o[i] * in.d_o[i];
    return sum;
  };
  const auto compare = [&](std::vector<double> BandInput<double>::*input, const std::vector<double>& gradient,
                           const char* name) {
    constexpr double kStep = 1e-4;  // fourth order: truncation 1e-16, rounding 1e-12
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const auto shifted = [&](double step) {
        auto at = in;
        (at.*input)[i] += step;
        return loss(at);
      };
      const double slope =
          (8 * (shifted(kStep) - shifted(-kStep)) - (shifted(2 * kStep) - shifted(-2 * kStep))) / (12 * kStep);
      ASSERT_NEAR(gradient[i], slope, 1e-10) << name << " " << i;
    }
  };
  compare(&BandInput<double>::q, gradients.d_q, "d_q");
  compare(&BandInput<double>::k, gradients.d_k, "d_k");
  compare(&BandInput<double>::v, gradients.d_v, "d_v");
}

TEST(BandBackward, Accumulates) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 13);
    const auto once = run_band(in);
    auto added = once;
    const auto offset = [](std::vector<double>& x) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.5 + static_cast<double>(i % 7);
    };
    offset(added.d_q);
    offset(added.d_k);
    offset(added.d_v);
    const auto before = added;
    run_backward(in, added);
    for (const auto values : {&BandOutput<double>::d_q, &BandOutput<double>::d_k, &BandOutput<double>::d_v}) {
      auto expected = before.*values;
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += (once.*values)[i];
      expect_close(added.*values, expected, 1e-12, "sum");
    }
  }
}

// Rows that see nothing add nothing, whatever their inputs and statistics hold.
TEST(BandBackward, EmptyRowsAddNothing) {
  int empty_rows = 0;
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto& z = band.size;
    auto in = convert<float>(random_input(band, 14));
    const auto clean = run_band(in);
    auto dirty = clean;
    for (auto* x : {&dirty.d_q, &dirty.d_k, &dirty.d_v}) std::fill(x->begin(), x->end(), 0.0f);
    for (std::int64_t row = 0; row < z.bounds(); ++row) {
      const auto i = static_cast<std::size_t>(row);
      if (std::max(band.first[i], 0) <= std::min<std::int64_t>(band.last[i], z.keys - 1)) continue;
      ++empty_rows;
      for (std::int64_t x = row * z.query_heads * z.depth; x < (row + 1) * z.query_heads * z.depth; ++x) {
        EXPECT_EQ(clean.d_q[static_cast<std::size_t>(x)], 0);
        in.q[static_cast<std::size_t>(x)] = in.d_o[static_cast<std::size_t>(x)] = std::nanf("");
      }
      for (std::int64_t h = 0; h < z.query_heads; ++h) {
        const auto stat = static_cast<std::size_t>((row / z.queries * z.query_heads + h) * z.queries + row % z.queries);
        EXPECT_EQ(clean.delta[stat], 0);
        dirty.delta[stat] = std::nanf("");
      }
    }
    run_backward(in, dirty);
    for (const auto values : {&BandOutput<float>::d_q, &BandOutput<float>::d_k, &BandOutput<float>::d_v}) {
      EXPECT_TRUE(same_bits(clean.*values, dirty.*values));
    }
  }
  EXPECT_GT(empty_rows, 100);
}

template <class T>
void expect_same_bits_for_any_threads(const BandCase& band) {
  const auto in = convert<T>(random_input(band, 15));
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto expected = run_band(in);
  for (const int n : {1, 2, 3, 7, 2, 3}) {
    omp_set_num_threads(n);
    const auto mine = run_band(in);
    for (const auto& tensor : kBandOutputs<T>) {
      EXPECT_TRUE(same_bits(mine.*tensor.values, expected.*tensor.values)) << tensor.name << ", threads " << n;
    }
  }
  omp_set_num_threads(threads);
}

// Many strips and units of one head follow each other through the same key tiles.
TEST(BandBackward, TheSameBitsForAnyNumberOfThreads) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    expect_same_bits_for_any_threads<float>(band);
  }
  BandCase band{"", {.batch = 1, .queries = 777, .keys = 777, .query_heads = 2, .kv_heads = 1, .depth = 16}, {}, {}};
  const auto with = [&](const char* name, auto first, auto last) {
    SCOPED_TRACE(band.name = name);
    band.first.clear();
    band.last.clear();
    for (std::int32_t t = 0; t < band.size.queries; ++t) {
      band.first.push_back(first(t));
      band.last.push_back(last(t));
    }
    expect_same_bits_for_any_threads<float>(band);
    expect_same_bits_for_any_threads<double>(band);
  };
  const auto zero = [](std::int32_t) { return 0; };
  const auto itself = [](std::int32_t t) { return t; };
  with("causal", zero, itself);
  with(
      "window", [](std::int32_t t) { return std::max(0, t - 250); }, itself);
  // 300 rows in the middle, whole units, see nothing; the rows around them see keys of one tile.
  with(
      "far apart", [](std::int32_t t) { return t < 200   ? 0
                                               : t < 500 ? 41
                                                         : 50; },
      [](std::int32_t t) { return t < 200   ? 40
                                  : t < 500 ? 40
                                            : 776; });
}

}  // namespace
}  // namespace annulus::testing
