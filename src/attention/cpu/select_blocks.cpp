// Scores and selection of blocks on the CPU, fused: neither the compressed attention's probabilities nor the scores
// exist beyond a tile.
//
// A strip is kStripWidth consecutive tokens of a (sequence, KV head) pair along vector lanes; the queries of the
// group's heads are kept transposed. For a tile of compressed keys the probabilities of one head after the other are
// summed lane by lane, the sums flow into the scores of the (at most two) selection blocks that are open, and every
// finished score is offered to the lanes' lists of the best. A lane's arithmetic is the same, in the same order,
// whatever the other lanes hold and wherever a block lies in a tile: equal probabilities give equal scores.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "attention/cpu/strip.h"
#include "attention/cpu/top_lists.h"
#include "attention/select_workspace.h"

namespace annulus::attention::cpu {
namespace {

constexpr std::int64_t kTileRows = 64;  // with a head's queries and the sums in the L1 cache
static_assert(kTileRows % kStripRows == 0);
constexpr std::int64_t kLanesAhead = 12;  // rows of q are far apart: without a prefetch each waits for memory

template <class T>
constexpr int kWidth = kStripWidth<T>;

struct SelectShape : BandShape {
  std::int64_t count, init, local;          // n, forced blocks at either end
  std::int64_t free;                        // how many are chosen by score
  std::int64_t select_block, ratio, reach;  // l', l'/d, l/d − 1: compressed blocks of the block before that count

  explicit SelectShape(const SelectBlocks& args)
      : BandShape(args.q, args.k),
        count(args.selected.dim(3)),
        init(args.init_blocks),
        local(args.local_blocks),
        free(count - init - local),
        select_block(args.select_block),
        ratio(args.select_block / args.stride),
        reach(args.block / args.stride - 1) {}
};

// A row's candidates are first … own; those of [begin, end) are chosen by score, the others are forced.
struct Candidates {
  std::int64_t first, own, begin, end;

  Candidates(const SelectShape& shape, std::int64_t token, std::int64_t start)
      : first(std::min(start, token) / shape.select_block),
        own(token / shape.select_block),
        begin(std::min(first + shape.init, own + 1)),
        end(std::max(begin, own - shape.local + 1)) {}

  bool all_fit(const SelectShape& shape) const { return end - begin <= shape.free; }
};

template <class T>
struct SelectStrip {
  using Index = LaneIndex<T>;
  alignas(64) Index first[kWidth<T>], last[kWidth<T>];  // compressed blocks a row sees; first > last: none
  alignas(64) Index begin[kWidth<T>], end[kWidth<T>];   // blocks that it chooses from; empty if scores do not matter
  alignas(64) T open[2][kWidth<T>];                     // scores of blocks `block` and block + 1 so far
  std::int64_t pair, row, count;                        // rows [row, row + count) of the pair
  KeyRange blocks, keys;  // what any row chooses from, and the compressed blocks behind it
  std::int64_t block;     // the first that is not complete
};

// A thread's memory.
template <class T>
struct Tiles {
  T *q, *shift, *products, *sums, *best, *k;
  LaneIndex<T>* chosen;

  Tiles(const SelectShape& shape, T* memory)
      : q(memory),
        shift(q + shape.group * shape.depth * kWidth<T>),
        products(shift + shape.group * kWidth<T>),
        sums(products + kTileRows * kWidth<T>),
        best(sums + kTileRows * kWidth<T>),
        k(best + 2 * shape.free * kWidth<T>),
        chosen(reinterpret_cast<LaneIndex<T>*>(best + shape.free * kWidth<T>)) {}

  static std::int64_t size(const SelectShape& shape) {
    return kWidth<T> * (shape.group * (shape.depth + 1) + 2 * kTileRows + 2 * shape.free) +
           (KeyTile<T>::in_place(shape) ? 0 : kTileRows * KeyTile<T>::stride_of(shape));
  }
};

template <class T>
class Selection {
 public:
  Selection(const Context& ctx, const SelectBlocks& args)
      : ctx_(ctx),
        shape_(args),
        q_(args.q.as<T>()),
        k_(args.k.as<T>()),
        lse_(args.lse.as<T>()),
        first_(args.first.as<std::int32_t>()),
        last_(args.last.as<std::int32_t>()),
        token_(args.token.as<std::int32_t>()),
        start_(args.start.as<std::int32_t>()),
        selected_(args.selected.as<std::int32_t>()),
        scale_(static_cast<T>(args.scale * kLog2E)) {}

