// band_backward on the GPU against naive code in fp64: every kind of band, key buffers one after the other as in the
// ring, odd sizes. What no query sees, and rows that see nothing, hold NaN; tensors lie between guard bytes.
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
  std::vector<std::int64_t> cuts;  // key buffers: [0, cuts[0]), [cuts[0], cuts[1]), …
  std::int64_t shift = 0;          // elements by which every tensor is off its alignment
  double tilt = 0;                 // added to k and taken from q: logits around −tilt² · √D
};

void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

std::vector<double> draw(std::int64_t n, DType dtype, const char* stream) {
  const CounterRng rng(9, stream);
  std::vector<double> out(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto x = static_cast<float>(rng.normal(i));
    out[i] = dtype == DType::bf16 ? to_float(to_bfloat16(x)) : x;
  }
  return out;
}

template <class R>
reference::BandOutput<R> naive(const reference::BandInput<double>& in) {
  const auto as_real = [](const std::vector<double>& x) { return std::vector<R>(x.begin(), x.end()); };
  return reference::band_attention<R>(
      {in.size, in.scale, as_real(in.q), as_real(in.k), as_real(in.v), as_real(in.d_o), in.first, in.last});
}

struct Gradients {
  std::vector<float> d_q, d_k, d_v;  // d_k and d_v of the whole sequence of keys
  bool operator==(const Gradients&) const = default;
};

class Backward {
 public:
  explicit Backward(const Case& c) : c_(c), s_(c.shape) {
    BandLimits limits = make_limits(c.kind, s_);
    in_ = {s_,
           1 / std::sqrt(static_cast<double>(s_.depth)),
           draw(s_.q_numel(), c.dtype, "q"),
           draw(s_.k_numel(), c.dtype, "k"),
           draw(s_.k_numel(), c.dtype, "v"),
           draw(s_.q_numel(), c.dtype, "d_o"),
           std::move(limits.first),
           std::move(limits.last)};
    for (double& x : in_.q) x = static_cast<float>(x - c.tilt);
    for (double& x : in_.k) x = static_cast<float>(x + c.tilt);
    truth_ = naive<double>(in_);
    lay_out();
  }

  const reference::BandInput<double>& input() const { return in_; }
  const reference::BandOutput<double>& truth() const { return truth_; }

  // Gradients that start at `start`, after all key buffers.
  Gradients run(float start) {
    fill(start);
    tensors_.upload();
    for (const Hop& hop : hops_) {
      attention::band_backward(device_.context(), {.q = tensors_.view(q_),
                                                   .k = tensors_.view(hop.k),
                                                   .v = tensors_.view(hop.v),
                                                   .first = tensors_.view(hop.first),
                                                   .last = tensors_.view(hop.last),
                                                   .d_o = tensors_.view(d_o_),
                                                   .lse = tensors_.view(lse_),
                                                   .delta = tensors_.view(delta_),
                                                   .d_q = tensors_.view(d_q_),
                                                   .d_k = tensors_.view(hop.d_k),
                                                   .d_v = tensors_.view(hop.d_v),
                                                   .scale = in_.scale});
    }
    tensors_.download();
    EXPECT_EQ(tensors_.check_guards(), "");
    Gradients out{values(d_q_), std::vector<float>(in_.k.size()), std::vector<float>(in_.k.size())};
    std::int64_t begin = 0;
    for (std::size_t h = 0; h < hops_.size(); begin = c_.cuts[h], ++h) {
      put_back(values(hops_[h].d_k), begin, c_.cuts[h], out.d_k);
      put_back(values(hops_[h].d_v), begin, c_.cuts[h], out.d_v);
    }
    return out;
  }

 private:
  struct Hop {
    std::size_t k, v, first, last, d_k, d_v;
  };

