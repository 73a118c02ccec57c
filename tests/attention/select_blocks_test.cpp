// attention::select_blocks against the naive reference and against closed forms.
#include <gtest/gtest.h>
#include <omp.h>

#include <numeric>

#include "attention/cpu/top_lists.h"
#include "attention/select_blocks_run.h"

namespace annulus::testing::selection {
namespace {

struct Case {
  const char* name;
  BandSize size;
  SelectionRule rule;
  std::vector<std::int32_t> documents;
};

std::vector<Case> cases() {
  const auto size = [](std::int64_t batch, std::int64_t tokens, std::int64_t query_heads, std::int64_t kv_heads,
                       std::int64_t depth) {
    return BandSize{
        .batch = batch, .queries = tokens, .query_heads = query_heads, .kv_heads = kv_heads, .depth = depth};
  };
  const auto rule = [](std::int64_t l, std::int64_t d, std::int64_t lp, std::int64_t n, std::int64_t init,
                       std::int64_t local) { return SelectionRule{l, d, lp, n, init, local}; };
  return {{"paper", size(1, 1500, 3, 1, 8), kPaper, {}},
          {"paper, few chosen, G 1", size(1, 1937, 1, 1, 7), rule(32, 16, 64, 4, 1, 2), {}},
          {"G 2 of 3 KV heads, odd depth", size(2, 411, 6, 3, 5), rule(8, 4, 16, 5, 1, 2), {}},
          {"G 3", size(1, 403, 3, 1, 33), rule(8, 4, 16, 7, 2, 1), {}},
          {"G 4, wide rows", size(1, 300, 16, 4, 40), rule(8, 4, 16, 4, 1, 2), {}},
          {"G 16", size(1, 350, 16, 1, 16), rule(8, 4, 16, 6, 0, 1), {}},
          {"G 64", size(1, 150, 64, 1, 3), rule(4, 2, 8, 6, 1, 2), {}},
          {"l = d", size(1, 900, 2, 1, 16), rule(16, 16, 64, 5, 1, 1), {}},
          {"l = l'", size(1, 900, 2, 1, 16), rule(64, 16, 64, 5, 1, 1), {}},
          {"l' = 2 d", size(1, 700, 2, 1, 16), rule(32, 16, 32, 6, 1, 2), {}},
          {"one token each", size(1, 260, 2, 1, 6), rule(1, 1, 1, 9, 1, 1), {}},
          {"one choice", size(1, 500, 2, 1, 6), rule(8, 4, 16, 1, 0, 1), {}},
          {"blocks wider than a tile", size(1, 1100, 2, 1, 4), rule(4, 1, 128, 4, 1, 1), {}},
          {"blocks of a tile, long reach", size(1, 600, 1, 1, 4), rule(64, 1, 64, 4, 0, 2), {}},
          {"as many chosen as there are", size(1, 330, 2, 1, 4), rule(8, 4, 16, 21, 1, 2), {}},
          {"more chosen than there are", size(2, 330, 2, 1, 4), rule(8, 4, 16, 300, 1, 2), {}},
          {"many chosen", size(1, 1000, 2, 1, 4), rule(2, 2, 4, 200, 3, 5), {}},
          {"all forced", size(1, 330, 2, 1, 4), rule(8, 4, 16, 3, 1, 2), {}},
          {"documents", size(2, 900, 4, 2, 8), rule(8, 4, 16, 5, 1, 2), {1, 300, 5, 64, 7, 211, 3, 1, 1, 20}},
          {"documents, nothing forced in front", size(2, 900, 4, 2, 8), rule(16, 4, 16, 4, 0, 1), {33, 300, 5, 64}},
          {"documents within a selection block", size(1, 700, 2, 1, 8), rule(32, 16, 64, 4, 1, 1), {9, 1, 17, 500, 3}},
          {"shorter than a block", size(2, 7, 2, 1, 8), rule(8, 4, 16, 4, 1, 2), {}},
          {"a block", size(1, 8, 2, 1, 8), rule(8, 4, 16, 4, 1, 2), {}},
          {"a token more than a block", size(1, 9, 2, 1, 8), rule(8, 4, 16, 4, 1, 2), {}},
          {"one token", size(1, 1, 2, 1, 8), rule(8, 4, 16, 4, 1, 2), {}},
          {"block of many selection blocks' tokens", size(1, 40, 2, 1, 8), rule(2, 1, 2, 6, 1, 2), {}}};
}

TEST(SelectBlocks, EqualsReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const SelectionInput<double> in = make_input(c.size, c.rule, c.documents);
    const SelectionOutput<double> expected = reference::select_blocks(in);
    const Lists selected = run(in, expected.lse);
    expect_well_formed(selected, in);
    EXPECT_EQ(selected, expected.selected);
  }
}

// How much better, in exact scores, the blocks that a row left out are than those it took instead: at most `tolerance`
// for every row. Returns how many rows differ from the exact selection.
std::int64_t expect_as_good(const Lists& selected, const SelectionOutput<double>& exact,
                            const SelectionInput<double>& in, double tolerance) {
  std::int64_t differing = 0;
  for (std::int64_t row = 0; row < in.size.bounds() * in.size.kv_heads; ++row) {
    const Lists list = list_of(selected, in, 0, row), best = list_of(exact.selected, in, 0, row);
    if (list == best) continue;
    ++differing;
    double worst_in = std::numeric_limits<double>::infinity(), best_out = 0;
    for (const std::int32_t j : list) {
      if (!contains(best, j)) worst_in = std::min(worst_in, exact.scores[at(row * exact.num_blocks + j)]);
    }
    for (const std::int32_t j : best) {
      if (!contains(list, j)) best_out = std::max(best_out, exact.scores[at(row * exact.num_blocks + j)]);
    }
    EXPECT_LE(best_out - worst_in, tolerance) << "row " << row;
  }
  return differing;
}

// What float chooses is as good as scores with twice the naive float implementation's error allow.
TEST(SelectBlocks, FloatChoosesAsWellAsItsErrorAllows) {
  std::int64_t rows = 0, differing = 0;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    SelectionInput<float> in32 = convert<float>(make_input(c.size, c.rule, c.documents));
    in32.scale = static_cast<float>(in32.scale);
    const SelectionInput<double> in = convert<double>(in32);
    const auto exact = reference::select_blocks(in);
    const auto naive = reference::select_blocks(in32);
    double error = 0;
    for (std::size_t i = 0; i < exact.scores.size(); ++i)
      error = std::max(error, std::abs(naive.scores[i] - exact.scores[i]));
    const Lists selected = run(in32, naive.lse);
    expect_well_formed(selected, in);
    rows += in.size.bounds() * in.size.kv_heads;
    differing += expect_as_good(selected, exact, in, 2 * (2 * error));  // two scores, each off by 2 · error
  }
  RecordProperty("rows", static_cast<int>(rows));
  RecordProperty("rows_that_differ", static_cast<int>(differing));
  EXPECT_LE(differing * 1000, rows);
}

