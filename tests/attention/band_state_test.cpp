// Carried state: keys that come in hops, merges of far-apart statistics, and a whole ring on one process.
#include <algorithm>

#include "attention/band_run.h"

namespace annulus::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Keys [begin, end) of every sequence, with the bounds moved along.
template <class T>
BandInput<T> slice_keys(const BandInput<T>& in, std::int64_t begin, std::int64_t end) {
  BandInput<T> hop = in;
  hop.size.keys = end - begin;
  const auto cut = [&](const std::vector<T>& from) {
    std::vector<T> to;
    const std::int64_t row = in.size.kv_heads * in.size.depth;
    for (std::int64_t b = 0; b < in.size.batch; ++b) {
      const auto at = from.begin() + b * in.size.keys * row;
      to.insert(to.end(), at + begin * row, at + end * row);
    }
    return to;
  };
  hop.k = cut(in.k);
  hop.v = cut(in.v);
  for (auto& x : hop.first) x = static_cast<std::int32_t>(std::clamp<std::int64_t>(x - begin, 0, end - begin));
  for (auto& x : hop.last) x = static_cast<std::int32_t>(std::clamp<std::int64_t>(x - begin, -1, end - begin - 1));
  return hop;
}

template <class T>
BandState<T> run_hops(const BandInput<T>& in, int hops, bool backwards) {
  BandState<T> state;
  for (int i = 0; i < hops; ++i) {
    const int hop = backwards ? hops - 1 - i : i;
    run_forward(slice_keys(in, in.size.keys * hop / hops, in.size.keys * (hop + 1) / hops), state, i > 0);
  }
  return state;
}

TEST(BandState, AnySplitOfTheKeysEqualsOneCall) {
  int index = 0;
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 21);
    const auto exact = reference::band_attention(in);
    const auto in32 = convert<float>(in);
    const auto naive = reference::band_attention(in32);
    for (const int hops : {2, 5, ++index % 4 == 0 ? 64 : 13}) {  // more hops than keys, too
      SCOPED_TRACE(hops);
      const auto mine = run_hops(in, hops, hops % 2 == 1);
      expect_close(mine.o, exact.o, 1e-12, "o");
      expect_close(mine.lse, exact.lse, 1e-12, "lse");
      // A hop rounds o and lse once each, by eps/2; the roundings of n hops are independent.
      const auto mine32 = run_hops(in32, hops, hops % 2 == 0);
      const double roundings = std::sqrt(hops) * std::numeric_limits<float>::epsilon();
      EXPECT_LE(max_error(mine32.o, exact.o), 2 * max_error(naive.o, exact.o) + roundings * max_finite(exact.o));
      EXPECT_LE(max_error(mine32.lse, exact.lse),
                2 * max_error(naive.lse, exact.lse) + roundings * max_finite(exact.lse));
    }
  }
}

// The error of an fp32 state stays that of the naive one-call implementation from 1 to 64 hops.
TEST(BandState, ErrorDoesNotGrowWithTheNumberOfHops) {
  BandCase band{
      "full", {.batch = 1, .queries = 48, .keys = 4096, .query_heads = 1, .kv_heads = 1, .depth = 32}, {}, {}};
  band.first.assign(48, 0);
  band.last.assign(48, 4095);
  const auto in = random_input(band, 22);
  const auto exact = reference::band_attention(in);
  const auto in32 = convert<float>(in);
  const auto naive = reference::band_attention(in32);
  for (const int hops : {1, 2, 4, 8, 16, 32, 64}) {
    const auto mine = run_hops(in32, hops, false);
    EXPECT_LE(rms_error(mine.o, exact.o), 2 * rms_error(naive.o, exact.o)) << hops << " hops";
    EXPECT_LE(rms_error(mine.lse, exact.lse), 2 * rms_error(naive.lse, exact.lse)) << hops << " hops";
  }
}

TEST(BandState, GradientsOfHopsAddUp) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 23);
    const auto whole = run_band(in);
    for (const int hops : {2, 5}) {
      auto sum = whole;
      std::fill(sum.d_q.begin(), sum.d_q.end(), 0.0);
      std::vector<double> d_k(in.k.size()), d_v(in.k.size());
      const std::int64_t row = in.size.kv_heads * in.size.depth;
      for (int hop = 0; hop < hops; ++hop) {
        const std::int64_t begin = in.size.keys * hop / hops, end = in.size.keys * (hop + 1) / hops;
        const auto part = slice_keys(in, begin, end);
        sum.d_k.assign(part.k.size(), 0);
        sum.d_v.assign(part.k.size(), 0);
        run_backward(part, sum);
        for (std::int64_t b = 0; b < in.size.batch; ++b) {
          const auto from = b * (end - begin) * row, to = (b * in.size.keys + begin) * row;
          std::copy_n(sum.d_k.begin() + from, (end - begin) * row, d_k.begin() + to);
          std::copy_n(sum.d_v.begin() + from, (end - begin) * row, d_v.begin() + to);
        }
      }
      expect_close(sum.d_q, whole.d_q, 1e-12, "d_q");
      expect_close(d_k, whole.d_k, 1e-12, "d_k");
      expect_close(d_v, whole.d_v, 1e-12, "d_v");
    }
  }
}

