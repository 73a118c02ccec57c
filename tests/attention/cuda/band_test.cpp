// band_forward, band_bounds and band_delta on the GPU against naive code in fp64: every kind of band, carried state,
// odd sizes. Outputs and what no query sees hold NaN beforehand, tensors lie between guard bytes.
#include <gtest/gtest.h>

#include <cstring>

#include "attention/band.h"
#include "attention/cuda/bands.h"
#include "core/rng.h"
#include "support/device.h"
#include "support/require_gpu.h"

namespace annulus::testing {
namespace {

constexpr double kEps = 0x1p-24;  // half a unit in the last place of fp32, relative

struct Case {
  const char* name;
  BandSize shape;
  BandKind kind;
  DType dtype;
  std::vector<std::int64_t> cuts;  // key buffers, as in naive_band
  std::int64_t shift = 0;          // elements by which every tensor is off its alignment
};

void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

std::vector<double> draw(std::int64_t n, DType dtype, const char* stream) {
  const CounterRng rng(7, stream);
  std::vector<double> out(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto x = static_cast<float>(rng.normal(i));
    out[i] = dtype == DType::bf16 ? to_float(to_bfloat16(x)) : x;
  }
  return out;
}

void put(std::byte* to, DType dtype, std::int64_t at, double value) {
  if (dtype == DType::bf16) {
    const BFloat16 x = to_bfloat16(static_cast<float>(value));
    std::memcpy(to + at * 2, &x, 2);
  } else {
    const auto x = static_cast<float>(value);
    std::memcpy(to + at * 4, &x, 4);
  }
}

template <class T>
std::vector<T> values(GuardedTensors& tensors, std::size_t index) {
  std::vector<T> out(static_cast<std::size_t>(tensors.view(index).numel()));
  std::memcpy(out.data(), tensors.host(index), out.size() * sizeof(T));
  return out;
}

struct Hop {
  std::size_t k, v, first, last;
  std::vector<bool> empty;  // [B, T]: the row sees nothing here
};

class Band {
 public:
  Band(const Case& c, bool with_out)
      : c_(c),
        s_(c.shape),
        with_out_(with_out),
        scale_(1 / std::sqrt(static_cast<double>(s_.depth))),
        limits_(make_limits(c.kind, s_)),
        q_(draw(s_.q_numel(), c.dtype, "q")),
        k_(draw(s_.k_numel(), c.dtype, "k")),
        v_(draw(s_.k_numel(), c.dtype, "v")) {
    lay_out();
    fill();
    tensors_.upload();
  }

  void run() {
    Context& ctx = device_.context();
    for (std::size_t h = 0; h < hops_.size(); ++h) {
      const bool last = h + 1 == hops_.size();
      const TensorView out = with_out_ && last ? tensors_.view(out_) : TensorView{};
      attention::band_forward(ctx, {.q = tensors_.view(q_index_),
                                    .k = tensors_.view(hops_[h].k),
                                    .v = tensors_.view(hops_[h].v),
                                    .first = tensors_.view(hops_[h].first),
                                    .last = tensors_.view(hops_[h].last),
                                    .o = tensors_.view(o_),
                                    .lse = tensors_.view(lse_),
                                    .has_state = h > 0,
                                    .out = out,
                                    .scale = scale_});
      const auto before_o = o(), before_lse = lse();
      tensors_.download();
      EXPECT_EQ(tensors_.check_guards(), "");
      if (h > 0) expect_untouched(hops_[h], before_o, before_lse);
    }
  }

  void expect_near_truth() {
    const auto truth = naive_band<double>(s_, limits_, q_, k_, v_, scale_, c_.cuts);
    const auto naive = naive_band<float>(s_, limits_, q_, k_, v_, scale_, c_.cuts);
    const double naive_o = max_error(naive.o, truth.o), naive_lse = max_error(naive.lse, truth.lse);
    EXPECT_LE(max_error(o(), truth.o), 2 * naive_o + kEps * max_magnitude(truth.o)) << "naive " << naive_o;
    EXPECT_LE(max_error(lse(), truth.lse), 2 * naive_lse + kEps * max_magnitude(truth.lse)) << "naive " << naive_lse;
    if (!with_out_) return;
    const auto state = o();
    for (std::size_t i = 0; i < state.size(); ++i) {
      if (c_.dtype == DType::bf16) {
        BFloat16 x;
        std::memcpy(&x, tensors_.host(out_) + i * 2, 2);
        ASSERT_EQ(x.bits, to_bfloat16(state[i]).bits) << "out is not the rounded state at " << i;
      } else {
        float x;
        std::memcpy(&x, tensors_.host(out_) + i * 4, 4);
        ASSERT_EQ(x, state[i]) << "out is not the state at " << i;
      }
    }
  }