// One query of depth 1 whose probabilities are proportional to e^logit[i].
Lists choose_by_logits(const std::vector<double>& logits, const SelectionRule& rule, std::int32_t token) {
  SelectionInput<double> in{.size = {.keys = static_cast<std::int64_t>(logits.size())},
                            .rule = rule,
                            .scale = 1,
                            .q = {1},
                            .k = logits,
                            .token = {token},
                            .start = {0}};
  double sum = 0;
  for (const double x : logits) sum += std::exp(x);
  return run(in, {std::log(sum)});
}

// The compressed block with all the weight is in the chosen block. (Eq. 9 read with 0-based indices picks others.)
TEST(SelectBlocks, ChoosesTheBlockThatHoldsTheWeight) {
  constexpr std::int32_t kToken = 20 * 64 + 63;
  SelectionRule rule = kPaper;
  rule.count = 2;
  rule.init_blocks = 0;
  rule.local_blocks = 1;
  for (std::int64_t i = 0; i < 80; ++i) {
    std::vector<double> logits(at(num_compressed(kToken + 1, rule)), -500);
    logits[at(i)] = 0;
    EXPECT_EQ(choose_by_logits(logits, rule, kToken), (Lists{static_cast<std::int32_t>(i / 4), 20})) << i;
  }
}

