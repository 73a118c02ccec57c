// Attention over selected blocks, forward (arXiv 2502.11089, section 3.4, with blocks outside and queries inside as in
// FSA, arXiv 2508.18224, but with the softmax carried from block to block, so that no partial output is ever stored).
// As in band_forward.cpp a hop is computed on its own and merged with the carried state once, in double.
#include <atomic>
#include <cmath>

#include "attention/cpu/selected.h"
#include "attention/select_workspace.h"

namespace annulus::attention::cpu {
namespace {

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
constexpr double kLog2E = 1.4426950408889634074;

constexpr std::int64_t kTileRows = 48;      // with their scores in the L1 cache, beside a block's keys
constexpr std::int64_t kSegmentRows = 192;  // that meet a block, on average

// How a call is cut; without influence on any row's bits.
struct ForwardGrid {
  std::int64_t tile, tokens, segments;  // tokens of a tile and of a segment

  ForwardGrid(const SelectedShape& shape, int threads)
      : tile(shape.tile_tokens(kTileRows)),
        tokens(std::max(std::min(shape.segment_tokens(kSegmentRows), shape.queries * shape.pairs() / (4 * threads)),
                        std::min(tile, shape.queries))),
        segments(tokens > 0 ? (shape.queries + tokens - 1) / tokens : 0) {}
};

template <class T>
struct ForwardPanels {  // of all blocks of all pairs
  T *k, *v;
  ForwardPanels(const SelectedShape& shape, Pieces<T>& pieces)
      : k(pieces.take(shape.pairs() * shape.blocks * k_size(shape))),
        v(pieces.take(shape.pairs() * shape.blocks * v_size(shape))) {}
  static std::int64_t k_size(const SelectedShape& shape) { return shape.depth * shape.width<T>(); }
  static std::int64_t v_size(const SelectedShape& shape) { return shape.block * shape.padded_depth<T>(); }
};

// A thread's memory: a segment's lists and state, and a tile.
template <class T>
struct ForwardTiles {
  QueryLists lists;
  // o [rows][padded D] is not normalised; shift is the largest score · scale · log2 e so far, −∞ where there was none;
  // sum [rows][lanes] of the weights 2^(score · scale · log2 e − shift).
  T *o, *shift, *sum;
  T *q, *scores, *before, *now, *factor;
  std::int64_t* rows;  // a tile's rows in the segment

  ForwardTiles(const SelectedShape& shape, const ForwardGrid& grid, Pieces<T>& pieces)
      : lists(shape, grid.tokens, pieces),
        o(pieces.take(grid.tokens * shape.group * shape.padded_depth<T>())),
        shift(pieces.take(grid.tokens * shape.group)),
        sum(pieces.take(grid.tokens * shape.group * kLanes<T>)),
        q(pieces.take(grid.tile * shape.group * shape.padded_depth<T>())),
        scores(pieces.take(grid.tile * shape.group * shape.width<T>())),
        before(pieces.take(grid.tile * shape.group)),
        now(pieces.take(grid.tile * shape.group)),
        factor(pieces.take(grid.tile * shape.group)),
        rows(pieces.template take<std::int64_t>(grid.tile * shape.group)) {}

  static std::int64_t size(const SelectedShape& shape, const ForwardGrid& grid) {
    Pieces<T> counted;
    ForwardTiles(shape, grid, counted);
    return counted.used();
  }
};

template <class T>
class Forward {
 public:
  Forward(const Context& ctx, const SelectedForward& args)
      : ctx_(ctx),
        shape_(args),
        threads_(shape_.threads()),
        grid_(shape_, threads_),
        q_(args.q.as<T>()),
        k_(args.k.as<T>()),
        v_(args.v.as<T>()),
        selected_(args.selected.as<std::int32_t>()),
        token_(args.token.as<std::int32_t>()),
        start_(args.start.as<std::int32_t>()),
        o_(args.o.as<T>()),
        lse_(args.lse.as<T>()),
        out_(args.out.data && args.out.data != args.o.data ? args.out.as<T>() : nullptr),
        has_state_(args.has_state),
        scale_(args.scale),
        to_exponent_(static_cast<T>(args.scale * kLog2E)) {}

  static std::int64_t size(const SelectedForward& args) {  // elements of T
    const SelectedShape shape(args);
    const int threads = shape.threads();
    Pieces<T> pieces;
    ForwardPanels<T>(shape, pieces);
    return pieces.used() + threads * ForwardTiles<T>::size(shape, ForwardGrid(shape, threads));
  }