  std::vector<float> o() { return values<float>(tensors_, o_); }
  std::vector<float> lse() { return values<float>(tensors_, lse_); }

 private:
  void lay_out() {
    const Shape q{s_.batch, s_.queries, s_.query_heads, s_.depth}, rows{s_.batch, s_.queries};
    q_index_ = tensors_.add(c_.dtype, q, c_.shift);
    std::int64_t begin = 0;
    for (const std::int64_t end : c_.cuts) {
      const Shape kv{s_.batch, end - begin, s_.kv_heads, s_.depth};
      Hop hop{};
      hop.k = tensors_.add(c_.dtype, kv, c_.shift);
      hop.v = tensors_.add(c_.dtype, kv, c_.shift);
      hop.first = tensors_.add(DType::i32, rows, c_.shift);
      hop.last = tensors_.add(DType::i32, rows, c_.shift);
      hops_.push_back(hop);
      begin = end;
    }
    o_ = tensors_.add(DType::f32, q, c_.shift);
    lse_ = tensors_.add(DType::f32, {s_.batch, s_.query_heads, s_.queries}, c_.shift);
    // Where the types agree the finished output is the state itself.
    out_ = with_out_ && c_.dtype != DType::f32 ? tensors_.add(c_.dtype, q, c_.shift) : o_;
    tensors_.commit();
  }

  void fill() {
    for (std::int64_t i = 0; i < s_.q_numel(); ++i)
      put(tensors_.host(q_index_), c_.dtype, i, q_[static_cast<std::size_t>(i)]);
    std::int64_t begin = 0;
    for (std::size_t h = 0; h < hops_.size(); begin = c_.cuts[h], ++h) fill_hop(hops_[h], begin, c_.cuts[h] - begin);
  }

  void fill_hop(Hop& hop, std::int64_t begin, std::int64_t count) {
    const BandLimits within = limits_within(limits_, begin, begin + count);
    std::memcpy(tensors_.host(hop.first), within.first.data(), within.first.size() * 4);
    std::memcpy(tensors_.host(hop.last), within.last.data(), within.last.size() * 4);
    std::vector<bool> seen(static_cast<std::size_t>(s_.batch * count), false);
    for (std::size_t r = 0; r < within.first.size(); ++r) {
      hop.empty.push_back(within.first[r] > within.last[r]);
      const std::int64_t sequence = static_cast<std::int64_t>(r) / s_.queries * count;
      for (std::int64_t j = within.first[r]; j <= within.last[r]; ++j)
        seen[static_cast<std::size_t>(sequence + j)] = true;
    }
    const auto k = keys_within(k_, s_, begin, begin + count), v = keys_within(v_, s_, begin, begin + count);
    for (std::size_t i = 0; i < k.size(); ++i) {
      if (!seen[i / static_cast<std::size_t>(s_.kv_heads * s_.depth)]) continue;  // what nobody sees stays NaN
      put(tensors_.host(hop.k), c_.dtype, static_cast<std::int64_t>(i), k[i]);
      put(tensors_.host(hop.v), c_.dtype, static_cast<std::int64_t>(i), v[i]);
    }
  }

  void expect_untouched(const Hop& hop, const std::vector<float>& before_o, const std::vector<float>& before_lse) {
    const auto after_o = o(), after_lse = lse();
    const auto width = static_cast<std::size_t>(s_.query_heads * s_.depth);
    for (std::size_t r = 0; r < hop.empty.size(); ++r) {
      if (!hop.empty[r]) continue;
      ASSERT_EQ(std::memcmp(&before_o[r * width], &after_o[r * width], width * 4), 0) << "row " << r;
      const auto tokens = static_cast<std::size_t>(s_.queries), heads = static_cast<std::size_t>(s_.query_heads);
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t at = (r / tokens * heads + h) * tokens + r % tokens;
        ASSERT_EQ(before_lse[at], after_lse[at]) << "row " << r;
      }
    }
  }

