// Attention over selected blocks, backward: FlashAttention-2's five products over the query lists of selected.h. A unit
// owns d_q of its segment. What it adds to a block's d_k and d_v is summed in a tile of its own and joins the gradient
// in the order of the segments: a unit adds to a block only after all segments before it have left the block. Segments
// start in that order and go over the blocks in the same direction, so they follow each other like a pipeline and
// rarely wait. A block that every query selects is thus split among the segments; every score is computed once; no
// partial sums are kept, and results depend on neither the number of threads nor the batch.
#include <atomic>
#include <cmath>
#include <thread>

#include "attention/cpu/selected.h"
#include "attention/select_workspace.h"

namespace annulus::attention::cpu {
namespace {

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
constexpr double kLog2E = 1.4426950408889634074;

constexpr std::int64_t kTileRows = 96;
constexpr std::int64_t kSegmentRows = 192;  // that meet a block, on average
constexpr std::int64_t kMinSegments = 16;   // for as many threads, where there are tokens enough

// How a call is cut: from the sizes of one sequence alone, since the order of sums depends on it.
struct BackwardGrid {
  std::int64_t tile, tokens, segments;  // tokens of a tile and of a segment

  explicit BackwardGrid(const SelectedShape& shape)
      : tile(shape.tile_tokens(kTileRows)),
        tokens(std::max(std::min(shape.segment_tokens(kSegmentRows), shape.queries / kMinSegments),
                        std::min(tile, shape.queries))),
        segments(tokens > 0 ? (shape.queries + tokens - 1) / tokens : 0) {}
};

template <class T>
struct BackwardPanels {  // of all blocks of all pairs
  T *k_columns, *v_columns, *k_rows;
  BackwardPanels(const SelectedShape& shape, Pieces<T>& pieces)
      : k_columns(pieces.take(shape.pairs() * shape.blocks * columns_size(shape))),
        v_columns(pieces.take(shape.pairs() * shape.blocks * columns_size(shape))),
        k_rows(pieces.take(shape.pairs() * shape.blocks * rows_size(shape))) {}
  static std::int64_t columns_size(const SelectedShape& shape) { return shape.depth * shape.width<T>(); }
  static std::int64_t rows_size(const SelectedShape& shape) { return shape.block * shape.padded_depth<T>(); }
};

// A thread's memory: a segment's lists, a block's gradients, and a tile.
template <class T>
struct BackwardTiles {
  QueryLists lists;
  T *d_k, *d_v;                        // [l'][padded D]; d_k without scale
  T *q, *d_o, *p, *d_s, *lse, *delta;  // d_s without scale
  std::int64_t* rows;                  // where a tile's rows begin in d_q

  BackwardTiles(const SelectedShape& shape, const BackwardGrid& grid, Pieces<T>& pieces)
      : lists(shape, grid.tokens, pieces),
        d_k(pieces.take(shape.block * shape.padded_depth<T>())),
        d_v(pieces.take(shape.block * shape.padded_depth<T>())),
        q(pieces.take(grid.tile * shape.group * shape.padded_depth<T>())),
        d_o(pieces.take(grid.tile * shape.group * shape.padded_depth<T>())),
        p(pieces.take(grid.tile * shape.group * shape.width<T>())),
        d_s(pieces.take(grid.tile * shape.group * shape.width<T>())),
        lse(pieces.take(grid.tile * shape.group)),
        delta(pieces.take(grid.tile * shape.group)),
        rows(pieces.template take<std::int64_t>(grid.tile * shape.group)) {}

  static std::int64_t size(const SelectedShape& shape, const BackwardGrid& grid) {
    Pieces<T> counted;
    BackwardTiles(shape, grid, counted);
    return counted.used();
  }
};

// How far each segment of each pair has come in its pass over the blocks. Unit = segment · pairs + pair.
class Turns {
 public:
  static std::int64_t size(std::int64_t pairs, std::int64_t units) { return units + pairs; }

  Turns(std::int32_t* memory, std::int64_t pairs, std::int64_t units)
      : left_(memory), first_(memory + units), pairs_(pairs) {
    std::fill_n(memory, size(pairs, units), 0);
  }

  // The unit is done with every block below.
  void leave_below(std::int64_t unit, std::int64_t block) { store(left_[unit], block); }
  void leave(std::int64_t unit) {
    store(left_[unit], kDone);
    std::int32_t& first = first_[unit % pairs_];  // every segment before it is done; maybe more
    std::int64_t segment = load(first);
    while (segment <= unit / pairs_ && load(left_[segment * pairs_ + unit % pairs_]) == kDone) ++segment;
    store(first, segment);
  }