// Weights 1, 2, 2, 2, 1 at offsets −1 … 3 from a block's first: against twice another probability, just below and
// above. All blocks before it are forced, so that offset −1 does not count for a rival.
TEST(SelectBlocks, WeighsAsThePaper) {
  constexpr std::int32_t kToken = 60 * 64 + 63;
  const double weights[] = {1, 2, 2, 2, 1};
  for (const std::int32_t block : {1, 15, 16, 40}) {  // tiles of compressed blocks end between and within blocks
    SelectionRule rule = kPaper;
    rule.init_blocks = block;
    rule.local_blocks = 1;
    rule.count = block + 2;
    for (int a = 0; a < 5; ++a) {
      for (int b = 1; b < 4; ++b) {
        for (const double factor : {0.99, 1.01}) {
          std::vector<double> logits(at(num_compressed(kToken + 1, rule)), -500);
          logits[at(4 * block - 1 + a)] = std::log(factor * 2 / weights[a]);
          logits[at(4 * (block + 10) - 1 + b)] = 0;
          EXPECT_EQ(choose_by_logits(logits, rule, kToken)[at(block)], factor < 1 ? block + 10 : block)
              << block << ' ' << a << ' ' << b;
        }
      }
    }
  }
}

template <class T>
void test_equal_scores() {
  SelectionInput<double> in = make_input({.queries = 4000, .query_heads = 3, .depth = 4}, kPaper);
  std::fill(in.q.begin(), in.q.end(), 0.0);
  const Lists selected = run(convert<T>(in));
  for (std::int64_t row = 0; row < 4000; ++row) {
    const std::int64_t own = row / 64;
    Lists expected;
    for (std::int32_t j = 0; j <= own; ++j) {
      if (own < 16 || j < 14 || j >= own - 1) expected.push_back(j);
    }
    expected.resize(16, -1);
    ASSERT_EQ(list_of(selected, in, row, 0), expected) << row;
  }
}

TEST(SelectBlocks, EqualScoresTakeTheLowerIndex) {
  test_equal_scores<float>();
  test_equal_scores<double>();
}

// Content that repeats every three selection blocks gives scores that repeat, wherever tiles end: a chosen block brings
// all earlier ones of the same content.
template <class T>
void test_repeated_content(std::int64_t depth, std::int64_t query_heads) {
  constexpr std::int64_t kPeriod = 3, kTokens = 6500;
  SelectionRule rule{.block = 8, .stride = 4, .select_block = 20, .count = 12, .init_blocks = 1, .local_blocks = 2};
  SelectionInput<double> in = make_input({.queries = kTokens, .query_heads = query_heads, .depth = depth}, rule);
  for (std::int64_t i = 0; i < num_compressed(kTokens, rule); ++i) {
    for (std::int64_t c = 0; c < depth; ++c) in.k[at(i * depth + c)] = in.k[at(i % (5 * kPeriod) * depth + c)];
  }
  SelectionInput<T> rows = convert<T>(in);  // every 13th token, in all alignments to blocks
  rows.q.clear();
  rows.token.clear();
  for (std::int32_t t = 0; t < kTokens; t += 13) {
    rows.token.push_back(t);
    for (std::int64_t c = 0; c < query_heads * depth; ++c)
      rows.q.push_back(static_cast<T>(in.q[at(t * query_heads * depth + c)]));
  }
  rows.size.queries = static_cast<std::int64_t>(rows.token.size());
  rows.start.assign(rows.token.size(), 0);
  const Lists selected = run(rows);
  in.token = rows.token;
  for (std::int64_t row = 0; row < rows.size.queries; ++row) {
    const Lists list = list_of(selected, in, row, 0);
    const std::int32_t own = in.token[at(row)] / 20;
    for (const std::int32_t j : list) {
      if (j < 1 + kPeriod || j > own - 2) continue;
      ASSERT_TRUE(contains(list, j - kPeriod)) << "row " << row << " block " << j;
    }
  }
}

TEST(SelectBlocks, RepeatedContentTakesTheLowerIndex) {
  for (const std::int64_t depth : {1, 6, 17}) {
    test_repeated_content<float>(depth, 1);
    test_repeated_content<double>(depth, 1);
    test_repeated_content<float>(depth, 5);
  }
}

TEST(SelectBlocks, ForcedBlocksAreInEveryList) {
  const SelectionInput<double> in = make_input({.queries = 8 * 1024 + 64, .depth = 2}, kPaper, {}, 8);
  const Lists selected = run(convert<float>(in));
  for (std::int64_t row = 0; row < in.size.queries; ++row) {
    const Lists list = list_of(selected, in, row, 0);
    ASSERT_TRUE(contains(list, 0) && contains(list, row / 64) && (row < 64 || contains(list, row / 64 - 1))) << row;
  }
  expect_well_formed(selected, in);
}

