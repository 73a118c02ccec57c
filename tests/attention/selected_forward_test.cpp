#include <omp.h>

#include "attention/select_workspace.h"
#include "attention/selected_run.h"

namespace annulus::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
BandState<T> forward(const SelectedInput<T>& in) {
  BandState<T> state;
  run_forward(in, state, false);
  return state;
}

TEST(SelectedForward, EqualsTheReference) {
  for (const auto& [name, in, exact, naive] : selected_cases()) {
    SCOPED_TRACE(name);
    const auto mine = forward(in);
    const auto mine32 = forward(convert<float>(in));
    expect_close(mine.o, exact.o, 1e-13, "o");
    expect_close(mine.lse, exact.lse, 1e-13, "lse");
    expect_as_good(mine32.o, naive.o, exact.o, "o");
    expect_as_good(mine32.lse, naive.lse, exact.lse, "lse");
  }
}

// Logits of 1e4: weights are nearly one-hot, and a rounding of a logit by eps/2 moves them by 1e4 · eps/2.
TEST(SelectedForward, LargeLogits) {
  for (const auto& size : kSelectedSizes) {
    const auto in = selected_input(size, Lists::documents, 2, 1e4);
    const auto exact = reference::selected_attention(in);
    const auto in32 = convert<float>(in);
    const auto naive = reference::selected_attention(in32);
    const auto mine = forward(in);
    const auto mine32 = forward(in32);
    const double logit = max_finite(exact.lse);
    expect_close(mine.o, exact.o, 4 * logit * std::numeric_limits<double>::epsilon(), "o");
    expect_close(mine.lse, exact.lse, 1e-13, "lse");
    EXPECT_LE(rms_error(mine32.o, exact.o),
              2 * rms_error(naive.o, exact.o) + logit * std::numeric_limits<float>::epsilon() * rms(exact.o));
    expect_as_good(mine32.lse, naive.lse, exact.lse, "lse");
  }
}

// All logits far below 0, where a key that is not there, counted with a logit of 0, would take all the weight. The
// buffer ends within a block and before the queries do.
TEST(SelectedForward, KeysThatAreNotThereHaveNoWeight) {
  for (const auto& size : kSelectedSizes) {
    auto in = selected_input(size, Lists::causal, 3);
    in = with_keys(in, {(2 * size.tokens + 2) / 3, {0, -1}});
    for (auto& x : in.q) x = 20 + std::abs(x);
    for (auto& x : in.k) x = -20 - std::abs(x);
    const auto exact = reference::selected_attention(in);
    const auto mine = forward(in);
    expect_close(mine.o, exact.o, 1e-12, "o");
    expect_close(mine.lse, exact.lse, 1e-13, "lse");
  }
}

// Logits that overflow to −∞, a whole block of them before any other: weights of 0, as long as one logit is finite.
TEST(SelectedForward, LogitsOfMinusInfinity) {
  for (const auto& size : kSelectedSizes) {
    if (size.count < 2 || size.tokens <= size.block) continue;
    auto in = selected_input(size, Lists::causal, 3);
    for (auto& x : in.q) x = std::abs(x) + 1;
    for (std::int64_t b = 0; b < size.batch; ++b) {
      const std::int64_t row = size.kv_heads * size.depth;
      std::fill_n(in.k.begin() + b * size.tokens * row, size.block * row, -std::numeric_limits<double>::max());
    }
    const auto exact = reference::selected_attention(in);
    const auto mine = forward(in);
    int compared = 0;
    for (std::size_t i = 0; i < exact.o.size(); ++i) {
      if (std::isnan(exact.o[i])) continue;  // rows that see no other block
      ++compared;
      ASSERT_NEAR(mine.o[i], exact.o[i], 1e-13 * max_finite(in.v));
    }
    EXPECT_GT(compared, 0);
  }
}