  void lay_out() {
    const Shape q{s_.batch, s_.queries, s_.query_heads, s_.depth}, rows{s_.batch, s_.queries};
    const Shape statistics{s_.batch, s_.query_heads, s_.queries};
    q_ = tensors_.add(c_.dtype, q, c_.shift);
    d_o_ = tensors_.add(c_.dtype, q, c_.shift);
    lse_ = tensors_.add(DType::f32, statistics, c_.shift);
    delta_ = tensors_.add(DType::f32, statistics, c_.shift);
    d_q_ = tensors_.add(DType::f32, q, c_.shift);
    std::int64_t begin = 0;
    for (const std::int64_t end : c_.cuts) {
      const Shape kv{s_.batch, end - begin, s_.kv_heads, s_.depth};
      Hop hop{};
      hop.k = tensors_.add(c_.dtype, kv, c_.shift);
      hop.v = tensors_.add(c_.dtype, kv, c_.shift);
      hop.first = tensors_.add(DType::i32, rows, c_.shift);
      hop.last = tensors_.add(DType::i32, rows, c_.shift);
      hop.d_k = tensors_.add(DType::f32, kv, c_.shift);
      hop.d_v = tensors_.add(DType::f32, kv, c_.shift);
      hops_.push_back(hop);
      begin = end;
    }
    tensors_.commit();
  }

  void fill(float start) {
    for (std::size_t row = 0; row < in_.first.size(); ++row) {
      const auto queries = static_cast<std::size_t>(s_.queries), heads = static_cast<std::size_t>(s_.query_heads),
                 width = heads * static_cast<std::size_t>(s_.depth);
      if (in_.first[row] > in_.last[row]) continue;  // a row that sees nothing in any buffer stays NaN
      for (std::size_t i = row * width; i < (row + 1) * width; ++i) {
        put(q_, c_.dtype, i, in_.q[i]);
        put(d_o_, c_.dtype, i, in_.d_o[i]);
      }
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t at = (row / queries * heads + h) * queries + row % queries;
        put(lse_, DType::f32, at, truth_.lse[at]);
        put(delta_, DType::f32, at, truth_.delta[at]);
      }
    }
    fill_with(d_q_, start);
    std::int64_t begin = 0;
    for (std::size_t h = 0; h < hops_.size(); begin = c_.cuts[h], ++h) fill_hop(hops_[h], begin, c_.cuts[h], start);
  }

  void fill_hop(const Hop& hop, std::int64_t begin, std::int64_t end, float start) {
    const BandLimits within = limits_within({in_.first, in_.last}, begin, end);
    std::memcpy(tensors_.host(hop.first), within.first.data(), within.first.size() * 4);
    std::memcpy(tensors_.host(hop.last), within.last.data(), within.last.size() * 4);
    std::vector<bool> seen(static_cast<std::size_t>(s_.batch * (end - begin)), false);
    for (std::size_t r = 0; r < within.first.size(); ++r) {
      const std::int64_t sequence = static_cast<std::int64_t>(r) / s_.queries * (end - begin);
      for (std::int64_t j = within.first[r]; j <= within.last[r]; ++j)
        seen[static_cast<std::size_t>(sequence + j)] = true;
    }
    const auto k = keys_within(in_.k, s_, begin, end), v = keys_within(in_.v, s_, begin, end);
    for (std::size_t i = 0; i < k.size(); ++i) {
      if (!seen[i / static_cast<std::size_t>(s_.kv_heads * s_.depth)]) continue;  // what nobody sees stays NaN
      put(hop.k, c_.dtype, i, k[i]);
      put(hop.v, c_.dtype, i, v[i]);
    }
    fill_with(hop.d_k, start);
    fill_with(hop.d_v, start);
  }

  void put(std::size_t tensor, DType dtype, std::size_t at, double value) {
    std::byte* to = tensors_.host(tensor) + at * size_of(dtype);
    const auto x = static_cast<float>(value);
    const BFloat16 rounded = to_bfloat16(x);
    if (dtype == DType::bf16) std::memcpy(to, &rounded, 2);
    else std::memcpy(to, &x, 4);
  }
  void fill_with(std::size_t tensor, float value) {
    const auto n = static_cast<std::size_t>(tensors_.view(tensor).numel());
    for (std::size_t i = 0; i < n; ++i) put(tensor, DType::f32, i, value);
  }
  std::vector<float> values(std::size_t tensor) {
    std::vector<float> out(static_cast<std::size_t>(tensors_.view(tensor).numel()));
    std::memcpy(out.data(), tensors_.host(tensor), out.size() * 4);
    return out;
  }
  void put_back(const std::vector<float>& part, std::int64_t begin, std::int64_t end, std::vector<float>& whole) {
    const auto width = s_.kv_heads * s_.depth, count = (end - begin) * width;
    for (std::int64_t b = 0; b < s_.batch; ++b) {
      std::copy_n(part.begin() + b * count, count, whole.begin() + (b * s_.keys + begin) * width);
    }
  }

  Case c_;
  BandSize s_;
  reference::BandInput<double> in_;
  reference::BandOutput<double> truth_;
  TestDevice device_{DeviceKind::cuda};
  GuardedTensors tensors_{device_};
  std::size_t q_ = 0, d_o_ = 0, lse_ = 0, delta_ = 0, d_q_ = 0;
  std::vector<Hop> hops_;
};

