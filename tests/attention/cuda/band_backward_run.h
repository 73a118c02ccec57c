// One run of band_backward on the GPU over key buffers, and its comparison with naive code in fp64. What no query sees,
// and rows that see nothing, hold NaN; tensors lie between guard bytes.
#pragma once

#include "attention/band.h"
#include "attention/cuda/band_case.h"

namespace annulus::testing {

// Gradients from zero; in double the truth, in float the naive implementation, with weights and their gradients rounded
// where tensor cores need it.
template <class R>
reference::BandOutput<R> naive_gradients(const reference::BandInput<double>& in, Weights weights = Weights::exact) {
  const auto as_real = [](const std::vector<double>& x) { return std::vector<R>(x.begin(), x.end()); };
  const reference::BandInput<R> real{in.size,       in.scale,        as_real(in.q), as_real(in.k),
                                     as_real(in.v), as_real(in.d_o), in.first,      in.last};
  auto out = reference::band_attention<R>(real);
  if (weights == Weights::bf16) round_gradients(real, out);
  return out;
}

struct Gradients {
  std::vector<float> d_q, d_k, d_v;  // d_k and d_v of the whole sequence of keys
  bool operator==(const Gradients&) const = default;
};

class BandGradients {
 public:
  explicit BandGradients(const Case& c) : c_(c), s_(c.shape) {
    BandLimits limits = make_limits(c.kind, s_);
    in_ = {s_,
           c.sharpness / std::sqrt(static_cast<double>(s_.depth)),
           draw(s_.q_numel(), c.dtype, "q"),
           draw(s_.k_numel(), c.dtype, "k"),
           draw(s_.k_numel(), c.dtype, "v"),
           draw(s_.q_numel(), c.dtype, "d_o"),
           std::move(limits.first),
           std::move(limits.last)};
    for (double& x : in_.q) x = static_cast<float>(x - c.tilt);
    for (double& x : in_.k) x = static_cast<float>(x + c.tilt);
    truth_ = naive_gradients<double>(in_);
    lay_out();
  }

  const reference::BandInput<double>& input() const { return in_; }
  const reference::BandOutput<double>& truth() const { return truth_; }

  Weights weights() const { return c_.shift == 0 ? weights_on_gpu(c_.dtype, s_.depth) : Weights::exact; }

  // Gradients that start at `start`, after all key buffers.
  Gradients run(float start, bool ordered = true) {
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
                                                   .scale = in_.scale,
                                                   .ordered = ordered});
    }
    tensors_.download();
    EXPECT_EQ(tensors_.check_guards(), "");
    Gradients out{values<float>(tensors_, d_q_), std::vector<float>(in_.k.size()), std::vector<float>(in_.k.size())};
    std::int64_t begin = 0;
    for (std::size_t h = 0; h < hops_.size(); begin = c_.cuts[h], ++h) {
      put_back(values<float>(tensors_, hops_[h].d_k), begin, c_.cuts[h], out.d_k);
      put_back(values<float>(tensors_, hops_[h].d_v), begin, c_.cuts[h], out.d_v);
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
        const auto at = static_cast<std::int64_t>(i);
        put(tensors_.host(q_), c_.dtype, at, in_.q[i]);
        put(tensors_.host(d_o_), c_.dtype, at, in_.d_o[i]);
      }
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t at = (row / queries * heads + h) * queries + row % queries;
        put(tensors_.host(lse_), DType::f32, static_cast<std::int64_t>(at), truth_.lse[at]);
        put(tensors_.host(delta_), DType::f32, static_cast<std::int64_t>(at), truth_.delta[at]);
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
      put(tensors_.host(hop.k), c_.dtype, static_cast<std::int64_t>(i), k[i]);
      put(tensors_.host(hop.v), c_.dtype, static_cast<std::int64_t>(i), v[i]);
    }
    fill_with(hop.d_k, start);
    fill_with(hop.d_v, start);
  }

  void fill_with(std::size_t tensor, float value) {
    const std::int64_t n = tensors_.view(tensor).numel();
    for (std::int64_t i = 0; i < n; ++i) put(tensors_.host(tensor), DType::f32, i, value);
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
inline double cancellation(const reference::BandInput<double>& in) {
  return std::sqrt(static_cast<double>(in.size.depth)) * in.scale * max_magnitude(in.d_o) * max_magnitude(in.v) *
         std::max(max_magnitude(in.q), max_magnitude(in.k));
}

// At most twice the naive fp32 error, and the roundings of lse and delta, which come in as fp32, and of the result.
inline void expect_near_truth(const BandGradients& run, const Gradients& ours) {
  const auto plain = naive_gradients<float>(run.input(), run.weights());
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

}  // namespace annulus::testing