  // Until every segment before the unit's has left the block. They were handed out before it, so that the earliest
  // unfinished one never waits.
  void wait_for(std::int64_t unit, std::int64_t block, const Context& ctx) const {
    for (std::int64_t before = load(first_[unit % pairs_]) * pairs_ + unit % pairs_; before < unit; before += pairs_) {
      for (int spins = 0; load(left_[before]) <= block; ++spins) {
        if (spins < 1024) continue;
        if (omp_get_thread_num() == 0) ctx.poll();
        std::this_thread::yield();  // there may be more threads than cores
      }
    }
  }

 private:
  static constexpr std::int64_t kDone = std::numeric_limits<std::int32_t>::max();

  static std::int64_t load(std::int32_t& x) { return std::atomic_ref<std::int32_t>(x).load(std::memory_order_acquire); }
  static void store(std::int32_t& x, std::int64_t value) {
    std::atomic_ref<std::int32_t>(x).store(static_cast<std::int32_t>(value), std::memory_order_release);
  }

  std::int32_t *left_, *first_;
  std::int64_t pairs_;
};

template <class T>
class Backward {
 public:
  Backward(const Context& ctx, const SelectedBackward& args)
      : ctx_(ctx),
        shape_(args),
        threads_(shape_.threads()),
        grid_(shape_),
        q_(args.q.as<T>()),
        k_(args.k.as<T>()),
        v_(args.v.as<T>()),
        d_o_(args.d_o.as<T>()),
        lse_(args.lse.as<T>()),
        delta_(args.delta.as<T>()),
        selected_(args.selected.as<std::int32_t>()),
        token_(args.token.as<std::int32_t>()),
        start_(args.start.as<std::int32_t>()),
        d_q_(args.d_q.as<T>()),
        d_k_(args.d_k.as<T>()),
        d_v_(args.d_v.as<T>()),
        scale_(static_cast<T>(args.scale)) {}

  static std::int64_t size(const SelectedBackward& args) {  // elements of T
    const SelectedShape shape(args);
    const BackwardGrid grid(shape);
    Pieces<T> pieces;
    BackwardPanels<T>(shape, pieces);
    pieces.template take<std::int32_t>(Turns::size(shape.pairs(), grid.segments * shape.pairs()));
    return pieces.used() + shape.threads() * BackwardTiles<T>::size(shape, grid);
  }

  void run(T* workspace) const {
    const std::int64_t units = grid_.segments * shape_.pairs(), tiles_size = BackwardTiles<T>::size(shape_, grid_);
    Pieces<T> pieces(workspace);
    const BackwardPanels<T> panels(shape_, pieces);
    Turns turns(pieces.template take<std::int32_t>(Turns::size(shape_.pairs(), units)), shape_.pairs(), units);
    std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads_)
    {
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < shape_.pairs() * shape_.blocks; ++i) {
        const std::int64_t pair = i / shape_.blocks, block = i % shape_.blocks;
        pack_transposed(shape_, k_, pair, block, panels.k_columns + i * panels.columns_size(shape_));
        pack_transposed(shape_, v_, pair, block, panels.v_columns + i * panels.columns_size(shape_));
        pack_rows(shape_, k_, pair, block, panels.k_rows + i * panels.rows_size(shape_));
      }
      Pieces<T> mine(workspace + pieces.used() + omp_get_thread_num() * tiles_size);
      BackwardTiles<T> tiles(shape_, grid_, mine);
      for (std::int64_t unit = next++; unit < units; unit = next++) segment(unit, panels, tiles, turns);
    }
  }

 private:
  struct Rows {  // a tile
    std::int64_t pair;
    const std::int32_t* tokens;
    std::int64_t count;
    bool partial;
  };