// Logits far beyond what exp can hold: probabilities are mostly exact zeros, and ones of which several heads' can tie;
// in exp(logit − lse) such ties break within the rounding of logit and lse.
TEST(SelectBlocks, HugeLogits) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const SelectionInput<double> in = make_input(c.size, c.rule, c.documents, 1e4);
    const SelectionOutput<double> exact = reference::select_blocks(in);
    double largest = 0;
    for (const double lse : exact.lse) largest = std::isinf(lse) ? largest : std::max(largest, std::abs(lse));
    const auto terms = static_cast<double>(c.size.query_heads / c.size.kv_heads * c.rule.block / c.rule.stride);
    const double rounding = static_cast<double>(c.size.depth + 4) * std::numeric_limits<double>::epsilon() * largest;
    const Lists selected = run(in, exact.lse);
    expect_well_formed(selected, in);
    expect_as_good(selected, exact, in, 2 * terms * rounding);
    expect_well_formed(run(convert<float>(in)), in);
  }
}

// The rows `tokens` of `in`, with the same keys.
template <class T>
SelectionInput<T> rows_of(const SelectionInput<T>& in, const std::vector<std::int32_t>& tokens) {
  SelectionInput<T> part = in;
  part.size.queries = static_cast<std::int64_t>(tokens.size());
  part.q.clear();
  part.token.clear();
  part.start.clear();
  const std::int64_t width = in.size.query_heads * in.size.depth;
  for (std::int64_t b = 0; b < in.size.batch; ++b) {
    for (const std::int32_t t : tokens) {
      const std::int64_t row = b * in.size.queries + t;
      part.token.push_back(in.token[at(row)]);
      part.start.push_back(in.start[at(row)]);
      part.q.insert(part.q.end(), in.q.begin() + row * width, in.q.begin() + (row + 1) * width);
    }
  }
  return part;
}

// [begin, begin + count) and [second, second + count).
std::vector<std::int32_t> chunks(std::int32_t begin, std::int32_t second, std::int32_t count) {
  std::vector<std::int32_t> tokens(at(2 * count));
  std::iota(tokens.begin(), tokens.begin() + count, begin);
  std::iota(tokens.begin() + count, tokens.end(), second);
  return tokens;
}

template <class T>
void test_rows_alone(const std::vector<std::int32_t>& documents) {
  const SelectionInput<double> whole = make_input(
      {.batch = 2, .queries = 1100, .query_heads = 4, .kv_heads = 2, .depth = 16}, {8, 4, 16, 6, 1, 2}, documents);
  const SelectionInput<T> in = convert<T>(whole);
  const Lists expected = run(in);
  const std::vector<std::vector<std::int32_t>> parts = {{1099},
                                                        {0},
                                                        {37, 38, 700},
                                                        chunks(0, 960, 137),
                                                        chunks(300, 500, 160),
                                                        chunks(17, 1000, 65),
                                                        chunks(528, 576, 48),
                                                        chunks(999, 1049, 50)};
  for (const std::vector<std::int32_t>& tokens : parts) {
    const Lists selected = run(rows_of(in, tokens));
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        for (std::int64_t h = 0; h < 2; ++h) {
          const auto size = static_cast<std::int64_t>(tokens.size());
          ASSERT_EQ(list_of(selected, whole, b * size + static_cast<std::int64_t>(i), h),
                    list_of(expected, whole, b * 1100 + tokens[i], h))
              << tokens[0] << " + " << i;
        }
      }
    }
  }
}

TEST(SelectBlocks, ARowDoesNotDependOnTheOthers) {
  test_rows_alone<float>({});
  test_rows_alone<double>({});
  test_rows_alone<float>({1, 30, 500, 7, 111});
}

TEST(SelectBlocks, BatchEqualsSingleSequences) {
  const SelectionInput<float> in = convert<float>(make_input(
      {.batch = 2, .queries = 701, .query_heads = 6, .kv_heads = 2, .depth = 9}, {8, 4, 16, 6, 1, 2}, {300, 5, 64}));
  Lists separate;
  for (std::int64_t b = 0; b < 2; ++b) {
    SelectionInput<float> one = in;
    const auto half = [&](auto& x) {
      x = {x.begin() + b * std::ssize(x) / 2, x.begin() + (b + 1) * std::ssize(x) / 2};
    };
    one.size.batch = 1;
    half(one.q);
    half(one.k);
    half(one.token);
    half(one.start);
    const Lists selected = run(one);
    separate.insert(separate.end(), selected.begin(), selected.end());
  }
  EXPECT_EQ(run(in), separate);
}