  void run(T* workspace) const {
    const int threads = threads_of(shape_);
    const std::int64_t strips = (shape_.queries + kWidth<T> - 1) / kWidth<T>, units = strips * shape_.pairs();
    std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads)
    {
      const Tiles<T> tiles(shape_, workspace + omp_get_thread_num() * Tiles<T>::size(shape_));
      for (std::int64_t unit = next++; unit < units; unit = next++) {  // the last rows, which see most, come first
        strip(unit % shape_.pairs(), (strips - 1 - unit / shape_.pairs()) * kWidth<T>, tiles);
      }
    }
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634074;

  void strip(std::int64_t pair, std::int64_t row, const Tiles<T>& tiles) const {
    SelectStrip<T> s;
    TopLists<T, kStripVectors> lists(shape_.free, tiles.best, tiles.chosen);
    set(s, pair, row);
    if (s.blocks.begin < s.blocks.end) {
      lists.clear();
      load(s, tiles);
      const bool main_thread = omp_get_thread_num() == 0;
      for (std::int64_t tile = s.keys.begin / kTileRows; tile * kTileRows < s.keys.end; ++tile) {
        score_tile(s, tile, tiles, lists);
        if (main_thread) ctx_.poll();
      }
      close_until(s, s.blocks.end, lists);
      lists.sort_by_index();
    }
    write(s, lists);
  }

  // Which rows need scores, and of what.
  void set(SelectStrip<T>& s, std::int64_t pair, std::int64_t row) const {
    using Index = LaneIndex<T>;
    s.pair = pair;
    s.row = row;
    s.count = std::min<std::int64_t>(kWidth<T>, shape_.queries - row);
    s.blocks = s.keys = {std::numeric_limits<std::int64_t>::max(), 0};
    for (std::int64_t x = 0; x < kWidth<T>; ++x) {
      s.first[x] = 1;
      s.last[x] = s.begin[x] = s.end[x] = 0;
      if (x >= s.count || shape_.free == 0) continue;
      const std::int64_t at = pair / shape_.kv_heads * shape_.queries + row + x;
      const Candidates candidates(shape_, token_[at], start_[at]);
      if (candidates.all_fit(shape_)) continue;
      s.begin[x] = static_cast<Index>(candidates.begin);
      s.end[x] = static_cast<Index>(candidates.end);
      s.blocks = {std::min(s.blocks.begin, candidates.begin), std::max(s.blocks.end, candidates.end)};
      const KeyRange seen = visible_keys(first_, last_, at, shape_.keys);
      const KeyRange needed{std::max(seen.begin, candidates.begin * shape_.ratio - shape_.reach),
                            std::min(seen.end, candidates.end * shape_.ratio)};
      if (needed.empty()) continue;
      s.first[x] = static_cast<Index>(seen.begin);
      s.last[x] = static_cast<Index>(seen.end - 1);
      s.keys = {std::min(s.keys.begin, needed.begin), std::max(s.keys.end, needed.end)};
    }
    // Whole groups of rows of the product, so that a key's group does not depend on the strip.
    s.keys.begin = s.keys.begin / kStripRows * kStripRows;
    s.keys.end = std::min((s.keys.end + kStripRows - 1) / kStripRows * kStripRows, shape_.keys);
    s.block = std::min(s.blocks.begin, s.keys.begin / shape_.ratio);
  }

