#include <omp.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "attention/select_workspace.h"
#include "attention/selected_run.h"

namespace annulus::testing {
namespace {

// What cancels in d_s = p · (d_p − delta), most of all where a row sees one key: two sums of D products.
Condition cancellation(const SelectedInput<double>& in) {
  const double factor = std::sqrt(static_cast<double>(in.size.depth)) * in.scale;
  return {factor * max_finite(in.d_o) * max_finite(in.v) * std::max(max_finite(in.q), max_finite(in.k)),
          factor * rms(in.d_o) * rms(in.v) * std::max(rms(in.q), rms(in.k))};
}

void expect_equal_gradients(const SelectedInput<double>& in, const BandOutput<double>& exact,
                            const BandOutput<float>& naive, double relative) {
  const auto mine = run_selected(in);
  const auto mine32 = run_selected(convert<float>(in));
  for (std::size_t i = 0; i < std::size(kBandOutputs<double>); ++i) {
    const auto [name, values] = kBandOutputs<double>[i];
    const auto values32 = kBandOutputs<float>[i].values;
    const bool cancels = values == &BandOutput<double>::d_q || values == &BandOutput<double>::d_k;
    const Condition condition = cancels ? cancellation(in) : Condition{};
    expect_close(mine.*values, exact.*values, relative, name, condition);
    expect_as_good(mine32.*values32, naive.*values32, exact.*values, name, condition);
  }
}

TEST(SelectedBackward, EqualsTheReference) {
  for (const auto& [name, in, exact, naive] : selected_cases()) {
    SCOPED_TRACE(name);
    expect_equal_gradients(in, exact, naive, 1e-13);
  }
}

// Every query lists the same two blocks, each query once: many tiles and segments add to them.
TEST(SelectedBackward, BlockThatEveryQuerySelects) {
  const SelectedSize size{
      .batch = 1, .tokens = 900, .query_heads = 4, .kv_heads = 1, .depth = 24, .block = 32, .count = 2};
  auto in = selected_input(size, Lists::hot, 9);
  for (std::size_t i = 1; i < in.selected.size(); i += 2) in.selected[i] = 3;
  expect_equal_gradients(in, reference::selected_attention(in), reference::selected_attention(convert<float>(in)),
                         1e-12);
}

// Logits of 1e4: the rounding of lse, which backward gets, and that of a score move a weight by 1e4 · eps/2 each. (The
// naive implementation rounds both alike, so that they cancel where a row has one weight.)
TEST(SelectedBackward, LargeLogits) {
  for (const auto& size : kSelectedSizes) {
    const auto in = selected_input(size, Lists::documents, 10, 1e4);
    const auto exact = reference::selected_attention(in);
    const auto naive = reference::selected_attention(convert<float>(in));
    const auto mine = run_selected(in);
    const auto mine32 = run_selected(convert<float>(in));
    const double error = 8 * std::numeric_limits<double>::epsilon() * max_finite(exact.lse);
    const Condition condition = cancellation(in);
    expect_close(mine.d_q, exact.d_q, error, "d_q", condition);
    expect_close(mine.d_k, exact.d_k, error, "d_k", condition);
    expect_close(mine.d_v, exact.d_v, error, "d_v");
    const double error32 = std::numeric_limits<float>::epsilon() * max_finite(exact.lse);
    EXPECT_LE(rms_error(mine32.d_q, exact.d_q), 2 * rms_error(naive.d_q, exact.d_q) + error32 * condition.rms);
    EXPECT_LE(rms_error(mine32.d_k, exact.d_k), 2 * rms_error(naive.d_k, exact.d_k) + error32 * condition.rms);
    EXPECT_LE(rms_error(mine32.d_v, exact.d_v), 2 * rms_error(naive.d_v, exact.d_v) + error32 * rms(exact.d_v));
  }
}

TEST(SelectedBackward, GradientsOfHopsAddUp) {
  for (const auto& size : kHopSizes) {
    for (const auto& [lists, name] : kLists) {
      SCOPED_TRACE(name);
      const auto in = selected_input(size, lists, 11);
      const auto exact = reference::selected_attention(in);
      for (const auto& hops : hops_of(size.tokens)) {
        SCOPED_TRACE(fmt::format("{} hops, the first at {} and {}", hops.size(), hops[0].begin[0], hops[0].begin[1]));
        auto sum = exact;
        std::fill(sum.d_q.begin(), sum.d_q.end(), 0.0);
        std::vector<double> d_k(in.k.size(), std::nan("")), d_v = d_k;
        for (const auto& chunks : hops) {
          const auto hop = with_keys(in, chunks);
          sum.d_k.assign(hop.k.size(), 0);
          sum.d_v.assign(hop.k.size(), 0);
          run_backward(hop, sum);
          const std::int64_t row = size.kv_heads * size.depth;
          for_key_rows(in, chunks, [&](std::int64_t from, std::int64_t to) {
            std::copy_n(sum.d_k.begin() + from * row, row, d_k.begin() + to * row);
            std::copy_n(sum.d_v.begin() + from * row, row, d_v.begin() + to * row);
          });
        }
        expect_close(sum.d_q, exact.d_q, 1e-12, "d_q", cancellation(in));
        expect_close(d_k, exact.d_k, 1e-12, "d_k", cancellation(in));
        expect_close(d_v, exact.d_v, 1e-12, "d_v");
      }
    }
  }
}

TEST(SelectedBackward, Accumulates) {
  for (const auto& [name, in, exact, naive] : selected_cases()) {
    SCOPED_TRACE(name);
    const auto once = run_selected(in);
    auto added = once;
    for (auto* x : {&added.d_q, &added.d_k, &added.d_v}) {
      for (std::size_t i = 0; i < x->size(); ++i) (*x)[i] = 0.5 + static_cast<double>(i % 7);
    }
    run_backward(in, added);
    for (const auto values : {&BandOutput<double>::d_q, &BandOutput<double>::d_k, &BandOutput<double>::d_v}) {
      auto difference = added.*values;
      for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= 0.5 + static_cast<double>(i % 7);
      // d_q and d_k, d_v grow by their terms; each addition to a number near 7 rounds by 7 · eps/2.
      const double roundings = static_cast<double>(in.size.queries) * 8 * std::numeric_limits<double>::epsilon();
      EXPECT_LE(max_error(difference, once.*values), roundings * (1 + max_finite(once.*values)));
    }
  }
}

TEST(SelectedBackward, EqualsCentralDifferences) {
  const auto in =
      selected_input({.batch = 2, .tokens = 9, .query_heads = 2, .kv_heads = 1, .depth = 3, .block = 2, .count = 2},
                     Lists::documents, 12);
  const auto gradients = run_selected(in);
  const auto loss = [&](const SelectedInput<double>& at) {
    BandState<double> state;
    run_forward(at, state, false);
    double sum = 0;
    for (std::size_t i = 0; i < state.o.size(); ++i) sum += state.o[i] * in.d_o[i];
    return sum;
  };
  const auto compare = [&](std::vector<double> SelectedInput<double>::*input, const std::vector<double>& gradient,
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
  compare(&SelectedInput<double>::q, gradients.d_q, "d_q");
  compare(&SelectedInput<double>::k, gradients.d_k, "d_k");
  compare(&SelectedInput<double>::v, gradients.d_v, "d_v");
}

// Keys and values that no query sees hold NaN; so do queries, and what belongs to them, that see nothing at all.
TEST(SelectedBackward, WhatNobodySeesMayBeNaN) {
  for (const auto& [name, in, exact, naive] : selected_cases()) {
    SCOPED_TRACE(name);
    const auto clean = run_selected(in);
    auto poisoned = in;
    auto gradients = clean;
    for (auto* x : {&gradients.d_q, &gradients.d_k, &gradients.d_v}) std::fill(x->begin(), x->end(), 0.0);
    const auto& z = in.size;
    std::vector<bool> row_sees(static_cast<std::size_t>(z.batch * z.queries * z.kv_heads));
    for (std::int64_t key = 0; key < z.batch * z.keys * z.kv_heads; ++key) {
      const std::int64_t b = key / z.kv_heads / z.keys, s = key / z.kv_heads % z.keys, h = key % z.kv_heads;
      bool seen = false;
      for (std::int64_t t = 0; t < z.queries; ++t) {
        if (!reference::sees(in, b, t, h, s)) continue;
        seen = row_sees[static_cast<std::size_t>((b * z.queries + t) * z.kv_heads + h)] = true;
      }
      if (seen) continue;
      std::fill_n(poisoned.k.begin() + key * z.depth, z.depth, std::nan(""));
      std::fill_n(poisoned.v.begin() + key * z.depth, z.depth, std::nan(""));
    }
    const std::int64_t group = z.query_heads / z.kv_heads;
    for (std::size_t row = 0; row < row_sees.size(); ++row) {
      if (row_sees[row]) continue;
      const auto at = static_cast<std::ptrdiff_t>(row) * group * z.depth;
      std::fill_n(poisoned.q.begin() + at, group * z.depth, std::nan(""));
      std::fill_n(poisoned.d_o.begin() + at, group * z.depth, std::nan(""));
    }
    run_backward(poisoned, gradients);
    EXPECT_TRUE(same_bits(clean, gradients));
  }
}

TEST(SelectedBackward, BitsDependOnNeitherThreadsNorBatch) {
  const SelectedSize size{
      .batch = 2, .tokens = 500, .query_heads = 6, .kv_heads = 2, .depth = 40, .block = 16, .count = 6};
  for (const auto lists : {Lists::causal, Lists::sparse}) {
    const auto in = convert<float>(selected_input(size, lists, 13));
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    const auto one = run_selected(in);
    for (const int n : {2, 3, 2, 5, 2, 3}) {
      omp_set_num_threads(n);
      EXPECT_TRUE(same_bits(one, run_selected(in))) << n << " threads";
    }
    omp_set_num_threads(threads);
    for (std::int64_t b = 0; b < size.batch; ++b) {
      auto single = in;
      single.size.batch = 1;
      const auto part = [&](auto& x) {
        const auto length = static_cast<std::ptrdiff_t>(x.size()) / size.batch;
        x = std::remove_reference_t<decltype(x)>(x.begin() + b * length, x.begin() + (b + 1) * length);
      };
      for (auto* x : {&single.q, &single.k, &single.v, &single.d_o}) part(*x);
      for (auto* x : {&single.selected, &single.token, &single.start}) part(*x);
      auto together = one;
      for (const auto& tensor : kBandOutputs<float>) part(together.*tensor.values);
      EXPECT_TRUE(same_bits(run_selected(single), together)) << "sequence " << b;
    }
  }
}

// The first rows come to block 7 late: they have much to do before, and the main thread sleeps after every block. Those
// in the middle have nothing to do, the last only block 7. These wait for the first ones all the same.
TEST(SelectedBackward, SegmentsAddToABlockInOrder) {
  const SelectedSize size{
      .batch = 1, .tokens = 512, .query_heads = 16, .kv_heads = 1, .depth = 96, .block = 4, .count = 8};
  auto wide = selected_input(size, Lists::hot, 15);
  for (std::int64_t t = 0; t < size.tokens; ++t) {
    auto* list = wide.selected.data() + t * size.count;
    std::fill_n(list, size.count, -1);
    if (t < 32) std::iota(list, list + size.count, 0);
    else if (t >= 480) list[0] = 7;
  }
  const auto in = convert<float>(wide);
  auto start = run_selected(in);
  for (auto* x : {&start.d_q, &start.d_k, &start.d_v}) {
    for (std::size_t i = 0; i < x->size(); ++i) (*x)[i] = 0.1f * static_cast<float>(i % 11);  // sums of three or more
  }
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  auto one = start;
  run_backward(in, one);
  omp_set_num_threads(2);
  for (int i = 0; i < 10; ++i) {
    auto two = start;
    run_backward(in, two, [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
    EXPECT_TRUE(same_bits(one, two));
  }
  omp_set_num_threads(threads);
}

// d_q of the rows before a token, with their statistics given, does not change with the token by one bit.
TEST(SelectedBackward, ATokenChangesNoRowBeforeIt) {
  for (const auto& size : kSelectedSizes) {
    if (size.batch > 1) continue;
    const auto in = convert<float>(selected_input(size, Lists::causal, 14));
    const auto before = run_selected(in);
    auto changed = in;
    auto after = before;
    for (auto* x : {&after.d_q, &after.d_k, &after.d_v}) std::fill(x->begin(), x->end(), 0.0f);
    const std::int64_t token = size.tokens - 1, q_row = size.query_heads * size.depth,
                       k_row = size.kv_heads * size.depth;
    std::fill_n(changed.k.begin() + token * k_row, k_row, std::nanf(""));
    std::fill_n(changed.v.begin() + token * k_row, k_row, std::nanf(""));
    run_backward(changed, after);
    const auto rows = static_cast<std::size_t>(token * q_row);
    EXPECT_TRUE(
        same_bits(std::span<const float>(before.d_q.data(), rows), std::span<const float>(after.d_q.data(), rows)));
    EXPECT_TRUE(std::isnan(after.d_q[rows]));
  }
}

TEST(SelectedBackward, MemoryIsLinear) {
  const auto bytes = [](std::int64_t tokens) {
    const TensorView q{nullptr, DType::f32, DeviceKind::cpu, {1, tokens, 8, 64}};
    const TensorView k{nullptr, DType::f32, DeviceKind::cpu, {1, tokens, 1, 64}};
    const TensorView selected{nullptr, DType::i32, DeviceKind::cpu, {1, tokens, 1, 16}};
    return attention::cpu::workspace_bytes(attention::SelectedBackward{.q = q,
                                                                       .k = k,
                                                                       .v = k,
                                                                       .selected = selected,
                                                                       .token = {},
                                                                       .start = {},
                                                                       .d_o = q,
                                                                       .lse = {},
                                                                       .delta = {},
                                                                       .d_q = q,
                                                                       .d_k = k,
                                                                       .d_v = k,
                                                                       .select_block = 64,
                                                                       .keys = {tokens, {0, -1}}});
  };
  for (std::int64_t tokens = 1 << 13; tokens <= 1 << 20; tokens *= 2) {
    EXPECT_LE(bytes(2 * tokens), 2 * bytes(tokens) + 4096) << tokens;
    EXPECT_GT(bytes(tokens), 3 * tokens * 64 * 4) << "keys twice and values";
  }
}

}  // namespace
}  // namespace annulus::testing