int polls = 0;

TEST(SelectBlocks, ThreadsDoNotMatterAndTheMainOnePolls) {
  const SelectionInput<float> in = convert<float>(
      make_input({.batch = 1, .queries = 3000, .query_heads = 4, .kv_heads = 2, .depth = 16}, kPaper, {2000, 100}));
  const auto lse = reference::select_blocks(in).lse;
  const int threads = omp_get_max_threads();
  polls = 0;
  omp_set_num_threads(1);
  const Lists one = run(in, lse, [] { ++polls; });
  EXPECT_GT(polls, 60);  // strips that look for blocks, times their tiles
  for (const int count : {2, 3, 5}) {
    omp_set_num_threads(count);
    EXPECT_EQ(run(in, lse), one) << count;
  }
  omp_set_num_threads(threads);
}

// NaN and infinity among keys that a row does not see, whatever its neighbours do.
TEST(SelectBlocks, InvisibleKeysMayHoldAnything) {
  const SelectionRule rule{16, 4, 16, 4, 0, 1};  // blocks that compete hold invisible keys at either edge
  const SelectionInput<double> in = make_input({.queries = 900, .query_heads = 2, .depth = 5}, rule, {1, 400, 30});
  const auto exact = reference::select_blocks(in);
  const Lists clean = run(in, exact.lse);
  for (const double poison :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), 1e300}) {
    for (const std::int64_t bad : {0, 50, 63, 64, 65, 101, 107, 180, 213}) {
      SelectionInput<double> damaged = in;
      std::fill_n(damaged.k.begin() + bad * 5, 5, poison);
      const Lists selected = run(damaged, exact.lse);
      expect_well_formed(selected, in);
      for (std::int64_t row = 0; row < 900; ++row) {
        const bool sees = bad * 4 + 15 <= in.token[at(row)] && bad * 4 >= in.start[at(row)];
        if (sees) continue;
        ASSERT_EQ(list_of(selected, in, row, 0), list_of(clean, in, row, 0)) << "row " << row << " key " << bad;
      }
    }
  }
}

// A diverged run: lists stay well formed, and rows without NaN are what they were.
template <class T>
void test_nan_rows() {
  const SelectionInput<double> whole = make_input({.queries = 700, .query_heads = 2, .depth = 5}, {8, 4, 16, 5, 1, 2});
  SelectionInput<T> in = convert<T>(whole);
  auto lse = reference::select_blocks(in).lse;
  const Lists clean = run(in, lse);
  const T values[] = {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
                      -std::numeric_limits<T>::infinity(), std::numeric_limits<T>::max()};
  for (std::int64_t row = 3; row < 700; row += 7) {
    const T value = values[row % 4];
    if (row % 3 == 0) lse[at(row)] = lse[at(700 + row)] = value;
    else in.q[at(row * 10 + row % 10)] = value;
  }
  const Lists selected = run(in, lse);
  expect_well_formed(selected, whole);
  for (std::int64_t row = 0; row < 700; ++row) {
    if (row % 7 == 3) continue;
    ASSERT_EQ(list_of(selected, whole, row, 0), list_of(clean, whole, row, 0)) << row;
  }
}

TEST(SelectBlocks, NanScoresGiveWellFormedLists) {
  test_nan_rows<float>();
  test_nan_rows<double>();
}

template <class T>
void test_exp2(double lowest, double ulps) {
  using namespace attention::cpu;
  const auto of = [](T x) { return exp2_of<T>(Vector<T>{} + x)[kLanes<T> - 1]; };
  for (double x = 3; x > lowest; x -= 0.01037) {
    const T argument = static_cast<T>(x);
    const long double exact = std::exp2(static_cast<long double>(argument));
    ASSERT_LE(std::abs(of(argument) - exact), ulps * std::numeric_limits<T>::epsilon() * exact) << x;
  }
  EXPECT_EQ(of(0), 1);
  EXPECT_EQ(of(static_cast<T>(lowest)), std::numeric_limits<T>::min());
  EXPECT_EQ(of(static_cast<T>(lowest * 1.0001)), 0);
  EXPECT_EQ(of(static_cast<T>(-1e30)), 0);
  EXPECT_EQ(of(-std::numeric_limits<T>::infinity()), 0);
}

TEST(SelectBlocks, Exponential) {
  test_exp2<float>(-126, 1);
  test_exp2<double>(-1022, 2);
}

}  // namespace
}  // namespace annulus::testing::selection