  // Transposed queries, and −lse · log2 e; rows that need no scores are 0 and −∞: what they hold may be anything.
  void load(SelectStrip<T>& s, const Tiles<T>& tiles) const {
    std::fill_n(s.open[0], 2 * kWidth<T>, T(0));
    const std::int64_t sequence = s.pair / shape_.kv_heads, head = s.pair % shape_.kv_heads * shape_.group;
    for (std::int64_t g = 0; g < shape_.group; ++g) {
      T* columns = tiles.q + g * shape_.depth * kWidth<T>;
      const T* lse = lse_ + (sequence * shape_.query_heads + head + g) * shape_.queries + s.row;
      for (std::int64_t x = 0; x < kWidth<T>; ++x) {
        constexpr T kNothing = -std::numeric_limits<T>::infinity();
        const bool needed = s.first[x] <= s.last[x];
        T& shift = tiles.shift[g * kWidth<T> + x];
        shift = needed && lse[x] != kNothing ? static_cast<T>(-kLog2E * lse[x]) : kNothing;
        if (!needed) {
          for (std::int64_t d = 0; d < shape_.depth; ++d) columns[d * kWidth<T> + x] = 0;
          continue;
        }
        const std::int64_t token = sequence * shape_.queries + s.row + x;
        const T* from = q_ + (token * shape_.query_heads + head + g) * shape_.depth;
        if (x + kLanesAhead < s.count) {
          const T* ahead = from + kLanesAhead * shape_.query_heads * shape_.depth;
          for (std::int64_t d = 0; d < shape_.depth; d += 64 / sizeof(T)) __builtin_prefetch(ahead + d);
        }
        for (std::int64_t d = 0; d < shape_.depth; ++d) columns[d * kWidth<T> + x] = from[d];
      }
    }
  }

  void score_tile(SelectStrip<T>& s, std::int64_t tile, const Tiles<T>& tiles,
                  TopLists<T, kStripVectors>& lists) const {
    const std::int64_t begin = std::max(tile * kTileRows, s.keys.begin);
    const std::int64_t end = std::min((tile + 1) * kTileRows, s.keys.end);
    bool some = false, partial = false;
    for (std::int64_t x = 0; x < kWidth<T>; ++x) {
      if (s.begin[x] >= s.end[x]) continue;
      some |= s.first[x] < end && s.last[x] >= begin && s.first[x] <= s.last[x];
      partial |= s.first[x] > begin || s.last[x] < end - 1;
    }
    if (!some) return;  // between the documents or the chunks of the strip's rows
    const T* k = k_ + shape_.kv_offset(s.pair) + begin * shape_.kv_stride();
    std::int64_t stride = shape_.kv_stride();
    if (!KeyTile<T>::in_place(shape_)) {
      const std::int64_t to = KeyTile<T>::stride_of(shape_);
      for (std::int64_t i = 0; i < end - begin; ++i) std::copy_n(k + i * stride, shape_.depth, tiles.k + i * to);
      k = tiles.k;
      stride = to;
    }
    std::fill_n(tiles.sums, (end - begin) * kWidth<T>, T(0));
    for (std::int64_t g = 0; g < shape_.group; ++g) {
      multiply_strip<T, kStripVectors>(k, stride, tiles.q + g * shape_.depth * kWidth<T>, shape_.depth, end - begin,
                                       tiles.products);
      add_probabilities(tiles.products, scale_, tiles.shift + g * kWidth<T>, end - begin, tiles.sums);
    }
    if (partial) mask(s, begin, end, tiles.sums);
    add_scores(s, begin, end, tiles.sums, lists);
  }

  // sums[i][x] += 2^(scale · products[i][x] + shift[x]) for one head. Not inlined: its constants and the product's
  // accumulators would compete for registers.
  [[gnu::noinline]] static void add_probabilities(const T* products, T scale, const T* shift, std::int64_t count,
                                                  T* sums) {
    Vector<T> shifts[kStripVectors];
    for (int n = 0; n < kStripVectors; ++n) shifts[n] = vector_at(shift + n * kLanes<T>);
    for (std::int64_t i = 0; i < count; ++i, products += kWidth<T>, sums += kWidth<T>) {
#pragma GCC unroll 4
      for (int n = 0; n < kStripVectors; ++n)
        vector_at(sums + n * kLanes<T>) += exp2_of<T>(vector_at(products + n * kLanes<T>) * scale + shifts[n]);
    }
  }

  // Keys that a row does not see count 0, whatever they hold.
  static void mask(const SelectStrip<T>& s, std::int64_t begin, std::int64_t end, T* sums) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto key = static_cast<LaneIndex<T>>(i);
      for (int n = 0; n < kStripVectors; ++n, sums += kLanes<T>) {
        const auto seen = (index_at<T>(s.first + n * kLanes<T>) <= key) & (index_at<T>(s.last + n * kLanes<T>) >= key);
        vector_at(sums) = seen ? vector_at(sums) : Vector<T>{};
      }
    }
  }