// A carried state whose log-sum-exp lies `gap` above what this call finds.
TEST(BandState, MergesAnyGap) {
  int index = 0;
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 24);
    const auto here = reference::band_attention(in);
    const auto& z = band.size;
    for (const double gap : {0.0, 3.0, -3.0, 1e2, -1e2, 1e4, -1e4, -kInfinity}) {
      if (++index % 3 != 0) continue;  // every kind of bounds and every shape meets every gap, not all three together
      SCOPED_TRACE(gap);
      BandState<double> state, expected;
      for (std::int64_t i = 0; i < z.q_numel(); ++i) {
        state.o.push_back(gap == -kInfinity ? 0 : std::cos(static_cast<double>(i)));
      }
      for (const double l : here.lse) state.lse.push_back(l == -kInfinity ? gap : l + gap);
      expected = state;
      for (std::int64_t i = 0; i < z.q_numel(); ++i) {
        const std::int64_t row = i / z.depth, token = row / z.query_heads, head = row % z.query_heads;
        const auto stat =
            static_cast<std::size_t>((token / z.queries * z.query_heads + head) * z.queries + token % z.queries);
        const double l = here.lse[stat], carried = state.lse[stat];
        if (l == -kInfinity) continue;
        const double keep = carried == -kInfinity ? 0 : 1 / (1 + std::exp(l - carried));
        auto& o = expected.o[static_cast<std::size_t>(i)];
        o = keep * o + (1 - keep) * here.o[static_cast<std::size_t>(i)];
        expected.lse[stat] =
            carried == -kInfinity ? l : std::max(l, carried) + std::log1p(std::exp(-std::abs(l - carried)));
      }
      auto state32 = BandState<float>{convert<float>(state.o), convert<float>(state.lse)};
      run_forward(in, state, true);
      expect_close(state.o, expected.o, 1e-12, "o");
      expect_close(state.lse, expected.lse, 1e-13, "lse");
      // In fp32 the carried lse itself is rounded, which moves the weights by as much.
      run_forward(convert<float>(in), state32, true);
      const double eps = std::numeric_limits<float>::epsilon(), conditioning = 4 + max_finite(expected.lse);
      EXPECT_LE(max_error(state32.o, expected.o), 4 * eps * conditioning * max_finite(expected.o));
      EXPECT_LE(max_error(state32.lse, expected.lse), 4 * eps * conditioning);
    }
  }
}

// Every rank of a ring in turn: its rows of a sequence against every rank's keys, in the order of the hops.
void expect_ring_equals_one_rank(const BandCase& band, int ranks, bool zigzag) {
  const auto in = random_input(band, 25);
  const auto exact = reference::band_attention(in);
  const std::int64_t tokens = in.size.queries, chunk = tokens / (2 * ranks), row = in.size.query_heads * in.size.depth;
  const std::int64_t kv_row = in.size.kv_heads * in.size.depth;
  const auto begins = [&](int rank) {
    return zigzag ? std::pair<std::int64_t, std::int64_t>{rank * chunk, (2 * ranks - 1 - rank) * chunk}
                  : std::pair<std::int64_t, std::int64_t>{2 * rank * chunk, (2 * rank + 1) * chunk};
  };
  const auto gather = [&](const auto& from, int rank, std::int64_t width) {
    auto to = from;
    to.clear();
    for (const std::int64_t begin : {begins(rank).first, begins(rank).second}) {
      to.insert(to.end(), from.begin() + begin * width, from.begin() + (begin + chunk) * width);
    }
    return to;
  };
  for (int rank = 0; rank < ranks; ++rank) {
    BandState<double> state;
    for (int hop = 0; hop < ranks; ++hop) {
      const int source = (rank - hop + ranks) % ranks;
      BandInput<double> local = in;
      local.size.queries = local.size.keys = 2 * chunk;
      local.q = gather(in.q, rank, row);
      local.k = gather(in.k, source, kv_row);
      local.v = gather(in.v, source, kv_row);
      auto first = gather(in.first, rank, 1), last = gather(in.last, rank, 1);
      const Shape shape{1, 2 * chunk};
      Context ctx;
      attention::band_bounds(ctx, {.global_first = host_view(first.data(), shape),
                                   .global_last = host_view(last.data(), shape),
                                   .first = host_view(first.data(), shape),
                                   .last = host_view(last.data(), shape),
                                   .chunk = chunk,
                                   .chunk_begin = {begins(source).first, begins(source).second}});
      local.first = first;
      local.last = last;
      run_forward(local, state, hop > 0);
    }
    expect_close(state.o, gather(exact.o, rank, row), 1e-12, "o");
  }
}

TEST(BandState, RingEqualsOneRank) {
  BandCase band{"", {.batch = 1, .queries = 120, .keys = 120, .query_heads = 4, .kv_heads = 2, .depth = 8}, {}, {}};
  for (const std::int32_t window : {1, 9, 70, 120}) {
    for (const std::int32_t document : {1, 13, 50, 120}) {
      band.first.clear();
      band.last.clear();
      for (std::int32_t t = 0; t < 120; ++t) {
        band.first.push_back(std::max(t / document * document, t - window + 1));
        band.last.push_back(t);
      }
      for (const int ranks : {1, 2, 3, 5}) {
        SCOPED_TRACE(fmt::format("window {} documents {} ranks {}", window, document, ranks));
        expect_ring_equals_one_rank(band, ranks, true);
        expect_ring_equals_one_rank(band, ranks, false);
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
