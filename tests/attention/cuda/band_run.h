// One run of band_forward on the GPU over key buffers, and its comparison with naive code in fp64. Outputs and what no
// query sees hold NaN beforehand, tensors lie between guard bytes.
#pragma once

#include "attention/band.h"
#include "attention/cuda/band_case.h"

namespace annulus::testing {

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
        scale_(c.sharpness / std::sqrt(static_cast<double>(s_.depth))),
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
    const auto naive = naive_band<float>(s_, limits_, q_, k_, v_, scale_, c_.cuts, weights());
    const double naive_o = max_error(naive.o, truth.o), naive_lse = max_error(naive.lse, truth.lse);
    EXPECT_LE(max_error(o(), truth.o), 2 * naive_o + kEps * max_magnitude(truth.o)) << "naive " << naive_o;
    // Weights by ex2.approx, 2 units in the last place (PTX ISA), move a logarithm of their sum by as much.
    const double exp2 = weights() == Weights::bf16 ? 4 * kEps : 0;
    EXPECT_LE(max_error(lse(), truth.lse), 2 * naive_lse + kEps * max_magnitude(truth.lse) + exp2)
        << "naive " << naive_lse;
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
  Weights weights() const { return c_.shift == 0 ? weights_on_gpu(c_.dtype, s_.depth) : Weights::exact; }

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

}  // namespace annulus::testing