// What cancels in d_s = p · (d_p − delta), most of all where a row sees one key: two sums of D products. Their rounding
// is an error even where the naive order of sums cancels exactly.
double cancellation(const reference::BandInput<double>& in) {
  return std::sqrt(static_cast<double>(in.size.depth)) * in.scale * max_magnitude(in.d_o) * max_magnitude(in.v) *
         std::max(max_magnitude(in.q), max_magnitude(in.k));
}

// At most twice the naive fp32 error, and the roundings of lse and delta, which come in as fp32, and of the result.
void expect_near_truth(const Backward& run, const Gradients& ours) {
  const auto plain = naive<float>(run.input());
  const auto& truth = run.truth();
  const auto near = [](const std::vector<float>& mine, const std::vector<float>& other,
                       const std::vector<double>& exact, double magnitude, const char* name) {
    const double naive_error = max_error(other, exact);
    EXPECT_LE(max_error(mine, exact), 2 * naive_error + 3 * kEps * std::max(max_magnitude(exact), magnitude))
        << name << ", naive " << naive_error;
  };
  const double cancels = cancellation(run.input());
  near(ours.d_q, plain.d_q, truth.d_q, cancels, "d_q");
  near(ours.d_k, plain.d_k, truth.d_k, cancels, "d_k");
  near(ours.d_v, plain.d_v, truth.d_v, 0, "d_v");
}

// batch, tokens, keys, query heads, KV heads, head dim
const Case kCases[] = {
    {"one_by_one", {1, 1, 1, 1, 1, 1}, BandKind::causal, DType::f32, {1}},
    {"causal_odd", {2, 37, 37, 4, 2, 7}, BandKind::causal, DType::f32, {37}},
    {"causal_64", {1, 150, 150, 2, 1, 64}, BandKind::causal, DType::bf16, {150}},
    {"causal_128_mqa", {1, 165, 165, 4, 1, 128}, BandKind::causal, DType::bf16, {165}},
    {"full_tiles_128", {1, 128, 128, 2, 2, 128}, BandKind::full, DType::f32, {128}},
    {"full_96_mha", {2, 33, 45, 3, 3, 96}, BandKind::full, DType::f32, {45}},
    {"full_255", {1, 9, 40, 2, 2, 255}, BandKind::full, DType::bf16, {40}},
    {"full_256_hops", {1, 70, 96, 2, 1, 256}, BandKind::full, DType::bf16, {64, 96}},
    {"window_256", {1, 50, 83, 2, 1, 256}, BandKind::window, DType::f32, {83}},
    {"window_hops", {2, 150, 183, 2, 1, 33}, BandKind::window, DType::f32, {10, 144, 183}},
    {"documents_hops", {2, 170, 170, 4, 2, 32}, BandKind::documents, DType::bf16, {35, 64, 170}},
    {"causal_hops_129", {1, 40, 40, 2, 1, 129}, BandKind::causal, DType::f32, {1, 20, 40}},
    {"compressed", {2, 290, 71, 4, 1, 64}, BandKind::compressed, DType::f32, {71}},
    {"compressed_hops", {1, 90, 21, 2, 2, 16}, BandKind::compressed, DType::bf16, {6, 21}},
    {"empty", {2, 11, 13, 2, 1, 24}, BandKind::empty, DType::bf16, {13}},
    {"empty_hops", {1, 11, 13, 2, 1, 24}, BandKind::empty, DType::f32, {5, 13}},
    {"stairs", {2, 181, 177, 2, 1, 48}, BandKind::stairs, DType::f32, {177}},
    {"stairs_hops", {2, 81, 77, 2, 1, 48}, BandKind::stairs, DType::bf16, {31, 32, 77}},
    {"group_of_8", {1, 50, 50, 16, 2, 20}, BandKind::causal, DType::f32, {50}},
    {"misaligned", {1, 40, 40, 2, 1, 64}, BandKind::causal, DType::bf16, {40}, 3},
    {"misaligned_hops", {1, 40, 40, 2, 1, 32}, BandKind::documents, DType::f32, {17, 40}, 1},
};