  void run(T* workspace) const {
    Pieces<T> pieces(workspace);
    const ForwardPanels<T> panels(shape_, pieces);
    T* const tiles_memory = workspace + pieces.used();
    const std::int64_t tiles_size = ForwardTiles<T>::size(shape_, grid_), units = grid_.segments * shape_.pairs();
    std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads_)
    {
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < shape_.pairs() * shape_.blocks; ++i) {
        pack_transposed(shape_, k_, i / shape_.blocks, i % shape_.blocks, panels.k + i * panels.k_size(shape_));
        pack_rows(shape_, v_, i / shape_.blocks, i % shape_.blocks, panels.v + i * panels.v_size(shape_));
      }
      Pieces<T> mine(tiles_memory + omp_get_thread_num() * tiles_size);
      ForwardTiles<T> tiles(shape_, grid_, mine);
      for (std::int64_t unit = next++; unit < units; unit = next++) {  // the last rows, which see most, come first
        segment(unit % shape_.pairs(), grid_.segments - 1 - unit / shape_.pairs(), panels, tiles);
      }
    }
  }

 private:
  struct Rows {  // a tile
    std::int64_t pair, segment_begin;
    const std::int32_t* tokens;
    std::int64_t count;
    bool partial;
  };

  void segment(std::int64_t pair, std::int64_t index, const ForwardPanels<T>& panels, ForwardTiles<T>& tiles) const {
    const std::int64_t begin = index * grid_.tokens, end = std::min(begin + grid_.tokens, shape_.queries);
    const std::int64_t rows = (end - begin) * shape_.group;
    tiles.lists.build(shape_, pair, begin, end, selected_, token_, start_);
    std::fill_n(tiles.o, rows * shape_.padded_depth<T>(), T(0));
    std::fill_n(tiles.shift, rows, -kInfinity<T>);
    std::fill_n(tiles.sum, rows * kLanes<T>, T(0));
    for (std::int64_t block = 0; block < shape_.blocks; ++block) {
      if (tiles.lists.is_empty(block)) continue;
      const std::int64_t panel = pair * shape_.blocks + block;
      const T *k = panels.k + panel * panels.k_size(shape_), *v = panels.v + panel * panels.v_size(shape_);
      for_tiles(tiles.lists, block, grid_.tile, [&](const std::int32_t* tokens, std::int64_t count, bool partial) {
        attend({pair, begin, tokens, count, partial}, block, k, v, tiles);
      });
      if (omp_get_thread_num() == 0) ctx_.poll();
    }
    for (std::int64_t row = 0; row < rows; ++row) finish(tiles, pair, begin * shape_.group + row, row);
  }

  void attend(const Rows& tile, std::int64_t block, const T* k, const T* v, const ForwardTiles<T>& tiles) const {
    const std::int64_t group = shape_.group, rows = tile.count * group, width = shape_.width<T>();
    const std::int64_t padded = shape_.padded_depth<T>();
    gather_rows(shape_, q_, tile.pair, tile.tokens, tile.count, tiles.q);
    for (std::int64_t i = 0; i < rows; ++i) {
      tiles.rows[i] = (tile.tokens[i / group] - tile.segment_begin) * group + i % group;
    }
    multiply<T, false>(tiles.q, padded, rows, k, width, shape_.depth, width,
                       [&](std::int64_t i, std::int64_t c, const auto& acc) {
                         for (std::size_t n = 0; n < std::size(acc); ++n) {
                           vector_at(tiles.scores + i * width + c + static_cast<std::int64_t>(n) * kLanes<T>) = acc[n];
                         }
                       });
    if (tile.partial || width != shape_.block) {
      for (std::int64_t i = 0; i < tile.count; ++i) {
        mask(keys_of(tile, i, block), tiles.scores + i * group * width);
      }
    }
    soften(rows, tiles);
    if (!tile.partial) return gather(tiles, 0, rows, v, {0, shape_.block});
    // Values that a row must not see stay out of its sum: 0 · NaN is NaN.
    for (std::int64_t i = 0; i < tile.count; ++i) gather(tiles, i * group, group, v, keys_of(tile, i, block));
  }

  // What token i of a tile sees of a block of the buffer.
  KeyRange keys_of(const Rows& tile, std::int64_t i, std::int64_t block) const {
    if (!tile.partial) return {0, shape_.block};
    const std::int64_t row = tile.pair / shape_.kv_heads * shape_.queries + tile.tokens[i];
    return shape_.visible_in(block, start_[row], token_[row]);
  }

  // Scores that a token must not see become −∞.
  void mask(const KeyRange& keys, T* scores) const {
    const std::int64_t width = shape_.width<T>();
    for (std::int64_t c = 0; c < width; c += kLanes<T>) {
      const auto seen = lanes_in<T>(keys, c);
      for (std::int64_t g = 0; g < shape_.group; ++g) {
        Vector<T>& score = vector_at(scores + g * width + c);
        score = seen ? score : Vector<T>{} - kInfinity<T>;
      }
    }
  }

