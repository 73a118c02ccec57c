// The cases of band_run.h: kinds of bounds times shapes, and a test that they are what they claim.
#include <algorithm>

#include "attention/band_run.h"

namespace annulus::testing {
namespace {

using Bounds = std::pair<std::int64_t, std::int64_t>;  // first, last of one query
using MakeBounds = std::function<Bounds(std::int64_t batch, std::int64_t t, const BandSize&)>;

// Start of the document that holds token t; lengths repeat, one-token documents among them.
std::int64_t document_start(std::int64_t t, std::int64_t shift) {
  static constexpr std::int64_t kLengths[] = {1, 37, 1, 1, 5, 64, 130, 2};
  std::int64_t start = -shift;
  for (std::size_t i = 0;; ++i) {
    const std::int64_t end = start + kLengths[i % std::size(kLengths)];
    if (t < end) return std::max<std::int64_t>(start, 0);
    start = end;
  }
}

std::int64_t floor_divide(std::int64_t a, std::int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Non-decreasing and random: some bounds lie outside the buffer, some rows are empty, some keys are seen by nobody.
std::int64_t ragged(std::int64_t t, const BandSize& size, const char* stream, std::int64_t batch) {
  const CounterRng rng(7, stream);
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < size.queries; ++i) {
    const double u = rng.uniform(static_cast<std::uint64_t>(batch * size.queries + i));
    values.push_back(static_cast<std::int64_t>(std::floor(u * static_cast<double>(size.keys + 9))) - 5);
  }
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(t)];
}

struct Kind {
  const char* name;
  MakeBounds bounds;
};

const Kind kKinds[] = {
    {"causal",
     [](auto, auto t, const BandSize& z) {
       return Bounds{0, t + z.keys - z.queries};
     }},
    {"full",
     [](auto, auto, const BandSize& z) {
       return Bounds{0, z.keys - 1};
     }},
    {"documents",
     [](auto b, auto t, const BandSize&) {
       return Bounds{document_start(t, 3 * b), t};
     }},
    {"window",
     [](auto, auto t, const BandSize&) {
       return Bounds{std::max<std::int64_t>(0, t - 19), t};
     }},
    {"wide window in documents",
     [](auto b, auto t, const BandSize&) {
       return Bounds{std::max(document_start(t, b), t - 99), t};
     }},
    // Compressed keys, block 8, stride 4: the first rows of a document see nothing.
    {"compressed",
     [](auto b, auto t, const BandSize&) {
       return Bounds{(document_start(t, b) + 3) / 4, floor_divide(t - 8 + 1, 4)};
     }},
    {"nothing",
     [](auto, auto, const BandSize&) {
       return Bounds{3, 2};
     }},
    // Rows 10 … 19 in the middle see nothing, and rows around them other keys.
    {"hole",
     [](auto, auto t, const BandSize&) {
       return t < 10 ? Bounds{0, 4} : t < 20 ? Bounds{7, 4} : Bounds{7, 9};
     }},
    {"ragged",
     [](auto b, auto t, const BandSize& z) {
       return Bounds{ragged(t, z, "first", b), ragged(t, z, "last", b)};
     }},
    // Narrow steps with keys between them that nobody sees.
    {"gaps",
     [](auto, auto t, const BandSize&) {
       return Bounds{t / 7 * 9, t / 7 * 9 + 4};
     }},
};

const BandSize kSizes[] = {
    {.batch = 1, .queries = 211, .keys = 211, .query_heads = 1, .kv_heads = 1, .depth = 64},
    {.batch = 2, .queries = 67, .keys = 131, .query_heads = 4, .kv_heads = 2, .depth = 32},
    {.batch = 1, .queries = 45, .keys = 29, .query_heads = 8, .kv_heads = 1, .depth = 17},
    {.batch = 2, .queries = 33, .keys = 101, .query_heads = 3, .kv_heads = 3, .depth = 1},
    {.batch = 1, .queries = 13, .keys = 200, .query_heads = 4, .kv_heads = 1, .depth = 131},
    {.batch = 1, .queries = 1, .keys = 1, .query_heads = 2, .kv_heads = 1, .depth = 5},
    {.batch = 1, .queries = 100, .keys = 40, .query_heads = 16, .kv_heads = 2, .depth = 48},
    {.batch = 1, .queries = 29, .keys = 113, .query_heads = 2, .kv_heads = 1, .depth = 128},
    {.batch = 2, .queries = 1, .keys = 1301, .query_heads = 8, .kv_heads = 2, .depth = 64},  // one token: ranges of
                                                                                             // keys
    {.batch = 1, .queries = 1, .keys = 600, .query_heads = 3, .kv_heads = 3, .depth = 7},
};

}  // namespace

std::vector<BandCase> band_cases() {
  std::vector<BandCase> cases;
  for (const auto& size : kSizes) {
    for (const auto& kind : kKinds) {
      BandCase band{fmt::format("{}, B {} T {} S {} Hq {} Hkv {} D {}", kind.name, size.batch, size.queries, size.keys,
                                size.query_heads, size.kv_heads, size.depth),
                    size,
                    {},
                    {}};
      for (std::int64_t b = 0; b < size.batch; ++b) {
        for (std::int64_t t = 0; t < size.queries; ++t) {
          const auto [first, last] = kind.bounds(b, t, size);
          band.first.push_back(static_cast<std::int32_t>(first));
          band.last.push_back(static_cast<std::int32_t>(last));
        }
      }
      cases.push_back(std::move(band));
    }
  }
  return cases;
}

BandInput<double> random_input(const BandCase& band, std::uint64_t seed, double sharpness) {
  BandInput<double> in{.size = band.size,
                       .scale = sharpness / std::sqrt(static_cast<double>(band.size.depth)),
                       .q = {},
                       .k = {},
                       .v = {},
                       .d_o = {},
                       .first = band.first,
                       .last = band.last};
  const auto fill = [&](std::vector<double>& x, std::int64_t count, const char* stream) {
    const CounterRng rng(seed, stream);
    // Values of fp32, so that fp32 and fp64 runs have the same inputs.
    for (std::int64_t i = 0; i < count; ++i) x.push_back(static_cast<float>(rng.normal(static_cast<std::uint64_t>(i))));
  };
  fill(in.q, band.size.q_numel(), "q");
  fill(in.k, band.size.k_numel(), "k");
  fill(in.v, band.size.k_numel(), "v");
  fill(in.d_o, band.size.q_numel(), "d_o");
  return in;
}

TEST(BandCases, BoundsDoNotDecrease) {
  int empty_rows = 0, outside = 0;
  for (const auto& band : band_cases()) {
    for (std::int64_t b = 0; b < band.size.batch; ++b) {
      for (std::int64_t t = 0; t < band.size.queries; ++t) {
        const auto i = static_cast<std::size_t>(b * band.size.queries + t);
        if (t > 0) {
          ASSERT_LE(band.first[i - 1], band.first[i]) << band.name;
          ASSERT_LE(band.last[i - 1], band.last[i]) << band.name;
        }
        empty_rows += band.first[i] > band.last[i];
        outside += band.first[i] < 0 || band.last[i] >= band.size.keys;
      }
    }
  }
  EXPECT_GT(empty_rows, 100);
  EXPECT_GT(outside, 100);
}

}  // namespace annulus::testing
