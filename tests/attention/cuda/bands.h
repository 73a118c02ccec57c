// The kinds of bands that occur, and the naive reference over several key buffers: one after the other, with the merge
// of Ring Attention (arXiv 2310.01889) between them. In double it is the truth, in float the naive implementation whose
// error bounds ours; Weights::bf16 rounds what multiplies v, as tensor cores need it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "reference/attention.h"

namespace annulus::testing {

using reference::BandSize;

struct BandLimits {  // [B, T], rows of the whole key sequence
  std::vector<std::int32_t> first, last;
};

enum class BandKind { full, causal, window, documents, compressed, empty, stairs, long_documents, gaps };

inline BandLimits make_limits(BandKind kind, const BandSize& s) {
  BandLimits out;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    std::int64_t stair_first = 0, stair_last = -1;
    for (std::int64_t t = 0; t < s.queries; ++t) {
      const std::int64_t self = t + s.keys - s.queries;  // the last query is the last key
      std::int64_t first = 0, last = self;
      switch (kind) {
        case BandKind::full:
          last = s.keys - 1;
          break;
        case BandKind::causal:
          break;
        case BandKind::window:
          first = std::max<std::int64_t>(0, self - 20 - b);
          break;
        case BandKind::documents:
          first = std::max<std::int64_t>(0, self / (17 + b) * (17 + b));
          break;
        case BandKind::compressed: {  // blocks of 8 tokens every 4: the first queries see none
          const std::int64_t x = t - 7;
          last = (x >= 0 ? x : x - 3) / 4;
          first = t / 40 * 3;
          break;
        }
        case BandKind::empty:
          first = s.keys, last = -1;
          break;
        case BandKind::long_documents:
          first = self / (290 + b) * (290 + b);
          break;
        case BandKind::gaps: {  // of every nine keys four are seen, two by one row and two by another; a third row sees
                                // none
          const std::int64_t step = t % 3;
          first = std::min(t / 3 * 9 + (step == 0 ? 0 : 2), s.keys);
          last = t / 3 * 9 + (step == 2 ? 3 : 1);
          break;
        }
        case BandKind::stairs:  // steps of uneven size, rows without keys between them
          if (t % 5 == 3) stair_first = std::min(stair_first + (t % 3) * 4, s.keys);
          if (t % 7 == 2) stair_last = std::min(stair_last + (t % 4) * 6 + b, s.keys - 1);
          first = stair_first, last = stair_last;
          break;
      }
      out.first.push_back(static_cast<std::int32_t>(first));
      out.last.push_back(static_cast<std::int32_t>(std::min(last, s.keys - 1)));
    }
  }
  return out;
}

// The limits as rows of a buffer of keys [begin, end).
inline BandLimits limits_within(const BandLimits& limits, std::int64_t begin, std::int64_t end) {
  BandLimits out;
  const auto before = [&](std::int64_t key) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(key - begin, 0, end - begin));
  };
  for (const std::int32_t f : limits.first) out.first.push_back(before(f));
  for (const std::int32_t l : limits.last) out.last.push_back(before(std::int64_t{l} + 1) - 1);
  return out;
}

// Keys [begin, end) of every sequence of k or v.
template <class T>
std::vector<T> keys_within(const std::vector<T>& x, const BandSize& s, std::int64_t begin, std::int64_t end) {
  std::vector<T> out;
  const std::int64_t width = s.kv_heads * s.depth;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    out.insert(out.end(), x.begin() + (b * s.keys + begin) * width, x.begin() + (b * s.keys + end) * width);
  }
  return out;
}

template <class R>
struct BandState {
  std::vector<R> o, lse;
};

enum class Weights { exact, bf16 };

// What the kernels of cuda/sm90 need for aligned tensors of this kind; others compute in fp32 throughout.
inline Weights weights_on_gpu(DType dtype, std::int64_t depth) {
  return dtype == DType::bf16 && (depth == 64 || depth == 128) ? Weights::bf16 : Weights::exact;
}

// reference::band_attention's o and lse with exp(scale · q·k − max) rounded to bf16 where it multiplies v.
template <class R>
BandState<R> rounded_band(const reference::BandInput<R>& in) {
  const BandSize& s = in.size;
  const auto width = static_cast<std::size_t>(s.depth);
  BandState<R> out{std::vector<R>(in.q.size(), R(0)),
                   std::vector<R>(static_cast<std::size_t>(s.rows()), -std::numeric_limits<R>::infinity())};
  for (std::int64_t row = 0; row < s.rows(); ++row) {  // of [B, Hq, T]
    const std::int64_t t = row % s.queries, h = row / s.queries % s.query_heads, b = row / s.queries / s.query_heads;
    const auto bound = static_cast<std::size_t>(b * s.queries + t);
    const std::int64_t first = in.first[bound], last = in.last[bound];
    if (first > last) continue;
    const std::size_t at = static_cast<std::size_t>((b * s.queries + t) * s.query_heads + h) * width;
    const auto row_of = [&](const std::vector<R>& x, std::int64_t key) {
      return &x[static_cast<std::size_t>((b * s.keys + key) * s.kv_heads + h / (s.query_heads / s.kv_heads)) * width];
    };
    std::vector<R> scores;
    for (std::int64_t key = first; key <= last; ++key) {
      R dot = 0;
      for (std::size_t c = 0; c < width; ++c) dot += in.q[at + c] * row_of(in.k, key)[c];
      scores.push_back(static_cast<R>(in.scale) * dot);
    }
    const R top = *std::max_element(scores.begin(), scores.end());
    R sum = 0;
    for (std::int64_t key = first; key <= last; ++key) {
      const R weight = std::exp(scores[static_cast<std::size_t>(key - first)] - top);
      sum += weight;
      const R rounded = static_cast<R>(to_float(to_bfloat16(static_cast<float>(weight))));
      for (std::size_t c = 0; c < width; ++c) out.o[at + c] += rounded * row_of(in.v, key)[c];
    }
    for (std::size_t c = 0; c < width; ++c) out.o[at + c] /= sum;
    out.lse[static_cast<std::size_t>(row)] = top + std::log(sum);
  }
  return out;
}