  Case c_;
  BandSize s_;
  bool with_out_;
  double scale_;
  BandLimits limits_;
  std::vector<double> q_, k_, v_;
  TestDevice device_{DeviceKind::cuda};
  GuardedTensors tensors_{device_};
  std::size_t q_index_ = 0, o_ = 0, lse_ = 0, out_ = 0;
  std::vector<Hop> hops_;
};

// batch, tokens, keys, query heads, KV heads, head dim
const Case kCases[] = {
    {"one_by_one", {1, 1, 1, 1, 1, 1}, BandKind::causal, DType::f32, {1}},
    {"causal_odd", {2, 37, 37, 4, 2, 7}, BandKind::causal, DType::f32, {37}},
    {"causal_64", {1, 70, 70, 2, 1, 64}, BandKind::causal, DType::bf16, {70}},
    {"causal_128_mqa", {1, 65, 65, 4, 1, 128}, BandKind::causal, DType::bf16, {65}},
    {"full_96_mha", {2, 33, 45, 3, 3, 96}, BandKind::full, DType::f32, {45}},
    {"full_255", {1, 9, 40, 2, 2, 255}, BandKind::full, DType::bf16, {40}},
    {"window_256", {1, 50, 83, 2, 1, 256}, BandKind::window, DType::f32, {83}},
    {"window_hops", {2, 50, 83, 2, 1, 33}, BandKind::window, DType::f32, {10, 44, 83}},
    {"documents_hops", {2, 70, 70, 4, 2, 32}, BandKind::documents, DType::bf16, {35, 64, 70}},
    {"causal_hops_129", {1, 40, 40, 2, 1, 129}, BandKind::causal, DType::f32, {1, 20, 40}},
    {"compressed", {2, 90, 21, 4, 1, 64}, BandKind::compressed, DType::f32, {21}},
    {"compressed_hops", {1, 90, 21, 2, 2, 16}, BandKind::compressed, DType::bf16, {6, 21}},
    {"empty", {2, 11, 13, 2, 1, 24}, BandKind::empty, DType::bf16, {13}},
    {"empty_hops", {1, 11, 13, 2, 1, 24}, BandKind::empty, DType::f32, {5, 13}},
    {"stairs", {2, 81, 77, 2, 1, 48}, BandKind::stairs, DType::f32, {77}},
    {"stairs_hops", {2, 81, 77, 2, 1, 48}, BandKind::stairs, DType::bf16, {31, 32, 77}},
    {"misaligned", {1, 40, 40, 2, 1, 64}, BandKind::causal, DType::bf16, {40}, 3},
    {"misaligned_hops", {1, 40, 40, 2, 1, 32}, BandKind::documents, DType::f32, {17, 40}, 1},
};

class BandCuda : public ::testing::TestWithParam<Case> {};

TEST_P(BandCuda, IsNearTheTruth) {
  Band band(GetParam(), true);
  band.run();
  band.expect_near_truth();
}

TEST_P(BandCuda, WithoutOutTheStateIsTheSame) {
  Band with(GetParam(), true), without(GetParam(), false);
  with.run();
  without.run();
  const auto a = with.o(), b = without.o();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);  // and the same bits again
  const auto x = with.lse(), y = without.lse();
  EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, BandCuda, ::testing::ValuesIn(kCases),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(BandCudaOnce, LongCausalSequence) {
  Band band({"long", {1, 700, 700, 2, 1, 128}, BandKind::causal, DType::bf16, {300, 700}}, true);
  band.run();
  band.expect_near_truth();
}

TEST(BandCudaOnce, RefusesFp64ByName) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  const auto x = tensors.add(DType::f64, {1, 1, 1, 8}), lse = tensors.add(DType::f64, {1, 1, 1});
  const auto bounds = tensors.add(DType::i32, {1, 1});
  tensors.commit();
  const TensorView t = tensors.view(x), rows = tensors.view(bounds);
  try {
    attention::band_forward(
        device.context(),
        {.q = t, .k = t, .v = t, .first = rows, .last = rows, .o = t, .lse = tensors.view(lse), .out = {}});
    FAIL() << "fp64 was taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("band_forward"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("float64"), std::string::npos) << e.what();
  }
}

