#include "reference/selected.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace annulus::reference {
namespace {

template <class Real>
class Selected {
 public:
  explicit Selected(const SelectedInput<Real>& in) : in_(in), size_(in.size) {
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
  Real dot(const Real* a, const Real* b) const {
    Real sum = 0;
    for (std::int64_t d = 0; d < size_.depth; ++d) sum += a[d] * b[d];
    return sum;
  }

  void row(std::int64_t b, std::int64_t t, std::int64_t h) {
    const std::int64_t kv_head = h / (size_.query_heads / size_.kv_heads);
    std::vector<std::int64_t> keys;  // offsets of the rows of K and V that this row sees
    for (std::int64_t s = 0; s < size_.keys; ++s) {
      if (sees(in_, b, t, kv_head, s)) keys.push_back(((b * size_.keys + s) * size_.kv_heads + kv_head) * size_.depth);
    }
    if (keys.empty()) return;
    const std::int64_t offset = ((b * size_.queries + t) * size_.query_heads + h) * size_.depth;
    const auto stat = static_cast<std::size_t>((b * size_.query_heads + h) * size_.queries + t);
    const Real *q = in_.q.data() + offset, *d_o = in_.d_o.data() + offset;
    Real *o = out_.o.data() + offset, *d_q = out_.d_q.data() + offset;
    const auto scale = static_cast<Real>(in_.scale);

    std::vector<Real> score;
    Real sum = 0;
    for (const std::int64_t key : keys) score.push_back(scale * dot(q, in_.k.data() + key));
    const Real maximum = *std::max_element(score.begin(), score.end());
    for (const Real x : score) sum += std::exp(x - maximum);
    const Real lse = out_.lse[stat] = maximum + std::log(sum);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Real weight = std::exp(score[i] - maximum) / sum;
      for (std::int64_t d = 0; d < size_.depth; ++d) o[d] += weight * in_.v[static_cast<std::size_t>(keys[i] + d)];
    }

    // Backward knows the row by its log-sum-exp, as the operation does.
    const Real delta = out_.delta[stat] = dot(d_o, o);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Real weight = std::exp(score[i] - lse);
      const Real d_s = weight * (dot(d_o, in_.v.data() + keys[i]) - delta) * scale;
      const Real* k = in_.k.data() + keys[i];
      Real *d_k = out_.d_k.data() + keys[i], *d_v = out_.d_v.data() + keys[i];
      for (std::int64_t d = 0; d < size_.depth; ++d) {
        d_q[d] += d_s * k[d];
        d_k[d] += d_s * q[d];
        d_v[d] += weight * d_o[d];
      }
    }
  }

  const SelectedInput<Real>& in_;
  const BandSize& size_;
  BandOutput<Real> out_;
};

}  // namespace

std::int64_t token_of(const attention::KeyChunks& chunks, std::int64_t s) {
  return s < chunks.chunk ? chunks.begin[0] + s : chunks.begin[1] + s - chunks.chunk;
}

template <class Real>
bool sees(const SelectedInput<Real>& in, std::int64_t batch, std::int64_t t, std::int64_t kv_head, std::int64_t s) {
  const std::int64_t row = batch * in.size.queries + t, token = token_of(in.chunks, s);
  if (token < in.start[static_cast<std::size_t>(row)] || token > in.token[static_cast<std::size_t>(row)]) return false;
  const auto list = in.selected.begin() + (row * in.size.kv_heads + kv_head) * in.count;
  return std::find(list, list + in.count, token / in.block) != list + in.count;
}

template <class Real>
BandOutput<Real> selected_attention(const SelectedInput<Real>& in) {
  return Selected<Real>(in).run();
}

template BandOutput<float> selected_attention(const SelectedInput<float>&);
template BandOutput<double> selected_attention(const SelectedInput<double>&);
template bool sees(const SelectedInput<float>&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template bool sees(const SelectedInput<double>&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);

}  // namespace annulus::reference
