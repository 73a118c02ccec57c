#include "attention/cpu/band_one_token.h"

#include <omp.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "attention/cpu/strip.h"

namespace annulus::attention::cpu {
namespace {

constexpr std::int64_t kRangeKeys = 512;  // keys that are a part of the sums: fixed, so that threads change no bits
constexpr std::int64_t kTile = 32;        // keys whose scores are kept

constexpr int kTogether = 4;  // keys, or vectors of columns, whose sums stay in registers

// Scores of `count` rows of k, kTogether or less; a row's arithmetic does not depend on the others.
template <class T>
void dot_rows(const T* q, const T* k, std::int64_t stride, std::int64_t depth, std::int64_t count, T scale, T* scores) {
  constexpr int kWidth = kLanes<T>;
  alignas(64) T sum[kTogether][kWidth] = {};
  const T* rows[kTogether];
  for (int r = 0; r < kTogether; ++r) rows[r] = k + std::min<std::int64_t>(r, count - 1) * stride;
  std::int64_t d = 0;
  for (; d + kWidth <= depth; d += kWidth) {
    for (int r = 0; r < kTogether; ++r) {
#pragma omp simd
      for (int x = 0; x < kWidth; ++x) sum[r][x] += q[d + x] * rows[r][d + x];
    }
  }
  for (int x = 0; d < depth; ++d, ++x) {
    for (int r = 0; r < kTogether; ++r) sum[r][x] += q[d] * rows[r][d];
  }
  for (std::int64_t r = 0; r < count; ++r) {
    T total = 0;
    for (int x = 0; x < kWidth; ++x) total += sum[r][x];
    scores[r] = total * scale;
  }
}

// o = o · factor + Σ_j weights[j] · (row j of v).
template <class T>
void add_rows(const T* weights, const T* v, std::int64_t stride, std::int64_t depth, std::int64_t count, T factor,
              T* o) {
  constexpr std::int64_t kColumns = kTogether * kLanes<T>;
  std::int64_t d = 0;
  for (; d + kColumns <= depth; d += kColumns) {
    alignas(64) T sum[kColumns];
#pragma omp simd
    for (int x = 0; x < kColumns; ++x) sum[x] = o[d + x] * factor;
    for (std::int64_t j = 0; j < count; ++j) {
      const T weight = weights[j];
      const T* row = v + j * stride + d;
#pragma omp simd
      for (int x = 0; x < kColumns; ++x) sum[x] += weight * row[x];
    }
    std::copy_n(sum, kColumns, o + d);
  }
  for (; d < depth; ++d) {
    T sum = o[d] * factor;
    for (std::int64_t j = 0; j < count; ++j) sum += weights[j] * v[j * stride + d];
    o[d] = sum;
  }
}

template <class T>
class OneToken {
 public:
  OneToken(const Context& ctx, const BandForward& args, T* memory)
      : ctx_(ctx), shape_(args.q, args.k), args_(args), scale_(static_cast<T>(args.scale)), memory_(memory) {}

  static std::int64_t num_ranges(const BandShape& shape) { return (shape.keys + kRangeKeys - 1) / kRangeKeys; }
  static std::int64_t part_size(const BandShape& shape) { return shape.depth + 2; }
  static std::int64_t workspace_size(const BandShape& shape) {
    return shape.batch * num_ranges(shape) * shape.query_heads * part_size(shape) +
           threads_of(shape) * shape.query_heads * kTile;
  }

  void run() const {
    const std::int64_t ranges = num_ranges(shape_), units = shape_.batch * ranges;
    std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads_of(shape_))
    {
      T* scores = part(units) + omp_get_thread_num() * shape_.query_heads * kTile;
      for (std::int64_t unit = next++; unit < units; unit = next++) attend(unit / ranges, unit % ranges, scores);
    }
    for (std::int64_t batch = 0; batch < shape_.batch; ++batch) {
      for (std::int64_t head = 0; head < shape_.query_heads; ++head) merge(batch, head);
    }
  }

 private:
  // Of a range of keys, head after head: the greatest score, the sum of the weights, o that is not normalised.
  T* part(std::int64_t unit) const { return memory_ + unit * shape_.query_heads * part_size(shape_); }

