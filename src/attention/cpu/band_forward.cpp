// Banded attention forward on the CPU: FlashAttention-2's online softmax over strips of query rows (strip.h). A hop is
// computed on its own and merged with the carried state once, in double, so that the error of the state does not grow
// with the number of hops beyond one rounding of (o, lse) each.
#include <omp.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "attention/band_workspace.h"
#include "attention/cpu/band_one_token.h"
#include "attention/cpu/strip.h"

namespace annulus::attention::cpu {
namespace {

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
struct ForwardStrip : Strip<T> {
  alignas(64) T maximum[kStripWidth<T>];  // of the scores q · k so far, −∞ where there was none
  alignas(64) T shift[kStripWidth<T>];    // maximum · scale, rounded; 0 where there was none
  alignas(64) T sum[kStripWidth<T>];      // of exp(score · scale − shift)
  T* q;                                   // [D][width], transposed
  T* o;                                   // [D][width], not normalised

  // ln of the sum of exp(scale · q · k) of a row that saw a key.
  double log_sum_exp(std::int64_t x) const { return shift[x] + std::log(static_cast<double>(sum[x])); }
};

// Elements of T a thread needs: q and o of every strip, a tile of scores, and a tile of keys and values.
template <class T>
std::int64_t workspace_size(const BandShape& shape) {
  return kStripWidth<T> * (2 * shape.depth * kMaxBlockStrips + kTileKeys) + KeyTile<T>::size(shape);
}

// Scores that a row must not see become −∞.
template <class T, int N>
void mask_scores(const Strip<T>& strip, const KeyRange& piece, T* scores) {
  using Index = typename Strip<T>::Index;
  constexpr int kWidth = N * kLanes<T>;
  for (std::int64_t j = piece.begin; j < piece.end; ++j, scores += kWidth) {
    const auto key = static_cast<Index>(j);
#pragma omp simd
    for (int x = 0; x < kWidth; ++x) {
      scores[x] = (strip.first[x] <= key) & (key <= strip.last[x]) ? scores[x] : -kInfinity<T>;
    }
  }
}

// Scores become weights exp(score · scale − shift); maximum, shift and sum move on; factor is what the old sums shrink
// by.
template <class T, int N>
void soften(ForwardStrip<T>& strip, std::int64_t count, T scale, T* scores, T* factor) {
  constexpr int kWidth = N * kLanes<T>;
  alignas(64) T maximum[kWidth], shift[kWidth], sum[kWidth];
  std::copy_n(strip.maximum, kWidth, maximum);
  for (std::int64_t j = 0; j < count; ++j) {
#pragma omp simd
    for (int x = 0; x < kWidth; ++x)
      maximum[x] = maximum[x] < scores[j * kWidth + x] ? scores[j * kWidth + x] : maximum[x];
  }
#pragma omp simd
  for (int x = 0; x < kWidth; ++x) {
    shift[x] = maximum[x] == -kInfinity<T> ? T(0) : maximum[x] * scale;  // nothing seen yet: −∞ − 0, not −∞ + ∞
    factor[x] = exp_of(strip.maximum[x] == -kInfinity<T> ? -kInfinity<T> : strip.shift[x] - shift[x]);
    sum[x] = 0;
  }
  for (std::int64_t j = 0; j < count; ++j) {
#pragma omp simd
    for (int x = 0; x < kWidth; ++x) {
      const T weight = exp_of(scores[j * kWidth + x] * scale - shift[x]);
      scores[j * kWidth + x] = weight;
      sum[x] += weight;
    }
  }
#pragma omp simd
  for (int x = 0; x < kWidth; ++x) {
    strip.maximum[x] = maximum[x];
    strip.shift[x] = shift[x];
    strip.sum[x] = strip.sum[x] * factor[x] + sum[x];
  }
}

template <class T>
class Forward {
 public:
  Forward(const Context& ctx, const BandForward& args)
      : ctx_(ctx),
        shape_(args.q, args.k),
        q_(args.q.as<T>()),
        k_(args.k.as<T>()),
        v_(args.v.as<T>()),
        first_(args.first.as<std::int32_t>()),
        last_(args.last.as<std::int32_t>()),
        o_(args.o.as<T>()),
        lse_(args.lse.as<T>()),
        out_(args.out.data && args.out.data != args.o.data ? args.out.as<T>() : nullptr),
        has_state_(args.has_state),
        scale_(args.scale) {}

  void run(T* workspace) const {
    const int threads = threads_of(shape_);
    const BlockGrid grid(shape_.pairs(), shape_.rows(), kStripWidth<T>, threads);
    std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads)
    {
      T* mine = workspace + omp_get_thread_num() * workspace_size<T>(shape_);
      for (std::int64_t unit = next++; unit < grid.units(); unit = next++) block(grid, unit, mine);
    }
  }