TEST(SelectedForward, AnySplitOfTheKeysEqualsOneCall) {
  for (const auto& size : kHopSizes) {
    for (const auto& [lists, name] : kLists) {
      SCOPED_TRACE(name);
      const auto in = selected_input(size, lists, 4);
      const auto exact = reference::selected_attention(in);
      const auto in32 = convert<float>(in);
      const auto naive = reference::selected_attention(in32);
      for (const auto& hops : hops_of(size.tokens)) {
        SCOPED_TRACE(fmt::format("{} hops, the first at {} and {}", hops.size(), hops[0].begin[0], hops[0].begin[1]));
        BandState<double> state;
        BandState<float> state32;
        for (std::size_t i = 0; i < hops.size(); ++i) {
          run_forward(with_keys(in, hops[i]), state, i > 0);
          run_forward(with_keys(in32, hops[i]), state32, i > 0);
        }
        expect_close(state.o, exact.o, 1e-12, "o");
        expect_close(state.lse, exact.lse, 1e-12, "lse");
        const double roundings = std::sqrt(static_cast<double>(hops.size())) * std::numeric_limits<float>::epsilon();
        EXPECT_LE(max_error(state32.o, exact.o), 2 * max_error(naive.o, exact.o) + roundings * max_finite(exact.o));
        EXPECT_LE(max_error(state32.lse, exact.lse),
                  2 * max_error(naive.lse, exact.lse) + roundings * max_finite(exact.lse));
      }
    }
  }
}

// A hop of the ring with the queries of another rank: tokens are not row numbers, and most rows find nothing here.
TEST(SelectedForward, RowsWithNothingHereKeepTheirState) {
  for (const auto& size : kHopSizes) {
    const auto whole = selected_input(size, Lists::documents, 5);
    const std::int64_t chunk = size.tokens / 4;
    const auto in = with_keys(whole, {chunk, {chunk, 2 * chunk}});
    BandState<double> before{whole.q, {}}, first, after;
    for (std::int64_t i = 0; i < in.size.rows(); ++i) before.lse.push_back(i % 3 == 0 ? -kInfinity : 1.5);
    const auto exact = reference::selected_attention(in);
    std::vector<double> out;
    run_forward(in, first, false, &out);
    EXPECT_TRUE(same_bits(out, first.o));
    expect_close(first.o, exact.o, 1e-13, "o");  // 0 where nothing was seen
    expect_close(first.lse, exact.lse, 1e-13, "lse");
    after = before;
    run_forward(in, after, true, &out);
    EXPECT_TRUE(same_bits(out, after.o));
    int nothing = 0;
    const auto& z = in.size;
    for (std::int64_t row = 0; row < z.rows(); ++row) {  // [B, T, Hq]
      const std::int64_t b = row / z.query_heads / z.queries, t = row / z.query_heads % z.queries;
      const auto stat = static_cast<std::size_t>((b * z.query_heads + row % z.query_heads) * z.queries + t);
      if (exact.lse[stat] != -kInfinity) continue;
      ++nothing;
      ASSERT_EQ(after.lse[stat], before.lse[stat]);
      for (std::int64_t i = row * z.depth; i < (row + 1) * z.depth; ++i) {
        ASSERT_EQ(after.o[static_cast<std::size_t>(i)], before.o[static_cast<std::size_t>(i)]);
      }
    }
    EXPECT_GT(nothing, z.rows() / 4);
    EXPECT_LT(nothing, z.rows() * 9 / 10);
  }
}

TEST(SelectedForward, AllBlocksSelectedIsDenseAttention) {
  for (auto size : kSelectedSizes) {
    size.count = (size.tokens + size.block - 1) / size.block;
    auto in = selected_input(size, Lists::causal, 6);
    for (std::size_t i = 0; i < in.selected.size(); ++i) {
      in.selected[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % size.count);
    }
    BandInput<double> dense{in.size, in.scale, in.q, in.k, in.v, in.d_o, in.start, in.token};
    BandState<double> band;
    run_forward(dense, band, false);
    const auto mine = forward(in);
    expect_close(mine.o, band.o, 1e-13, "o");
    expect_close(mine.lse, band.lse, 1e-13, "lse");
  }
}

// Rows of K and V that no query sees, in selected blocks and beside them, hold NaN.
TEST(SelectedForward, UnseenKeysMayBeNaN) {
  for (const auto& [name, in, exact, naive] : selected_cases()) {
    SCOPED_TRACE(name);
    auto poisoned = in;
    const auto& z = in.size;
    for (std::int64_t row = 0; row < z.batch * z.keys * z.kv_heads; ++row) {
      const std::int64_t b = row / z.kv_heads / z.keys, s = row / z.kv_heads % z.keys;
      bool seen = false;
      for (std::int64_t t = 0; t < z.queries && !seen; ++t) seen = reference::sees(in, b, t, row % z.kv_heads, s);
      if (seen) continue;
      std::fill_n(poisoned.k.begin() + row * z.depth, z.depth, std::nan(""));
      std::fill_n(poisoned.v.begin() + row * z.depth, z.depth, std::nan(""));
    }
    const auto a = forward(in), b = forward(poisoned);
    EXPECT_TRUE(same_bits(a.o, b.o) && same_bits(a.lse, b.lse));
  }
}