  void attend(std::int64_t batch, std::int64_t range, T* scores) const {
    const KeyRange all =
        visible_keys(args_.first.as<std::int32_t>(), args_.last.as<std::int32_t>(), batch, shape_.keys);
    const KeyRange keys{std::max(all.begin, range * kRangeKeys), std::min(all.end, (range + 1) * kRangeKeys)};
    T* parts = part(batch * num_ranges(shape_) + range);
    for (std::int64_t head = 0; head < shape_.query_heads; ++head) {
      T* own = parts + head * part_size(shape_);
      own[0] = -std::numeric_limits<T>::infinity();
      std::fill_n(own + 1, part_size(shape_) - 1, T(0));
    }
    const bool main_thread = omp_get_thread_num() == 0;
    for (std::int64_t key = keys.begin; key < keys.end; key += kTile) {
      tile(batch, {key, std::min(key + kTile, keys.end)}, parts, scores);
      if (main_thread) ctx_.poll();
    }
  }

  // Rows of k and v are read once, for all heads.
  void tile(std::int64_t batch, const KeyRange& keys, T* parts, T* scores) const {
    const std::int64_t depth = shape_.depth, row = shape_.kv_stride();
    const T* q = args_.q.as<T>() + batch * shape_.query_heads * depth;
    const T *k = args_.k.as<T>() + batch * shape_.keys * row, *v = args_.v.as<T>() + batch * shape_.keys * row;
    const std::int64_t count = keys.end - keys.begin;
    for (std::int64_t head = 0; head < shape_.query_heads; ++head) {
      const std::int64_t offset = keys.begin * row + head / shape_.group * depth;
      T *part = parts + head * part_size(shape_), *own = scores + head * kTile;
      for (std::int64_t j = 0; j < count; j += kTogether) {
        dot_rows(q + head * depth, k + offset + j * row, row, depth, std::min<std::int64_t>(kTogether, count - j),
                 scale_, own + j);
      }
      const T factor = soften(part, own, count);
      add_rows(own, v + offset, row, depth, count, factor, part + 2);
    }
  }

  // Scores become weights of the maximum so far; returns what the sums before shrink by.
  static T soften(T* part, T* scores, std::int64_t count) {
    T maximum = part[0];
    for (std::int64_t j = 0; j < count; ++j) maximum = std::max(maximum, scores[j]);
    const T shift = maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
    const T factor = exp_of(part[0] - shift);
    T sum = part[1] * factor;
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) scores[j] = exp_of(scores[j] - shift);
    for (std::int64_t j = 0; j < count; ++j) sum += scores[j];
    part[0] = maximum;
    part[1] = sum;
    return factor;
  }

  // The ranges' parts, in order.
  void merge(std::int64_t batch, std::int64_t head) const {
    const std::int64_t ranges = num_ranges(shape_), at = batch * shape_.query_heads + head;
    const auto of = [&](std::int64_t range) { return part(batch * ranges + range) + head * part_size(shape_); };
    double maximum = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t r = 0; r < ranges; ++r) maximum = std::max(maximum, static_cast<double>(of(r)[0]));
    T* o = args_.o.as<T>() + at * shape_.depth;
    T& lse = args_.lse.as<T>()[at];
    std::fill_n(o, shape_.depth, T(0));
    lse = -std::numeric_limits<T>::infinity();
    if (maximum > -std::numeric_limits<double>::infinity()) {
      for (std::int64_t r = 0; r < ranges; ++r) sum += of(r)[1] * std::exp(of(r)[0] - maximum);
      for (std::int64_t r = 0; r < ranges; ++r) {
        const T weight = static_cast<T>(std::exp(of(r)[0] - maximum) / sum);
        for (std::int64_t d = 0; d < shape_.depth; ++d) o[d] += weight * of(r)[2 + d];
      }
      lse = static_cast<T>(maximum + std::log(sum));
    }
    if (args_.out.data && args_.out.data != args_.o.data) {
      std::copy_n(o, shape_.depth, args_.out.as<T>() + at * shape_.depth);
    }
  }

  const Context& ctx_;
  BandShape shape_;
  const BandForward& args_;
  T scale_;
  T* memory_;
};

}  // namespace

bool is_one_token(const BandForward& args) {
  constexpr std::int64_t kMostGroup = 4;  // more heads fill the lanes of a strip well enough
  return args.q.dim(1) == 1 && !args.has_state && args.q.dim(2) <= kMostGroup * args.k.dim(2);
}

std::int64_t one_token_bytes(const BandForward& args) {
  const BandShape shape(args.q, args.k);
  return args.q.dtype == DType::f64 ? OneToken<double>::workspace_size(shape) * 8
                                    : OneToken<float>::workspace_size(shape) * 4;
}

void one_token_forward(Context& ctx, const BandForward& args, void* workspace) {
  if (args.q.dtype == DType::f64) OneToken<double>(ctx, args, static_cast<double*>(workspace)).run();
  else OneToken<float>(ctx, args, static_cast<float*>(workspace)).run();
}

}  // namespace annulus::attention::cpu