 private:
  void block(const BlockGrid& grid, std::int64_t unit, T* workspace) const {
    ForwardStrip<T> strips[kMaxBlockStrips];
    const std::int64_t index = grid.block(unit), count = grid.num_strips(index);
    T* scores = workspace + kStripWidth<T> * 2 * shape_.depth * kMaxBlockStrips;
    KeyRange keys{shape_.keys, 0};
    for (std::int64_t s = 0; s < count; ++s) {
      ForwardStrip<T>& strip = strips[s];
      strip.set(shape_, first_, last_, grid.pair(unit), grid.first_strip(index) + s);
      strip.q = workspace + kStripWidth<T> * 2 * shape_.depth * s;
      strip.o = strip.q + kStripWidth<T> * shape_.depth;
      std::fill_n(strip.maximum, kStripWidth<T>, -kInfinity<T>);
      std::fill_n(strip.shift, kStripWidth<T>, T(0));
      std::fill_n(strip.sum, kStripWidth<T>, T(0));
      std::fill_n(strip.o, kStripWidth<T> * shape_.depth, T(0));
      if (strip.num_runs == 0) continue;
      load_transposed(strip, shape_, q_, strip.q);
      keys = {std::min(keys.begin, strip.hull().begin), std::max(keys.end, strip.hull().end)};
    }
    const bool main_thread = omp_get_thread_num() == 0;
    for (std::int64_t tile = keys.begin / kTileKeys; tile * kTileKeys < keys.end; ++tile) {
      const KeyRange range = tile_keys(tile, keys);
      const KeyTile<T> rows(shape_, k_, v_, grid.pair(unit), range, scores + kStripWidth<T> * kTileKeys);
      for (std::int64_t s = 0; s < count; ++s) {
        strips[s].for_pieces(range, [&](const KeyRange& piece, bool partial) {
          with_vectors(strips[s].vectors(),
                       [&](auto n) { attend<decltype(n)::value>(strips[s], rows, piece, partial, scores); });
        });
      }
      if (main_thread) ctx_.poll();
    }
    for (std::int64_t s = 0; s < count; ++s) finish(strips[s]);
  }

  template <int N>
  void attend(ForwardStrip<T>& strip, const KeyTile<T>& rows, const KeyRange& piece, bool partial, T* scores) const {
    alignas(64) T factor[kStripWidth<T>];
    const std::int64_t offset = (piece.begin - rows.begin) * rows.stride, count = piece.end - piece.begin;
    multiply_strip<T, N>(rows.k + offset, rows.stride, strip.q, shape_.depth, count, scores);
    if (partial) mask_scores<T, N>(strip, piece, scores);
    soften<T, N>(strip, count, static_cast<T>(scale_), scores, factor);
    gather_strip<T, N>(rows.v + offset, rows.stride, scores, count, shape_.depth, factor, strip.o);
  }

  // Normalises the strip's rows and merges them with the carried state.
  void finish(const ForwardStrip<T>& strip) const {
    const std::int64_t width = strip.vectors() * kLanes<T>;
    for (std::int64_t x = 0; x < strip.count; ++x) {
      const std::int64_t offset = shape_.query_offset(strip.pair, strip.begin + x);
      T& lse = lse_[shape_.stat_offset(strip.pair, strip.begin + x)];
      T* o = o_ + offset;
      if (strip.sum[x] == 0) {  // nothing seen here
        if (!has_state_) {
          std::fill_n(o, shape_.depth, T(0));
          lse = -kInfinity<T>;
        }
      } else if (!has_state_ || lse == -kInfinity<T>) {
        const T weight = 1 / strip.sum[x];
        for (std::int64_t d = 0; d < shape_.depth; ++d) o[d] = strip.o[d * width + x] * weight;
        lse = static_cast<T>(strip.log_sum_exp(x));
      } else {
        const double here = strip.log_sum_exp(x), carried = lse, larger = std::max(here, carried);
        const double a = std::exp(carried - larger), b = std::exp(here - larger);
        const T keep = static_cast<T>(a / (a + b)), weight = static_cast<T>(b / ((a + b) * strip.sum[x]));
        for (std::int64_t d = 0; d < shape_.depth; ++d) o[d] = o[d] * keep + strip.o[d * width + x] * weight;
        lse = static_cast<T>(larger + std::log(a + b));
      }
      if (out_) std::copy_n(o, shape_.depth, out_ + offset);
    }
  }

  const Context& ctx_;
  BandShape shape_;
  const T *q_, *k_, *v_;
  const std::int32_t *first_, *last_;
  T *o_, *lse_, *out_;
  bool has_state_;
  double scale_;
};

template <class T>
std::int64_t forward_bytes(const BandForward& args) {
  const BandShape shape(args.q, args.k);
  return threads_of(shape) * workspace_size<T>(shape) * static_cast<std::int64_t>(sizeof(T));
}

template <class T>
void forward(Context& ctx, const BandForward& args) {
  const ops::Workspace workspace(ctx, "band_forward", forward_bytes<T>(args));
  Forward<T>(ctx, args).run(workspace.as<T>());
}

}  // namespace

std::int64_t workspace_bytes(const BandForward& args) {
  if (is_one_token(args)) return one_token_bytes(args);
  return args.q.dtype == DType::f64 ? forward_bytes<double>(args) : forward_bytes<float>(args);
}

void band_forward(Context& ctx, const BandForward& args) {
  if (is_one_token(args)) {
    const ops::Workspace workspace(ctx, "band_forward", one_token_bytes(args));
    return one_token_forward(ctx, args, workspace.as<std::byte>());
  }
  if (args.q.dtype == DType::f64) forward<double>(ctx, args);
  else forward<float>(ctx, args);
}

}  // namespace annulus::attention::cpu
