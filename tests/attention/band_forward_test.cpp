#include <omp.h>

#include <atomic>
#include <thread>

#include "attention/band_run.h"

namespace annulus::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool sees_nothing(const BandCase& band, std::size_t row) {
  return std::max(band.first[row], 0) > std::min<std::int64_t>(band.last[row], band.size.keys - 1);
}

TEST(BandForward, EqualsTheReference) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 1);
    const auto exact = reference::band_attention(in);
    BandState<double> state;
    run_forward(in, state, false);
    expect_close(state.o, exact.o, 1e-13, "o");
    expect_close(state.lse, exact.lse, 1e-13, "lse");

    const auto in32 = convert<float>(in);
    const auto naive = reference::band_attention(in32);
    BandState<float> state32;
    run_forward(in32, state32, false);
    expect_as_good(state32.o, naive.o, exact.o, "o");
    expect_as_good(state32.lse, naive.lse, exact.lse, "lse");
  }
}

TEST(BandForward, EmptyRowsAreZeroWithoutStateAndUntouchedWithIt) {
  int found = 0;
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 2);
    BandState<double> fresh, carried;
    run_forward(in, fresh, false);
    carried.o.assign(in.q.size(), 0.7);
    carried.lse.assign(fresh.lse.size(), 1.3);
    run_forward(in, carried, true);
    const auto& z = band.size;
    for (std::int64_t row = 0; row < z.bounds(); ++row) {
      if (!sees_nothing(band, static_cast<std::size_t>(row))) continue;
      ++found;
      for (std::int64_t h = 0; h < z.query_heads; ++h) {
        const auto stat = static_cast<std::size_t>((row / z.queries * z.query_heads + h) * z.queries + row % z.queries);
        ASSERT_EQ(fresh.lse[stat], -std::numeric_limits<double>::infinity());
        ASSERT_EQ(carried.lse[stat], 1.3);
        for (std::int64_t d = 0; d < z.depth; ++d) {
          const auto at = static_cast<std::size_t>((row * z.query_heads + h) * z.depth + d);
          ASSERT_EQ(fresh.o[at], 0);
          ASSERT_EQ(carried.o[at], 0.7);
        }
      }
    }
  }
  EXPECT_GT(found, 100);
}

TEST(BandForward, WritesTheFinishedOutputForEveryRow) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = convert<float>(random_input(band, 3));
    BandState<float> state, again;
    std::vector<float> out;
    run_forward(in, state, false, &out);
    EXPECT_TRUE(same_bits(out, state.o));
    again = state;
    run_forward(in, again, true, &out);
    EXPECT_TRUE(same_bits(out, again.o));
  }
}

// Keys that no row of their sequence and head sees may hold anything.
TEST(BandForward, NeverReadsKeysThatNobodySees) {
  int poisoned = 0;
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto clean = convert<float>(random_input(band, 4));
    auto dirty = clean;
    const auto& z = band.size;
    for (std::int64_t b = 0; b < z.batch; ++b) {
      for (std::int64_t s = 0; s < z.keys; ++s) {
        bool seen = false;
        for (std::int64_t t = 0; t < z.queries; ++t) {
          const auto row = static_cast<std::size_t>(b * z.queries + t);
          seen = seen || (band.first[row] <= s && s <= band.last[row]);
        }
        if (seen) continue;
        ++poisoned;
        const auto begin = (b * z.keys + s) * z.kv_heads * z.depth;
        for (std::int64_t i = begin; i < begin + z.kv_heads * z.depth; ++i) {
          dirty.k[static_cast<std::size_t>(i)] = dirty.v[static_cast<std::size_t>(i)] = static_cast<float>(kNaN);
        }
      }
    }
    const auto a = run_band(clean), b = run_band(dirty);
    for (const auto& tensor : kBandOutputs<float>) {
      EXPECT_TRUE(same_bits(a.*tensor.values, b.*tensor.values)) << tensor.name;
    }
  }
  EXPECT_GT(poisoned, 1000);
}

// A NaN that is seen must come out, so that training stops.
TEST(BandForward, SeenNaNsComeOut) {
  const BandCase band{"causal",
                      {.batch = 1, .queries = 3, .keys = 3, .query_heads = 1, .kv_heads = 1, .depth = 4},
                      {0, 0, 0},
                      {0, 1, 2}};
  for (const auto tensor : {&BandInput<double>::q, &BandInput<double>::k, &BandInput<double>::v}) {
    auto in = random_input(band, 5);
    (in.*tensor)[9] = kNaN;  // token 2
    BandState<double> state;
    run_forward(in, state, false);
    EXPECT_TRUE(std::isnan(state.o[9]));
  }
}

TEST(BandForward, CausalToTheLastBit) {
  BandCase band{
      "causal", {.batch = 1, .queries = 150, .keys = 150, .query_heads = 2, .kv_heads = 1, .depth = 24}, {}, {}};
  for (std::int32_t t = 0; t < 150; ++t) {
    band.first.push_back(0);
    band.last.push_back(t);
  }
  const auto in = convert<float>(random_input(band, 6));
  const auto row_size = static_cast<std::size_t>(2 * 24);
  BandState<float> before;
  run_forward(in, before, false);
  for (std::size_t t = 0; t < 150; ++t) {
    auto changed = in;
    for (std::size_t d = 0; d < 24; ++d) {
      changed.k[t * 24 + d] = 3 - changed.k[t * 24 + d];
      changed.v[t * 24 + d] = -1 - changed.v[t * 24 + d];
    }
    BandState<float> after;
    run_forward(changed, after, false);
    const std::span<const float> a(before.o), b(after.o);
    ASSERT_TRUE(same_bits(a.first(t * row_size), b.first(t * row_size))) << "token " << t;
    ASSERT_FALSE(same_bits(a.subspan(t * row_size, row_size), b.subspan(t * row_size, row_size))) << "token " << t;
  }
}