TEST(BandCudaOnce, BoundsCountRowsOfBothChunks) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  constexpr std::int64_t kTokens = 300, kChunk = 13;
  const Shape shape{2, kTokens};
  const auto global_first = tensors.add(DType::i32, shape), global_last = tensors.add(DType::i32, shape);
  const auto first = tensors.add(DType::i32, shape), last = tensors.add(DType::i32, shape);
  tensors.commit();
  const auto global = [](std::int64_t i, bool is_last) {
    return static_cast<std::int32_t>(is_last ? i % kTokens : i % kTokens / 3 - 1);
  };
  for (std::int64_t i = 0; i < 2 * kTokens; ++i) {
    const std::int32_t a = global(i, false), b = global(i, true);
    std::memcpy(tensors.host(global_first) + 4 * i, &a, 4);
    std::memcpy(tensors.host(global_last) + 4 * i, &b, 4);
  }
  for (const std::int64_t second : {std::int64_t{150}, std::int64_t{-1}}) {
    const std::int64_t begins[2] = {26, second};
    tensors.upload();
    attention::band_bounds(device.context(), {.global_first = tensors.view(global_first),
                                              .global_last = tensors.view(global_last),
                                              .first = tensors.view(first),
                                              .last = tensors.view(last),
                                              .chunk = kChunk,
                                              .chunk_begin = {begins[0], begins[1]}});
    tensors.download();
    EXPECT_EQ(tensors.check_guards(), "");
    const auto rows_before = [&](std::int64_t token) {  // counted, not computed
      std::int32_t rows = 0;
      for (const std::int64_t begin : begins) {
        for (std::int64_t s = begin; begin >= 0 && s < begin + kChunk; ++s) rows += s < token;
      }
      return rows;
    };
    const auto got_first = values<std::int32_t>(tensors, first), got_last = values<std::int32_t>(tensors, last);
    for (std::int64_t i = 0; i < 2 * kTokens; ++i) {
      ASSERT_EQ(got_first[static_cast<std::size_t>(i)], rows_before(global(i, false))) << i;
      ASSERT_EQ(got_last[static_cast<std::size_t>(i)], rows_before(global(i, true) + 1) - 1) << i;
    }
  }
}

void check_delta(DType dtype, DType o_dtype) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  constexpr std::int64_t kBatch = 2, kTokens = 19, kHeads = 3, kDim = 71;
  const auto d_o = tensors.add(dtype, {kBatch, kTokens, kHeads, kDim}, 1),
             o = tensors.add(o_dtype, {kBatch, kTokens, kHeads, kDim}, 1);
  const auto delta = tensors.add(DType::f32, {kBatch, kHeads, kTokens});
  tensors.commit();
  const std::int64_t n = kBatch * kTokens * kHeads * kDim;
  const auto x = draw(n, dtype, "d_o"), y = draw(n, o_dtype, "o");
  for (std::int64_t i = 0; i < n; ++i) {
    put(tensors.host(d_o), dtype, i, x[static_cast<std::size_t>(i)]);
    put(tensors.host(o), o_dtype, i, y[static_cast<std::size_t>(i)]);
  }
  tensors.upload();
  attention::band_delta(device.context(),
                        {.d_o = tensors.view(d_o), .o = tensors.view(o), .delta = tensors.view(delta)});
  tensors.download();
  EXPECT_EQ(tensors.check_guards(), "");
  const auto got = values<float>(tensors, delta);
  for (std::int64_t row = 0; row < kBatch * kTokens; ++row) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      double sum = 0, magnitude = 0;
      for (std::int64_t c = 0; c < kDim; ++c) {
        const auto at = static_cast<std::size_t>((row * kHeads + h) * kDim + c);
        sum += x[at] * y[at];
        magnitude += std::abs(x[at] * y[at]);
      }
      const auto at = static_cast<std::size_t>((row / kTokens * kHeads + h) * kTokens + row % kTokens);
      ASSERT_LE(std::abs(got[at] - sum), kEps * kDim * magnitude) << row << " " << h;  // of a sum in any order
    }
  }
}

TEST(BandCudaOnce, Delta) {
  check_delta(DType::f32, DType::f32);
  check_delta(DType::bf16, DType::bf16);
  check_delta(DType::bf16, DType::f32);
}

}  // namespace
}  // namespace annulus::testing