  // Compressed block i counts for the selection block it starts in and, if it ends in the next one, for that.
  void add_scores(SelectStrip<T>& s, std::int64_t begin, std::int64_t end, const T* sums,
                  TopLists<T, kStripVectors>& lists) const {
    for (std::int64_t i = begin; i < end;) {
      close_until(s, i / shape_.ratio, lists);
      const std::int64_t from = s.block * shape_.ratio, stop = std::min(end, from + shape_.ratio);
      for (; i < stop; ++i, sums += kWidth<T>) {
        const std::int64_t tile = i - from, into_next = tile - (shape_.ratio - shape_.reach) + 1;
        add(std::min(shape_.reach + 1, shape_.ratio - tile), sums, s.open[0]);
        if (into_next > 0) add(into_next, sums, s.open[1]);
      }
    }
  }

  static void add(std::int64_t weight, const T* sums, T* score) {
    for (int n = 0; n < kStripVectors; ++n)
      vector_at(score + n * kLanes<T>) += static_cast<T>(weight) * vector_at(sums + n * kLanes<T>);
  }

  // Offers the blocks before `block`, whose scores are complete.
  static void close_until(SelectStrip<T>& s, std::int64_t block, TopLists<T, kStripVectors>& lists) {
    for (; s.block < block; ++s.block) {
      const auto index = static_cast<LaneIndex<T>>(s.block);
      for (int n = 0; n < kStripVectors; ++n) {
        Vector<T>& score = vector_at(s.open[0] + n * kLanes<T>);
        Vector<T>& next = vector_at(s.open[1] + n * kLanes<T>);
        const auto wanted =
            (index_at<T>(s.begin + n * kLanes<T>) <= index) & (index_at<T>(s.end + n * kLanes<T>) > index);
        lists.offer(n, index, score > 0 ? score : Vector<T>{}, wanted);  // NaN counts as 0
        score = next;
        next = Vector<T>{};
      }
    }
  }

  void write(const SelectStrip<T>& s, const TopLists<T, kStripVectors>& lists) const {
    for (std::int64_t x = 0; x < s.count; ++x) {
      const std::int64_t at = s.pair / shape_.kv_heads * shape_.queries + s.row + x;
      const Candidates candidates(shape_, token_[at], start_[at]);
      std::int32_t* const row = selected_ + (at * shape_.kv_heads + s.pair % shape_.kv_heads) * shape_.count;
      std::int32_t* to = row;
      const auto put = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t block = begin; block < end; ++block) *to++ = static_cast<std::int32_t>(block);
      };
      put(candidates.first, candidates.begin);
      if (candidates.all_fit(shape_)) {
        put(candidates.begin, candidates.end);
      } else {
        for (std::int64_t i = 0; i < shape_.free; ++i) *to++ = static_cast<std::int32_t>(lists.index(i, x));
      }
      put(candidates.end, candidates.own + 1);
      std::fill(to, row + shape_.count, -1);
    }
  }

  const Context& ctx_;
  SelectShape shape_;
  const T *q_, *k_, *lse_;
  const std::int32_t *first_, *last_, *token_, *start_;
  std::int32_t* selected_;
  T scale_;
};

template <class T>
std::int64_t select_bytes(const SelectBlocks& args) {
  const SelectShape shape(args);
  return threads_of(shape) * Tiles<T>::size(shape) * static_cast<std::int64_t>(sizeof(T));
}

template <class T>
void select(Context& ctx, const SelectBlocks& args) {
  const ops::Workspace workspace(ctx, "select_blocks", select_bytes<T>(args));
  Selection<T>(ctx, args).run(workspace.as<T>());
}

}  // namespace

std::int64_t workspace_bytes(const SelectBlocks& args) {
  return args.q.dtype == DType::f64 ? select_bytes<double>(args) : select_bytes<float>(args);
}

void select_blocks(Context& ctx, const SelectBlocks& args) {
  if (args.q.dtype == DType::f64) select<double>(ctx, args);
  else select<float>(ctx, args);
}

}  // namespace annulus::attention::cpu