  void segment(std::int64_t unit, const BackwardPanels<T>& panels, BackwardTiles<T>& tiles, Turns& turns) const {
    const std::int64_t pair = unit % shape_.pairs(), begin = unit / shape_.pairs() * grid_.tokens;
    tiles.lists.build(shape_, pair, begin, std::min(begin + grid_.tokens, shape_.queries), selected_, token_, start_);
    for (std::int64_t block = 0; block < shape_.blocks; ++block) {
      if (tiles.lists.is_empty(block)) continue;
      turns.leave_below(unit, block);
      std::fill_n(tiles.d_k, panels.rows_size(shape_), T(0));
      std::fill_n(tiles.d_v, panels.rows_size(shape_), T(0));
      for_tiles(tiles.lists, block, grid_.tile, [&](const std::int32_t* tokens, std::int64_t count, bool partial) {
        attend({pair, tokens, count, partial}, block, panels, tiles);
      });
      turns.wait_for(unit, block, ctx_);
      add_gradients(pair, block, tiles);
      if (omp_get_thread_num() == 0) ctx_.poll();
    }
    turns.leave(unit);
  }

  void attend(const Rows& tile, std::int64_t block, const BackwardPanels<T>& panels,
              const BackwardTiles<T>& tiles) const {
    const std::int64_t group = shape_.group, rows = tile.count * group, width = shape_.width<T>();
    const std::int64_t padded = shape_.padded_depth<T>(), panel = tile.pair * shape_.blocks + block;
    const T* k_rows = panels.k_rows + panel * panels.rows_size(shape_);
    load(tile, tiles);
    const auto scores = [&](const T* from, const T* columns, T* to) {
      multiply<T, false>(from, padded, rows, columns + panel * panels.columns_size(shape_), width, shape_.depth, width,
                         [&](std::int64_t i, std::int64_t c, const auto& acc) {
                           for (std::size_t n = 0; n < std::size(acc); ++n) {
                             vector_at(to + i * width + c + static_cast<std::int64_t>(n) * kLanes<T>) = acc[n];
                           }
                         });
    };
    scores(tiles.q, panels.k_columns, tiles.p);
    scores(tiles.d_o, panels.v_columns, tiles.d_s);
    differentiate(rows, tiles);
    if (tile.partial || width != shape_.block) {
      for (std::int64_t i = 0; i < tile.count; ++i) mask(keys_of(tile, i, block), i * group * width, tiles);
    }
    scatter(tiles.p, tiles.d_o, rows, tiles.d_v);
    scatter(tiles.d_s, tiles.q, rows, tiles.d_k);
    if (!tile.partial) return gather(tiles, 0, rows, k_rows, {0, shape_.block});
    // Keys that a row must not see stay out of its sum: 0 · NaN is NaN.
    for (std::int64_t i = 0; i < tile.count; ++i) gather(tiles, i * group, group, k_rows, keys_of(tile, i, block));
  }

  void load(const Rows& tile, const BackwardTiles<T>& tiles) const {
    gather_rows(shape_, q_, tile.pair, tile.tokens, tile.count, tiles.q);
    gather_rows(shape_, d_o_, tile.pair, tile.tokens, tile.count, tiles.d_o);
    std::int64_t to = 0;
    for (std::int64_t i = 0; i < tile.count; ++i) {
      for (std::int64_t row = tile.tokens[i] * shape_.group, g = 0; g < shape_.group; ++g, ++row, ++to) {
        const std::int64_t statistic = shape_.stat_offset(tile.pair, row);
        const T lse = lse_[statistic];
        tiles.lse[to] = lse == -kInfinity<T> ? kInfinity<T> : lse;  // weights are 0 where nothing was seen
        tiles.delta[to] = delta_[statistic];
        tiles.rows[to] = shape_.query_offset(tile.pair, row);
      }
    }
  }

  // What token i of a tile sees of a block of the buffer.
  KeyRange keys_of(const Rows& tile, std::int64_t i, std::int64_t block) const {
    if (!tile.partial) return {0, shape_.block};
    const std::int64_t row = tile.pair / shape_.kv_heads * shape_.queries + tile.tokens[i];
    return shape_.visible_in(block, start_[row], token_[row]);
  }

  // Scores q · k and d_p = d_o · v become weights p and d_s / scale = p · (d_p − delta).
  void differentiate(std::int64_t rows, const BackwardTiles<T>& tiles) const {
    const std::int64_t width = shape_.width<T>();
    for (std::int64_t i = 0; i < rows; ++i) {
      const T lse = tiles.lse[i], delta = tiles.delta[i];
      for (std::int64_t at = i * width; at < (i + 1) * width; at += kLanes<T>) {
        Vector<T>&p = vector_at(tiles.p + at), &d_s = vector_at(tiles.d_s + at);
        p = weight_of<T>((p * scale_ - lse) * static_cast<T>(kLog2E));
        d_s = p * (d_s - delta);
      }
    }
  }

