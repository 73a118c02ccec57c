// Banded attention backward on the CPU: FlashAttention-2's five products over strips of query rows (strip.h). A unit of
// work owns d_q of its rows and adds into d_k, d_v tile by tile. Every tile receives its strips in one fixed order,
// last rows first: a unit enters a tile only after the unit with the rows behind it has left it. Units start in that
// order and go over the keys in the same direction, so they follow each other like a pipeline and rarely wait; no
// partial sums are kept, and results do not depend on the number of threads.
#include <omp.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "attention/band_workspace.h"
#include "attention/cpu/strip.h"
#include "ops/cpu/parallel.h"

namespace annulus::attention::cpu {
namespace {

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
struct BackwardStrip : Strip<T> {
  alignas(64) T lse[kStripWidth<T>];  // +∞ in lanes that saw nothing, which makes their weights 0
  alignas(64) T delta[kStripWidth<T>];
  T *q_columns, *d_o_columns, *d_q;  // [D][width]: q, d_o, and the sum of d_q / scale
  T *q_rows, *d_o_rows;              // [width][padded D]
};

template <class T>
std::int64_t padded_depth(const BandShape& shape) {
  return (shape.depth + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <class T>
std::int64_t strip_size(const BandShape& shape) {
  return kStripWidth<T> * (3 * shape.depth + 2 * padded_depth<T>(shape));
}

// Elements of T a thread needs: the strips' copies, two tiles of scores, a tile of keys and values and one of
// their gradients.
template <class T>
std::int64_t workspace_size(const BandShape& shape) {
  return strip_size<T>(shape) * kMaxBlockStrips + 2 * kStripWidth<T> * kTileKeys + 2 * KeyTile<T>::size(shape);
}

// The gradients of a tile's keys and values, like KeyTile: copied for the strips of a unit and written back by store().
template <class T>
class GradientTile {
 public:
  GradientTile(const BandShape& shape, T* d_k, T* d_v, std::int64_t pair, const KeyRange& keys, T* memory)
      : shape_(shape), begin_(keys.begin), count_(keys.end - keys.begin) {
    const std::int64_t offset = shape.kv_offset(pair) + begin_ * shape.kv_stride();
    d_k_ = home_k_ = d_k + offset;
    d_v_ = home_v_ = d_v + offset;
    stride_ = shape.kv_stride();
    if (KeyTile<T>::in_place(shape)) return;
    d_k_ = memory;
    d_v_ = memory + KeyTile<T>::size(shape) / 2;
    stride_ = KeyTile<T>::stride_of(shape);
    for (std::int64_t j = 0; j < count_; ++j) {
      std::copy_n(home_k_ + j * shape.kv_stride(), shape.depth, d_k_ + j * stride_);
      std::copy_n(home_v_ + j * shape.kv_stride(), shape.depth, d_v_ + j * stride_);
    }
  }

  void store() const {
    if (d_k_ == home_k_) return;
    for (std::int64_t j = 0; j < count_; ++j) {
      std::copy_n(d_k_ + j * stride_, shape_.depth, home_k_ + j * shape_.kv_stride());
      std::copy_n(d_v_ + j * stride_, shape_.depth, home_v_ + j * shape_.kv_stride());
    }
  }

  T* d_k(std::int64_t key) const { return d_k_ + (key - begin_) * stride_; }
  T* d_v(std::int64_t key) const { return d_v_ + (key - begin_) * stride_; }
  std::int64_t stride() const { return stride_; }

 private:
  const BandShape& shape_;
  std::int64_t begin_, count_, stride_;
  T *d_k_, *d_v_, *home_k_, *home_v_;
};

// Scores q · k and d_p = d_o · v become weights p and d_s / scale = p · (d_p − delta).
template <class T, int N, bool kPartial>
void differentiate(const BackwardStrip<T>& strip, const KeyRange& piece, T scale, T* p, T* d_s) {
  using Index = typename Strip<T>::Index;
  constexpr int kWidth = N * kLanes<T>;
  for (std::int64_t j = piece.begin; j < piece.end; ++j, p += kWidth, d_s += kWidth) {
    const auto key = static_cast<Index>(j);
#pragma omp simd
    for (int x = 0; x < kWidth; ++x) {
      T weight = exp_of(p[x] * scale - strip.lse[x]);
      if constexpr (kPartial) weight = (strip.first[x] <= key) & (key <= strip.last[x]) ? weight : T(0);
      p[x] = weight;
      d_s[x] = weight * (d_s[x] - strip.delta[x]);
    }
  }
}

// How far each unit has come in its pass over the keys: it has left every tile below. One int per unit.
class Chain {
 public:
  static constexpr std::int64_t kDone = std::numeric_limits<std::int32_t>::max();

  Chain(std::int32_t* tiles, std::int64_t units) : tiles_(tiles) { std::fill_n(tiles, units, -1); }  // not started

  bool has_left(std::int64_t unit, std::int64_t tile) const {
    return std::atomic_ref<std::int32_t>(tiles_[unit]).load(std::memory_order_acquire) > tile;
  }
  void leave_below(std::int64_t unit, std::int64_t tile) {
    std::atomic_ref<std::int32_t>(tiles_[unit]).store(static_cast<std::int32_t>(tile), std::memory_order_release);
  }

 private:
  std::int32_t* tiles_;
};

template <class T>
class Backward {
 public:
  Backward(const Context& ctx, const BandBackward& args)
      : ctx_(ctx),
        shape_(args.q, args.k),
        q_(args.q.as<T>()),
        k_(args.k.as<T>()),
        v_(args.v.as<T>()),
        d_o_(args.d_o.as<T>()),
        lse_(args.lse.as<T>()),
        delta_(args.delta.as<T>()),
        first_(args.first.as<std::int32_t>()),
        last_(args.last.as<std::int32_t>()),
        d_q_(args.d_q.as<T>()),
        d_k_(args.d_k.as<T>()),
        d_v_(args.d_v.as<T>()),
        scale_(args.scale) {}

  void run(const BlockGrid& grid, T* workspace, std::int32_t* progress) const {
    Chain chain(progress, grid.units());
    std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads_of(shape_))
    {
      T* mine = workspace + omp_get_thread_num() * workspace_size<T>(shape_);
      for (std::int64_t unit = next++; unit < grid.units(); unit = next++) block(grid, unit, mine, chain);
    }
  }

 private:
  void block(const BlockGrid& grid, std::int64_t unit, T* workspace, Chain& chain) const {
    BackwardStrip<T> strips[kMaxBlockStrips];
    const std::int64_t index = grid.block(unit), count = grid.num_strips(index);
    T* scores = workspace + strip_size<T>(shape_) * kMaxBlockStrips;
    T* copies = scores + 2 * kStripWidth<T> * kTileKeys;
    KeyRange keys{shape_.keys, 0};
    for (std::int64_t s = 0; s < count; ++s) {
      load(strips[s], grid.pair(unit), grid.first_strip(index) + s, workspace + strip_size<T>(shape_) * s);
      if (strips[s].num_runs == 0) continue;
      keys = {std::min(keys.begin, strips[s].hull().begin), std::max(keys.end, strips[s].hull().end)};
    }
    // Bounds do not decrease: units before this one in the chain see nothing below its first key, and, where it sees
    // nothing at all, no key that a unit after it sees.
    if (keys.empty()) return chain.leave_below(unit, Chain::kDone);
    chain.leave_below(unit, keys.begin / kTileKeys);
    for (std::int64_t tile = keys.begin / kTileKeys; tile * kTileKeys < keys.end; ++tile) {
      const KeyRange range = tile_keys(tile, keys);
      const KeyTile<T> rows(shape_, k_, v_, grid.pair(unit), range, copies);
      if (unit >= grid.pairs) wait_for(chain, unit - grid.pairs, tile);
      const GradientTile<T> gradients(shape_, d_k_, d_v_, grid.pair(unit), range, copies + KeyTile<T>::size(shape_));
      for (std::int64_t s = count - 1; s >= 0; --s) {
        strips[s].for_pieces(range, [&](const KeyRange& piece, bool partial) {
          with_vectors(strips[s].vectors(),
                       [&](auto n) { attend<decltype(n)::value>(strips[s], rows, gradients, piece, partial, scores); });
        });
      }
      gradients.store();
      chain.leave_below(unit, tile + 1);
      if (omp_get_thread_num() == 0) ctx_.poll();
    }
    for (std::int64_t s = 0; s < count; ++s) finish(strips[s]);
  }

  // Until the pair's unit before this one has left the tile. It was handed out earlier, so that the earliest unfinished
  // unit never waits.
  void wait_for(const Chain& chain, std::int64_t unit, std::int64_t tile) const {
    for (int spins = 0; !chain.has_left(unit, tile); ++spins) {
      if (spins < 1024) continue;
      if (omp_get_thread_num() == 0) ctx_.poll();
      std::this_thread::yield();  // there may be more threads than cores
    }
  }

  void load(BackwardStrip<T>& strip, std::int64_t pair, std::int64_t index, T* memory) const {
    strip.set(shape_, first_, last_, pair, index);
    const std::int64_t columns = kStripWidth<T> * shape_.depth, rows = kStripWidth<T> * padded_depth<T>(shape_);
    strip.q_rows = memory;
    strip.d_o_rows = memory + rows;
    strip.q_columns = memory + 2 * rows;
    strip.d_o_columns = strip.q_columns + columns;
    strip.d_q = strip.d_o_columns + columns;
    if (strip.num_runs == 0) return;
    for (std::int64_t x = 0; x < kStripWidth<T>; ++x) {
      const bool seen = x < strip.count && !strip.sees_nothing(x);
      const std::int64_t offset = seen ? shape_.stat_offset(pair, strip.begin + x) : 0;
      const T lse = seen ? lse_[offset] : -kInfinity<T>;
      strip.lse[x] = lse == -kInfinity<T> ? kInfinity<T> : lse;
      strip.delta[x] = seen ? delta_[offset] : T(0);
    }
    load_rows(strip, shape_, q_, padded_depth<T>(shape_), strip.q_rows);
    load_rows(strip, shape_, d_o_, padded_depth<T>(shape_), strip.d_o_rows);
    load_transposed(strip, shape_, q_, strip.q_columns);
    load_transposed(strip, shape_, d_o_, strip.d_o_columns);
    std::fill_n(strip.d_q, columns, T(0));
  }

  template <int N>
  void attend(BackwardStrip<T>& strip, const KeyTile<T>& rows, const GradientTile<T>& gradients, const KeyRange& piece,
              bool partial, T* scores) const {
    constexpr std::int64_t kWidth = N * kLanes<T>;
    const std::int64_t count = piece.end - piece.begin, depth = shape_.depth, padded = padded_depth<T>(shape_);
    const T *k = rows.k + (piece.begin - rows.begin) * rows.stride,
            *v = rows.v + (piece.begin - rows.begin) * rows.stride;
    const T scale = static_cast<T>(scale_);
    T *p = scores, *d_s = scores + kStripWidth<T> * kTileKeys;
    multiply_strip<T, N>(k, rows.stride, strip.q_columns, depth, count, p);
    multiply_strip<T, N>(v, rows.stride, strip.d_o_columns, depth, count, d_s);
    if (partial) differentiate<T, N, true>(strip, piece, scale, p, d_s);
    else differentiate<T, N, false>(strip, piece, scale, p, d_s);
    scatter_strip(p, kWidth, strip.d_o_rows, padded, strip.count, T(1), gradients.d_v(piece.begin), gradients.stride(),
                  count, depth);
    scatter_strip(d_s, kWidth, strip.q_rows, padded, strip.count, scale, gradients.d_k(piece.begin), gradients.stride(),
                  count, depth);
    gather_strip<T, N>(k, rows.stride, d_s, count, depth, nullptr, strip.d_q);
  }

  void finish(const BackwardStrip<T>& strip) const {
    if (strip.num_runs == 0) return;
    const std::int64_t width = strip.vectors() * kLanes<T>;
    const T scale = static_cast<T>(scale_);
    for (std::int64_t x = 0; x < strip.count; ++x) {
      if (strip.sees_nothing(x)) continue;
      T* d_q = d_q_ + shape_.query_offset(strip.pair, strip.begin + x);
      for (std::int64_t d = 0; d < shape_.depth; ++d) d_q[d] += scale * strip.d_q[d * width + x];
    }
  }

  const Context& ctx_;
  BandShape shape_;
  const T *q_, *k_, *v_, *d_o_, *lse_, *delta_;
  const std::int32_t *first_, *last_;
  T *d_q_, *d_k_, *d_v_;
  double scale_;
};

template <class T>
BlockGrid grid_of(const BandShape& shape) {
  return {shape.pairs(), shape.rows(), kStripWidth<T>, threads_of(shape)};
}

template <class T>
std::int64_t tiles_bytes(const BandShape& shape) {  // a multiple of a cache line
  return threads_of(shape) * workspace_size<T>(shape) * static_cast<std::int64_t>(sizeof(T));
}

template <class T>
std::int64_t backward_bytes(const BandBackward& args) {
  const BandShape shape(args.q, args.k);
  return tiles_bytes<T>(shape) + grid_of<T>(shape).units() * static_cast<std::int64_t>(sizeof(std::int32_t));
}

template <class T>
void backward(Context& ctx, const BandBackward& args) {
  const ops::Workspace workspace(ctx, "band_backward", backward_bytes<T>(args));
  const BandShape shape(args.q, args.k);
  char* memory = workspace.as<char>();
  Backward<T>(ctx, args).run(grid_of<T>(shape), reinterpret_cast<T*>(memory),
                             reinterpret_cast<std::int32_t*>(memory + tiles_bytes<T>(shape)));
}

template <class T>
void delta(const BandDelta& args) {
  const std::int64_t queries = args.d_o.dim(1), heads = args.d_o.dim(2), depth = args.d_o.dim(3);
  const T *d_o = args.d_o.as<T>(), *o = args.o.as<T>();
  T* sums = args.delta.as<T>();
  ops::cpu::for_rows(args.d_o.dim(0) * queries, heads * depth, [&](std::int64_t row) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t offset = (row * heads + h) * depth;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t d = 0; d < depth; ++d) sum += d_o[offset + d] * o[offset + d];
      sums[(row / queries * heads + h) * queries + row % queries] = sum;
    }
  });
}

}  // namespace

std::int64_t workspace_bytes(const BandBackward& args) {
  return args.q.dtype == DType::f64 ? backward_bytes<double>(args) : backward_bytes<float>(args);
}

void band_backward(Context& ctx, const BandBackward& args) {
  if (args.q.dtype == DType::f64) backward<double>(ctx, args);
  else backward<float>(ctx, args);
}

void band_delta(Context&, const BandDelta& args) {
  if (args.d_o.dtype == DType::f64) delta<double>(args);
  else delta<float>(args);
}

}  // namespace annulus::attention::cpu