// Logits of the order of 1e4: weights are 0 and 1, or equal keys share. The error of a logit is its rounding.
TEST(BandForward, HugeLogits) {
  for (const auto& band : band_cases()) {
    SCOPED_TRACE(band.name);
    const auto in = random_input(band, 7, 1e4);
    const auto exact = reference::band_attention(in);
    BandState<double> state;
    run_forward(in, state, false);
    expect_close(state.lse, exact.lse, 1e-14, "lse");
    expect_close(state.o, exact.o, 1e-14 * max_finite(exact.lse), "o");

    const auto in32 = convert<float>(in);
    const auto naive = reference::band_attention(in32);
    const auto mine = run_band(in32);
    for (const auto& tensor : kBandOutputs<float>) {
      for (const float x : mine.*tensor.values) ASSERT_FALSE(std::isnan(x)) << tensor.name;
    }
    expect_as_good(mine.lse, naive.lse, exact.lse, "lse");
  }
}

std::atomic<int> polls;
std::thread::id main_thread;
std::atomic<bool> polled_elsewhere;

TEST(BandForward, PollsFromTheMainThread) {
  BandCase band{"full", {.batch = 1, .queries = 500, .keys = 500, .query_heads = 1, .kv_heads = 1, .depth = 8}, {}, {}};
  band.first.assign(500, 0);
  band.last.assign(500, 499);
  const auto in = convert<float>(random_input(band, 8));
  BandMemory<float> memory(in.size);
  const auto q = memory.queries(), k = memory.keys(), first = memory.bounds(), last = memory.bounds();
  const auto o = memory.queries(), lse = memory.statistics();
  memory.tensors().commit();
  memory.fill(q, in.q);
  memory.fill(k, in.k);
  memory.fill(first, in.first);
  memory.fill(last, in.last);
  main_thread = std::this_thread::get_id();
  memory.device().context().progress = [] {
    ++polls;
    if (std::this_thread::get_id() != main_thread) polled_elsewhere = true;
  };
  const int threads = omp_get_max_threads();
  omp_set_num_threads(2);
  memory.run([&](Context& ctx) {
    attention::band_forward(ctx, {.q = memory.view(q),
                                  .k = memory.view(k),
                                  .v = memory.view(k),
                                  .first = memory.view(first),
                                  .last = memory.view(last),
                                  .o = memory.view(o),
                                  .lse = memory.view(lse),
                                  .has_state = false,
                                  .out = {},
                                  .scale = in.scale});
  });
  omp_set_num_threads(threads);
  EXPECT_GT(polls, 0);
  EXPECT_FALSE(polled_elsewhere);
}

// A step of generation: threads share the keys.
TEST(BandForward, OneTokenHasTheSameBitsOnAnyNumberOfThreads) {
  BandCase band{
      "one token", {.batch = 1, .queries = 1, .keys = 5003, .query_heads = 4, .kv_heads = 1, .depth = 64}, {3}, {5002}};
  const auto in = convert<float>(random_input(band, 9));
  const int threads = omp_get_max_threads();
  BandState<float> one, three;
  omp_set_num_threads(1);
  run_forward(in, one, false);
  omp_set_num_threads(3);
  run_forward(in, three, false);
  omp_set_num_threads(threads);
  EXPECT_TRUE(same_bits(one.o, three.o));
  EXPECT_TRUE(same_bits(one.lse, three.lse));
}

TEST(BandForward, RefusesWhatItCannotCompute) {
  TestDevice device(DeviceKind::cpu);
  Context& ctx = device.context();
  ctx.planning = true;
  const auto view = [](DType dtype, const Shape& shape) { return TensorView{nullptr, dtype, DeviceKind::cpu, shape}; };
  attention::BandForward good{.q = view(DType::f32, {1, 5, 4, 8}),
                              .k = view(DType::f32, {1, 7, 2, 8}),
                              .v = view(DType::f32, {1, 7, 2, 8}),
                              .first = view(DType::i32, {1, 5}),
                              .last = view(DType::i32, {1, 5}),
                              .o = view(DType::f32, {1, 5, 4, 8}),
                              .lse = view(DType::f32, {1, 4, 5}),
                              .has_state = true,
                              .out = {},
                              .scale = 1};
  Arena scratch("scratch", DeviceKind::cpu);
  EXPECT_THROW(attention::band_forward(ctx, good), Error);  // no scratch arena
  ctx.scratch = &scratch;
  EXPECT_NO_THROW(attention::band_forward(ctx, good));
  EXPECT_GT(scratch.planned_bytes(), 0);
  const auto refused = [&](auto change) {
    auto bad = good;
    change(bad);
    EXPECT_THROW(attention::band_forward(ctx, bad), Error);
  };
  refused([&](auto& a) { a.q.dtype = a.k.dtype = a.v.dtype = DType::bf16; });
  refused([&](auto& a) { a.k.shape = a.v.shape = {1, 7, 3, 8}; });
  refused([&](auto& a) { a.v.shape = {1, 6, 2, 8}; });
  refused([&](auto& a) { a.lse.shape = {1, 5, 4}; });
  refused([&](auto& a) { a.last.shape = {1, 4}; });
  refused([&](auto& a) { a.first.dtype = DType::i64; });
  refused([&](auto& a) { a.out = view(DType::f64, {1, 5, 4, 8}); });
  refused([&](auto& a) { a.q.device = DeviceKind::cuda; });
  ctx.planning = false;
  refused([](auto&) {});  // no memory
}

}  // namespace
}  // namespace annulus::testing
