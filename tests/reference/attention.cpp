#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace annulus::reference {
namespace {

template <class Real>
class Band {
 public:
  explicit Band(const BandInput<Real>& in) : in_(in), size_(in.size) {
    out_.o.assign(static_cast<std::size_t>(size_.q_numel()), 0);
    out_.d_q = out_.o;
    out_.d_k.assign(static_cast<std::size_t>(size_.k_numel()), 0);
    out_.d_v = out_.d_k;
    out_.lse.assign(static_cast<std::size_t>(size_.rows()), -std::numeric_limits<Real>::infinity());
    out_.delta.assign(static_cast<std::size_t>(size_.rows()), 0);
  }

  BandOutput<Real> run() {
    for (std::int64_t b = 0; b < size_.batch; ++b) {
      for (std::int64_t t = 0; t < size_.queries; ++t) {
        for (std::int64_t h = 0; h < size_.query_heads; ++h) row(b, t, h);
      }
    }
    return out_;
  }

 private:
  const Real* key(const std::vector<Real>& x, std::int64_t b, std::int64_t s, std::int64_t h) const {
    return x.data() + key_offset(b, s, h);
  }
  std::int64_t key_offset(std::int64_t b, std::int64_t s, std::int64_t h) const {
    return ((b * size_.keys + s) * size_.kv_heads + h / (size_.query_heads / size_.kv_heads)) * size_.depth;
  }
  Real dot(const Real* a, const Real* b) const {
    Real sum = 0;
    for (std::int64_t d = 0; d < size_.depth; ++d) sum += a[d] * b[d];
    return sum;
  }

  void row(std::int64_t b, std::int64_t t, std::int64_t h) {
    const auto bound = static_cast<std::size_t>(b * size_.queries + t);
    const std::int64_t begin = std::max<std::int64_t>(in_.first[bound], 0);
    const std::int64_t end = std::min<std::int64_t>(std::int64_t{in_.last[bound]} + 1, size_.keys);
    if (begin >= end) return;
    const std::int64_t offset = ((b * size_.queries + t) * size_.query_heads + h) * size_.depth;
    const auto stat = static_cast<std::size_t>((b * size_.query_heads + h) * size_.queries + t);
    const Real *q = in_.q.data() + offset, *d_o = in_.d_o.data() + offset;
    Real *o = out_.o.data() + offset, *d_q = out_.d_q.data() + offset;
    const auto scale = static_cast<Real>(in_.scale);

    std::vector<Real> score(static_cast<std::size_t>(end - begin));
    Real maximum = -std::numeric_limits<Real>::infinity(), sum = 0;
    for (std::int64_t s = begin; s < end; ++s) {
      score[static_cast<std::size_t>(s - begin)] = scale * dot(q, key(in_.k, b, s, h));
      maximum = std::max(maximum, score[static_cast<std::size_t>(s - begin)]);
    }
    for (const Real x : score) sum += std::exp(x - maximum);
    const Real lse = out_.lse[stat] = maximum + std::log(sum);
    for (std::int64_t s = begin; s < end; ++s) {
      const Real weight = std::exp(score[static_cast<std::size_t>(s - begin)] - maximum) / sum;
      const Real* v = key(in_.v, b, s, h);
      for (std::int64_t d = 0; d < size_.depth; ++d) o[d] += weight * v[d];
    }

    // Backward knows the row by its log-sum-exp, as the operation does.
    const Real delta = out_.delta[stat] = dot(d_o, o);
    for (std::int64_t s = begin; s < end; ++s) {
      const Real weight = std::exp(score[static_cast<std::size_t>(s - begin)] - lse);
      const Real d_s = weight * (dot(d_o, key(in_.v, b, s, h)) - delta) * scale;
      const Real* k = key(in_.k, b, s, h);
      Real *d_k = out_.d_k.data() + key_offset(b, s, h), *d_v = out_.d_v.data() + key_offset(b, s, h);
      for (std::int64_t d = 0; d < size_.depth; ++d) {
        d_q[d] += d_s * k[d];
        d_k[d] += d_s * q[d];
        d_v[d] += weight * d_o[d];
      }
    }
  }

  const BandInput<Real>& in_;
  const BandSize& size_;
  BandOutput<Real> out_;
};

}  // namespace

template <class Real>
BandOutput<Real> band_attention(const BandInput<Real>& in) {
  return Band<Real>(in).run();
}

template BandOutput<float> band_attention(const BandInput<float>&);
template BandOutput<double> band_attention(const BandInput<double>&);

}  // namespace annulus::reference