// The gradients anew, with weights and gradients of scores rounded to bf16 where they multiply rows; lse and delta
// stay.
template <class R>
void round_gradients(const reference::BandInput<R>& in, reference::BandOutput<R>& out) {
  const BandSize& s = in.size;
  const auto rounded = [](R x) { return static_cast<R>(to_float(to_bfloat16(static_cast<float>(x)))); };
  for (auto* gradient : {&out.d_q, &out.d_k, &out.d_v}) std::fill(gradient->begin(), gradient->end(), R(0));
  for (std::int64_t row = 0; row < s.rows(); ++row) {  // of [B, Hq, T]
    const std::int64_t t = row % s.queries, h = row / s.queries % s.query_heads, b = row / s.queries / s.query_heads;
    const auto bound = static_cast<std::size_t>(b * s.queries + t);
    const auto q =
        static_cast<std::size_t>((b * s.queries + t) * s.query_heads + h) * static_cast<std::size_t>(s.depth);
    for (std::int64_t key = in.first[bound]; key <= in.last[bound]; ++key) {
      const auto k =
          static_cast<std::size_t>(((b * s.keys + key) * s.kv_heads + h / (s.query_heads / s.kv_heads)) * s.depth);
      R score = 0, d_weight = 0;
      for (std::size_t c = 0; c < static_cast<std::size_t>(s.depth); ++c) {
        score += in.q[q + c] * in.k[k + c];
        d_weight += in.d_o[q + c] * in.v[k + c];
      }
      const R scale = static_cast<R>(in.scale),
              weight = std::exp(scale * score - out.lse[static_cast<std::size_t>(row)]);
      const R d_score = rounded(scale * weight * (d_weight - out.delta[static_cast<std::size_t>(row)]));
      for (std::size_t c = 0; c < static_cast<std::size_t>(s.depth); ++c) {
        out.d_q[q + c] += d_score * in.k[k + c];
        out.d_k[k + c] += d_score * in.q[q + c];
        out.d_v[k + c] += rounded(weight) * in.d_o[q + c];
      }
    }
  }
}

// Key buffers [0, cuts[0]), [cuts[0], cuts[1]), …; the last cut is s.keys.
template <class R>
BandState<R> naive_band(const BandSize& s, const BandLimits& limits, const std::vector<double>& q,
                        const std::vector<double>& k, const std::vector<double>& v, double scale,
                        const std::vector<std::int64_t>& cuts, Weights weights = Weights::exact) {
  const auto as_real = [](const std::vector<double>& x) { return std::vector<R>(x.begin(), x.end()); };
  BandState<R> state;
  std::int64_t begin = 0;
  for (const std::int64_t end : cuts) {
    reference::BandInput<R> in;
    in.size = s;
    in.size.keys = end - begin;
    in.scale = scale;
    in.q = as_real(q);
    in.k = as_real(keys_within(k, s, begin, end));
    in.v = as_real(keys_within(v, s, begin, end));
    in.d_o.assign(in.q.size(), R(0));
    BandLimits within = limits_within(limits, begin, end);
    in.first = std::move(within.first);
    in.last = std::move(within.last);
    begin = end;
    BandState<R> part;
    if (weights == Weights::bf16) {
      part = rounded_band(in);
    } else {
      auto whole = reference::band_attention(in);
      part = {std::move(whole.o), std::move(whole.lse)};
    }
    if (state.o.empty()) {
      state = std::move(part);
      continue;
    }
    for (std::size_t i = 0; i < state.lse.size(); ++i) {
      const R top = std::max(state.lse[i], part.lse[i]);
      if (std::isinf(top)) continue;
      const R old_weight = std::exp(state.lse[i] - top), weight = std::exp(part.lse[i] - top),
              sum = old_weight + weight;
      const auto tokens = static_cast<std::size_t>(s.queries), heads = static_cast<std::size_t>(s.query_heads);
      const std::size_t t = i % tokens, h = i / tokens % heads, b = i / tokens / heads;  // lse is [B, Hq, T]
      for (std::size_t c = 0; c < static_cast<std::size_t>(s.depth); ++c) {
        const std::size_t at = ((b * tokens + t) * heads + h) * static_cast<std::size_t>(s.depth) + c;
        state.o[at] = (state.o[at] * old_weight + part.o[at] * weight) / sum;
      }
      state.lse[i] = top + std::log(sum);
    }
  }
  return state;
}

// max |ours − truth| over what is finite in the truth; infinity where ours is not, or another infinity.
template <class Ours>
double max_error(const std::vector<Ours>& ours, const std::vector<double>& truth) {
  double worst = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const auto x = static_cast<double>(ours[i]);
    const bool same_kind = std::isfinite(truth[i]) ? std::isfinite(x) : x == truth[i];
    if (!same_kind) return std::numeric_limits<double>::infinity();
    if (std::isfinite(x)) worst = std::max(worst, std::abs(x - truth[i]));
  }
  return worst;
}

inline double max_magnitude(const std::vector<double>& x) {
  double worst = 0;
  for (const double v : x) worst = std::isfinite(v) ? std::max(worst, std::abs(v)) : worst;
  return worst;
}

}  // namespace annulus::testing