class BandBackwardCuda : public ::testing::TestWithParam<Case> {};

TEST_P(BandBackwardCuda, IsNearTheTruth) {
  Backward band(GetParam());
  const Gradients ours = band.run(0);
  expect_near_truth(band, ours);
  EXPECT_TRUE(band.run(0) == ours) << "other bits the second time";
}

TEST_P(BandBackwardCuda, AddsToWhatIsThere) {
  Backward band(GetParam());
  const Gradients once = band.run(0), added = band.run(0.5f);
  const auto additions = static_cast<double>(GetParam().cuts.size());
  const auto compare = [&](const std::vector<float>& x, const std::vector<float>& y, const char* name) {
    double largest = 0.5;
    for (const float value : x) largest = std::max(largest, std::abs(static_cast<double>(value)) + 0.5);
    for (std::size_t i = 0; i < x.size(); ++i) {
      // A rounding of each addition in both sums; exact where nothing is added.
      const double allowed = x[i] == 0 ? 0 : 2 * (additions + 1) * kEps * largest;
      ASSERT_LE(std::abs(y[i] - (x[i] + 0.5)), allowed) << name << " " << i;
    }
  };
  compare(once.d_q, added.d_q, "d_q");
  compare(once.d_k, added.d_k, "d_k");
  compare(once.d_v, added.d_v, "d_v");
}

INSTANTIATE_TEST_SUITE_P(Cases, BandBackwardCuda, ::testing::ValuesIn(kCases),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(BandBackwardCudaOnce, LongCausalSequence) {
  Backward band({"long", {1, 700, 700, 2, 1, 128}, BandKind::causal, DType::bf16, {300, 700}});
  expect_near_truth(band, band.run(0));
}

// exp(−lse) overflows: rows beyond a tile's end must not come in, not even as zeros.
TEST(BandBackwardCudaOnce, VeryNegativeLogits) {
  Backward band({"negative", {1, 70, 45, 2, 1, 64}, BandKind::full, DType::f32, {45}, 0, 4});
  const auto& in = band.input();
  const auto& truth = band.truth();
  const Gradients ours = band.run(0);
  // The exponent's rounding, a sum of D products of the size of lse, in every p; those of a key add up to T / S.
  const double lse = max_magnitude(truth.lse), p = kEps * std::sqrt(64.0) * lse * 70 / 45;
  EXPECT_GT(lse, 89);
  EXPECT_LE(max_error(ours.d_v, truth.d_v), p * max_magnitude(in.d_o));
  const double d_s = p * in.scale * std::sqrt(64.0) * max_magnitude(in.d_o) * max_magnitude(in.v);
  EXPECT_LE(max_error(ours.d_q, truth.d_q), d_s * max_magnitude(in.k));
  EXPECT_LE(max_error(ours.d_k, truth.d_k), d_s * max_magnitude(in.q));
}

void expect_refused(DType dtype, std::int64_t depth, const char* word) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  const auto x = tensors.add(dtype, {1, 1, 1, depth}), gradient = tensors.add(stat_type(dtype), {1, 1, 1, depth}),
             lse = tensors.add(stat_type(dtype), {1, 1, 1}), bounds = tensors.add(DType::i32, {1, 1});
  tensors.commit();
  const TensorView t = tensors.view(x), g = tensors.view(gradient), rows = tensors.view(bounds),
                   statistic = tensors.view(lse);
  try {
    attention::band_backward(device.context(), {.q = t,
                                                .k = t,
                                                .v = t,
                                                .first = rows,
                                                .last = rows,
                                                .d_o = t,
                                                .lse = statistic,
                                                .delta = statistic,
                                                .d_q = g,
                                                .d_k = g,
                                                .d_v = g});
    FAIL() << "was taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("band_backward"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST(BandBackwardCudaOnce, RefusesFp64ByName) { expect_refused(DType::f64, 8, "float64"); }
TEST(BandBackwardCudaOnce, RefusesWideHeadsByName) { expect_refused(DType::bf16, 257, "257"); }

}  // namespace
}  // namespace annulus::testing