// Not even NaN in a token's q, k and v.
TEST(SelectedForward, ATokenChangesNoRowBeforeIt) {
  for (const auto& size : kSelectedSizes) {
    if (size.batch > 1) continue;
    const auto in = convert<float>(selected_input(size, Lists::causal, 7));
    const auto before = forward(in);
    for (const std::int64_t token : {size.tokens / 3, size.tokens - 1}) {
      auto changed = in;
      const std::int64_t q_row = size.query_heads * size.depth, k_row = size.kv_heads * size.depth;
      std::fill_n(changed.q.begin() + token * q_row, q_row, std::nanf(""));
      std::fill_n(changed.k.begin() + token * k_row, k_row, std::nanf(""));
      std::fill_n(changed.v.begin() + token * k_row, k_row, std::nanf(""));
      const auto after = forward(changed);
      const auto rows = static_cast<std::size_t>(token * q_row);
      EXPECT_TRUE(
          same_bits(std::span<const float>(before.o.data(), rows), std::span<const float>(after.o.data(), rows)));
      EXPECT_TRUE(std::isnan(after.o[rows]));
    }
  }
}

TEST(SelectedForward, BitsDependOnNeitherThreadsNorBatch) {
  const SelectedSize size{
      .batch = 2, .tokens = 500, .query_heads = 6, .kv_heads = 2, .depth = 40, .block = 16, .count = 6};
  const auto in = convert<float>(selected_input(size, Lists::documents, 8));
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = forward(in);
  for (const int n : {2, 3}) {
    omp_set_num_threads(n);
    const auto more = forward(in);
    EXPECT_TRUE(same_bits(one.o, more.o) && same_bits(one.lse, more.lse)) << n << " threads";
  }
  omp_set_num_threads(threads);
  for (std::int64_t b = 0; b < size.batch; ++b) {
    auto single = in;
    single.size.batch = 1;
    const auto part = [&](auto& x) {
      const auto length = static_cast<std::ptrdiff_t>(x.size()) / size.batch;
      x = std::remove_reference_t<decltype(x)>(x.begin() + b * length, x.begin() + (b + 1) * length);
      return std::pair{b * length, length};
    };
    for (auto* x : {&single.q, &single.k, &single.v, &single.d_o}) part(*x);
    for (auto* x : {&single.selected, &single.token, &single.start}) part(*x);
    const auto alone = forward(single);
    auto together = one;
    part(together.o);
    part(together.lse);
    EXPECT_TRUE(same_bits(alone.o, together.o) && same_bits(alone.lse, together.lse)) << "sequence " << b;
  }
}

// Unaligned scratch would fault; too little would be found by the guards of the arena's end. Linear: twice the tokens
// take at most twice the memory.
TEST(SelectedForward, MemoryIsLinear) {
  const auto bytes = [](std::int64_t tokens) {
    const TensorView q{nullptr, DType::f32, DeviceKind::cpu, {1, tokens, 8, 64}};
    const TensorView k{nullptr, DType::f32, DeviceKind::cpu, {1, tokens, 1, 64}};
    const TensorView selected{nullptr, DType::i32, DeviceKind::cpu, {1, tokens, 1, 16}};
    return attention::cpu::workspace_bytes(attention::SelectedForward{.q = q,
                                                                      .k = k,
                                                                      .v = k,
                                                                      .selected = selected,
                                                                      .token = {},
                                                                      .start = {},
                                                                      .o = q,
                                                                      .lse = {},
                                                                      .has_state = false,
                                                                      .out = {},
                                                                      .select_block = 64,
                                                                      .keys = {tokens, {0, -1}}});
  };
  for (std::int64_t tokens = 1 << 13; tokens <= 1 << 20; tokens *= 2) {
    EXPECT_LE(bytes(2 * tokens), 2 * bytes(tokens) + 4096) << tokens;
    EXPECT_GT(bytes(tokens), 2 * tokens * 64 * 4) << "keys and values";
  }
}

}  // namespace
}  // namespace annulus::testing