  void mask(const KeyRange& keys, std::int64_t first, const BackwardTiles<T>& tiles) const {
    const std::int64_t width = shape_.width<T>();
    for (std::int64_t c = 0; c < width; c += kLanes<T>) {
      const auto seen = lanes_in<T>(keys, c);
      for (std::int64_t at = first + c; at < first + shape_.group * width; at += width) {
        Vector<T>&p = vector_at(tiles.p + at), &d_s = vector_at(tiles.d_s + at);
        p = seen ? p : Vector<T>{};
        d_s = seen ? d_s : Vector<T>{};
      }
    }
  }

  // to[key] += sum over a tile's rows of weight · row.
  void scatter(const T* weights, const T* from, std::int64_t rows, T* to) const {
    const std::int64_t padded = shape_.padded_depth<T>();
    multiply<T, true>(weights, shape_.width<T>(), shape_.block, from, padded, rows, padded,
                      [&](std::int64_t key, std::int64_t c, const auto& acc) {
                        for (std::size_t n = 0; n < std::size(acc); ++n) {
                          vector_at(to + key * padded + c + static_cast<std::int64_t>(n) * kLanes<T>) += acc[n];
                        }
                      });
  }

  // d_q += scale · d_s · keys for rows [first, first + count) of the tile. d_q may be unaligned.
  void gather(const BackwardTiles<T>& tiles, std::int64_t first, std::int64_t count, const T* k,
              const KeyRange& keys) const {
    const std::int64_t width = shape_.width<T>(), padded = shape_.padded_depth<T>();
    multiply<T, false>(tiles.d_s + first * width + keys.begin, width, count, k + keys.begin * padded, padded,
                       keys.end - keys.begin, padded, [&](std::int64_t i, std::int64_t c, const auto& acc) {
                         add_row(acc, shape_.depth - c, d_q_ + tiles.rows[first + i] + c);
                       });
  }

  // to += scale · acc, of which `columns` columns exist.
  template <std::size_t N>
  void add_row(const Vector<T> (&acc)[N], std::int64_t columns, T* to) const {
    for (std::size_t n = 0; n < N; ++n, to += kLanes<T>, columns -= kLanes<T>) {
      if (columns >= kLanes<T>) {
        Vector<T> total;
        std::memcpy(&total, to, sizeof(total));
        total += scale_ * acc[n];
        std::memcpy(to, &total, sizeof(total));
      } else {
        for (std::int64_t i = 0; i < columns; ++i) to[i] += scale_ * acc[n][i];
      }
    }
  }

  void add_gradients(std::int64_t pair, std::int64_t block, const BackwardTiles<T>& tiles) const {
    const std::int64_t first = block * shape_.block, count = std::min(shape_.block, shape_.keys - first);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t offset = shape_.kv_offset(pair) + (first + j) * shape_.kv_stride();
      const std::int64_t from = j * shape_.padded_depth<T>();
#pragma omp simd
      for (std::int64_t d = 0; d < shape_.depth; ++d) {
        d_k_[offset + d] += scale_ * tiles.d_k[from + d];
        d_v_[offset + d] += tiles.d_v[from + d];
      }
    }
  }

  const Context& ctx_;
  SelectedShape shape_;
  int threads_;
  BackwardGrid grid_;
  const T *q_, *k_, *v_, *d_o_, *lse_, *delta_;
  const std::int32_t *selected_, *token_, *start_;
  T *d_q_, *d_k_, *d_v_, scale_;
};

template <class T>
std::int64_t backward_bytes(const SelectedBackward& args) {
  return Backward<T>::size(args) * static_cast<std::int64_t>(sizeof(T));
}

template <class T>
void backward(Context& ctx, const SelectedBackward& args) {
  const ops::Workspace workspace(ctx, "selected_backward", backward_bytes<T>(args));
  Backward<T>(ctx, args).run(workspace.as<T>());
}

}  // namespace

std::int64_t workspace_bytes(const SelectedBackward& args) {
  return args.q.dtype == DType::f64 ? backward_bytes<double>(args) : backward_bytes<float>(args);
}

void selected_backward(Context& ctx, const SelectedBackward& args) {
  if (args.q.dtype == DType::f64) backward<double>(ctx, args);
  else backward<float>(ctx, args);
}

}  // namespace annulus::attention::cpu