  // Scores become weights 2^(score · scale · log2 e − shift); shift and sum move on; factor is what the old sums shrink
  // by. Shifts are rounded products: subtracted as such, never fused with the product.
  void soften(std::int64_t rows, const ForwardTiles<T>& tiles) const {
    const std::int64_t width = shape_.width<T>();
    const T c = to_exponent_;
    for (std::int64_t i = 0; i < rows; ++i) {
      Vector<T> best = vector_at(tiles.scores + i * width);
      for (std::int64_t k = kLanes<T>; k < width; k += kLanes<T>) {
        const Vector<T> score = vector_at(tiles.scores + i * width + k);
        best = best < score ? score : best;
      }
      tiles.now[i] = largest_lane<T>(best) * c;
      tiles.before[i] = tiles.shift[tiles.rows[i]];
    }
#pragma omp simd
    for (std::int64_t i = 0; i < rows; ++i) {
      const T before = tiles.before[i], now = before < tiles.now[i] ? tiles.now[i] : before;
      tiles.factor[i] = vector_exp2(before == -kInfinity<T> ? before : before - now);
      tiles.now[i] = now;
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const T now = tiles.now[i], shift = now == -kInfinity<T> ? T(0) : now;  // no score yet: −∞ − 0, not −∞ + ∞
      Vector<T> sum{};
      for (std::int64_t k = 0; k < width; k += kLanes<T>) {
        Vector<T>& score = vector_at(tiles.scores + i * width + k);
        score = weight_of<T>(score * c - shift);
        sum += score;
      }
      tiles.shift[tiles.rows[i]] = now;
      Vector<T>& total = vector_at(tiles.sum + tiles.rows[i] * kLanes<T>);
      total = total * tiles.factor[i] + sum;
    }
  }

  // o = o · factor + weights · values for rows [first, first + count) of the tile.
  void gather(const ForwardTiles<T>& tiles, std::int64_t first, std::int64_t count, const T* v,
              const KeyRange& keys) const {
    const std::int64_t width = shape_.width<T>(), padded = shape_.padded_depth<T>();
    multiply<T, false>(tiles.scores + first * width + keys.begin, width, count, v + keys.begin * padded, padded,
                       keys.end - keys.begin, padded, [&](std::int64_t i, std::int64_t c, const auto& acc) {
                         T* o = tiles.o + tiles.rows[first + i] * padded + c;
                         const T factor = tiles.factor[first + i];
                         for (std::size_t n = 0; n < std::size(acc); ++n) {
                           Vector<T>& sum = vector_at(o + static_cast<std::int64_t>(n) * kLanes<T>);
                           sum = sum * factor + acc[n];
                         }
                       });
  }

  // Normalises a row and merges it with the carried state.
  void finish(const ForwardTiles<T>& tiles, std::int64_t pair, std::int64_t row, std::int64_t local) const {
    const std::int64_t offset = shape_.query_offset(pair, row);
    const T* from = tiles.o + local * shape_.padded_depth<T>();
    T* o = o_ + offset;
    T& lse = lse_[shape_.stat_offset(pair, row)];
    double sum = 0;
    for (int i = 0; i < kLanes<T>; ++i) sum += tiles.sum[local * kLanes<T> + i];
    // scale · log2 e was rounded; undone for the shift, so that a log-sum-exp of any size carries no such error.
    const double here = tiles.shift[local] * (scale_ / to_exponent_) + std::log(sum);
    if (sum == 0) {  // nothing seen here
      if (!has_state_) {
        std::fill_n(o, shape_.depth, T(0));
        lse = -kInfinity<T>;
      }
    } else if (!has_state_) {
      const T weight = static_cast<T>(1 / sum);
      for (std::int64_t d = 0; d < shape_.depth; ++d) o[d] = from[d] * weight;
      lse = static_cast<T>(here);
    } else {
      const double carried = lse, larger = std::max(here, carried);
      const double a = std::exp(carried - larger), b = std::exp(here - larger);
      const T keep = static_cast<T>(a / (a + b)), weight = static_cast<T>(b / ((a + b) * sum));
      for (std::int64_t d = 0; d < shape_.depth; ++d) o[d] = o[d] * keep + from[d] * weight;
      lse = static_cast<T>(larger + std::log(a + b));
    }
    if (out_) std::copy_n(o, shape_.depth, out_ + offset);
  }

  const Context& ctx_;
  SelectedShape shape_;
  int threads_;
  ForwardGrid grid_;
  const T *q_, *k_, *v_;
  const std::int32_t *selected_, *token_, *start_;
  T *o_, *lse_, *out_;
  bool has_state_;
  double scale_;
  T to_exponent_;
};

template <class T>
std::int64_t forward_bytes(const SelectedForward& args) {
  return Forward<T>::size(args) * static_cast<std::int64_t>(sizeof(T));
}

template <class T>
void forward(Context& ctx, const SelectedForward& args) {
  const ops::Workspace workspace(ctx, "selected_forward", forward_bytes<T>(args));
  Forward<T>(ctx, args).run(workspace.as<T>());
}

}  // namespace

std::int64_t workspace_bytes(const SelectedForward& args) {
  return args.q.dtype == DType::f64 ? forward_bytes<double>(args) : forward_bytes<float>(args);
}

void selected_forward(Context& ctx, const SelectedForward& args) {
  if (args.q.dtype == DType::f64) forward<double>(ctx, args);
  else forward<float>(ctx, args);
}

}  // namespace annulus::attention::cpu
