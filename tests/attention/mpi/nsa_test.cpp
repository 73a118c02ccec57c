// The three branches of native sparse attention on P ranks against naive fp64 attention over whole sequences: each
// branch by its closed form (spec/nsa.md), forward and backward, both layouts, documents across chunk edges.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "attention/nsa.h"
#include "core/device_memory.h"
#include "core/rng.h"
#include "ops/ops.h"
#include "parallel/mpi_runtime.h"
#include "reference/attention.h"

namespace annulus::attention {
namespace {

parallel::MpiRuntime& runtime() {
  static parallel::MpiRuntime* const kRuntime = new parallel::MpiRuntime(nullptr, nullptr);
  return *kRuntime;
}

using Values = std::vector<double>;

struct Case {
  std::int64_t tokens, batch, heads, kv_heads, depth;
  NsaShape shape;
  std::vector<std::int64_t> documents;  // lengths
};

// One global problem: q, three pairs of K and V, an upstream gradient per branch.
struct Problem {
  Case c;
  std::vector<std::int32_t> start;  // [S], the same in every sequence
  Values q, k[3], v[3], d_out[3];

  explicit Problem(const Case& in) : c(in) {
    for (const auto length : c.documents)
      start.insert(start.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(start.size()));
    const auto draw = [](const char* name, std::int64_t n) {
      const CounterRng rng(11, name);
      Values out(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = rng.normal(i);
      return out;
    };
    const std::int64_t rows = c.batch * c.tokens;
    q = draw("q", rows * c.heads * c.depth);
    for (int b = 0; b < 3; ++b) {
      const std::string name(1, static_cast<char>('a' + b));
      k[b] = draw(("k" + name).c_str(), rows * c.kv_heads * c.depth);
      v[b] = draw(("v" + name).c_str(), rows * c.kv_heads * c.depth);
      d_out[b] = draw(("d" + name).c_str(), rows * c.heads * c.depth);
    }
  }

  // Naive attention of a branch: bounds(t) of the key rows; keys of the caller.
  reference::BandOutput<double> attend(
      int branch, const Values& keys, const Values& values, std::int64_t num_keys,
      const std::function<std::pair<std::int64_t, std::int64_t>(std::int64_t)>& bounds) const {
    reference::BandInput<double> in;
    in.size = {c.batch, c.tokens, num_keys, c.heads, c.kv_heads, c.depth};
    in.scale = 1 / std::sqrt(static_cast<double>(c.depth));
    in.q = q;
    in.k = keys;
    in.v = values;
    in.d_o = d_out[branch];
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const auto [first, last] = bounds(t);
        in.first.push_back(static_cast<std::int32_t>(first));
        in.last.push_back(static_cast<std::int32_t>(last));
      }
    }
    return reference::band_attention(in);
  }

  // The mean of every compression block of x [B, S, Hkv, D].
  Values compress(const Values& x) const {
    const std::int64_t blocks = c.shape.num_blocks(c.tokens), width = c.kv_heads * c.depth;
    Values out(static_cast<std::size_t>(c.batch * blocks * width), 0);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t i = 0; i < blocks; ++i) {
        for (std::int64_t j = 0; j < c.shape.block; ++j) {
          for (std::int64_t e = 0; e < width; ++e) {
            out[static_cast<std::size_t>((b * blocks + i) * width + e)] +=
                x[static_cast<std::size_t>((b * c.tokens + i * c.shape.stride + j) * width + e)] /
                static_cast<double>(c.shape.block);
          }
        }
      }
    }
    return out;
  }
};

// The same problem on this rank, run through nsa_forward and nsa_backward.
class Ranks {
 public:
  Ranks(const Problem& p, parallel::Communicator& world, parallel::LayoutKind kind)
      : p_(p),
        mesh_(world, {{"data", 1}, {"sequence", world.size()}}),
        layout_(kind, p.c.tokens, world.size(), p.c.shape.chunk_multiple(), p.c.shape.min_chunk()),
        arena_("tensors", DeviceKind::cpu),
        scratch_("scratch", DeviceKind::cpu) {
    ctx_.scratch = &scratch_;
    ctx_.progress = parallel::mpi_progress;
    for (int pass = 0; pass < 2; ++pass) {
      allocate();
      ctx_.planning = pass == 0;
      if (pass == 1) fill();
      run();
      if (pass == 0) {
        arena_.commit();
        scratch_.commit();
      }
    }
  }

  // Largest |found − wanted| over the rank's rows of out[branch], lse apart.
  double error(const TensorView& found, const Values& wanted) const {
    const Values local = shard(wanted, found.numel() / (p_.c.batch * layout_.local_tokens()));
    double worst = 0;
    for (std::size_t i = 0; i < local.size(); ++i) {
      const double e = std::abs(found.as<double>()[i] - local[i]);
      worst = e <= worst ? worst : e;
    }
    return worst;
  }
  // The rank's rows of [B, S, width].
  template <class T>
  std::vector<T> shard(const std::vector<T>& whole, std::int64_t width) const {
    std::vector<T> rows;
    for (std::int64_t b = 0; b < p_.c.batch; ++b) {
      for (std::int64_t row = 0; row < layout_.local_tokens(); ++row) {
        const std::int64_t t = layout_.global_index(mesh_.coordinate("sequence"), row);
        const auto from = whole.begin() + (b * p_.c.tokens + t) * width;
        rows.insert(rows.end(), from, from + width);
      }
    }
    return rows;
  }

  TensorView out[3], lse[3], selected, d_q, d_kv[3];

 private:
  void allocate() {
    const Case& c = p_.c;
    const std::int64_t local = layout_.local_tokens();
    const LocalBlocks blocks = local_blocks(c.shape, layout_, mesh_.coordinate("sequence"));
    const auto take = [&](const char* name, DType dtype, const Shape& shape) {
      const TensorView t = arena_.allocate(name, dtype, shape);
      if (t.data) std::memset(t.data, 0xff, static_cast<std::size_t>(t.bytes()));  // NaN
      return t;
    };
    const Shape rows{c.batch, local, c.heads, c.depth}, pair{2, c.batch, local, c.kv_heads, c.depth};
    q_ = take("q", DType::f64, rows);
    d_q = take("d_q", DType::f64, rows);
    for (int b = 0; b < 3; ++b) {
      kv_[b] = take("kv", DType::f64, pair);
      d_kv[b] = take("d_kv", DType::f64, pair);
      out[b] = take("out", DType::f64, rows);
      d_out_[b] = take("d_out", DType::f64, rows);
      lse[b] = take("lse", DType::f64, {c.batch, c.heads, local});
    }
    compressed_ = take("compressed", DType::f64, {2, c.batch, blocks.rows(), c.kv_heads, c.depth});
    d_compressed_ = take("d_compressed", DType::f64, compressed_.shape);
    selected = take("selected", DType::i32, {c.batch, local, c.kv_heads, c.shape.select_count});
    batch_.global_first = take("first", DType::i32, {c.batch, local});
    batch_.global_last = take("last", DType::i32, {c.batch, local});
    batch_.document_start = take("start", DType::i32, {c.batch, local});
    const Shape halo{c.batch, 2, c.shape.block - c.shape.stride, c.kv_heads, c.depth};
    has_halo_ = layout_.ranks() > 1 && halo[2] > 0;
    for (auto* t : {&halo_k_, &halo_v_, &d_halo_k_, &d_halo_v_}) {
      if (has_halo_) *t = take("halo", DType::f64, halo);
    }
    batch_.layout = &layout_;
    batch_.mesh = &mesh_;
    batch_.batch = c.batch;
    batch_.document_hops = needed_hops(layout_, whole_start(), c.batch);
  }
  std::vector<std::int32_t> whole_start() const {
    std::vector<std::int32_t> all;
    for (std::int64_t b = 0; b < p_.c.batch; ++b) all.insert(all.end(), p_.start.begin(), p_.start.end());
    return all;
  }
  static void put(const TensorView& to, const Values& from) { std::copy(from.begin(), from.end(), to.as<double>()); }
  void fill() {
    const Case& c = p_.c;
    put(q_, shard(p_.q, c.heads * c.depth));
    for (int b = 0; b < 3; ++b) {
      put(kv_[b][0], shard(p_.k[b], c.kv_heads * c.depth));
      put(kv_[b][1], shard(p_.v[b], c.kv_heads * c.depth));
      put(d_out_[b], shard(p_.d_out[b], c.heads * c.depth));
    }
    const auto start = shard(whole_start(), 1);
    for (std::int64_t i = 0; i < batch_.global_last.numel(); ++i) {
      batch_.global_last.as<std::int32_t>()[i] =
          static_cast<std::int32_t>(layout_.global_index(mesh_.coordinate("sequence"), i % layout_.local_tokens()));
      batch_.document_start.as<std::int32_t>()[i] = start[static_cast<std::size_t>(i)];
    }
  }
  void run() {
    const Case& c = p_.c;
    const LocalBlocks blocks = local_blocks(c.shape, layout_, mesh_.coordinate("sequence"));
    const Shape by_chunk{c.batch, blocks.chunks, blocks.per_chunk, c.kv_heads, c.depth};
    const std::int64_t count = c.shape.block - c.shape.stride;
    if (has_halo_) fetch_halo(ctx_, batch_, HaloSide::behind, count, kv_[0][0], kv_[0][1], halo_k_, halo_v_);
    block_mean(ctx_, {.x = kv_[0][0], .halo = halo_k_, .y = compressed_[0].reshape(by_chunk), .blocks = blocks});
    block_mean(ctx_, {.x = kv_[0][1], .halo = halo_v_, .y = compressed_[1].reshape(by_chunk), .blocks = blocks});
    nsa_forward(ctx_, batch_,
                {.shape = c.shape,
                 .q = q_,
                 .compressed = compressed_,
                 .kv_selected = kv_[1],
                 .kv_window = kv_[2],
                 .out = {out[0], out[1], out[2]},
                 .lse = {lse[0], lse[1], lse[2]},
                 .selected = selected});
    nsa_backward(ctx_, batch_,
                 {.shape = c.shape,
                  .q = q_,
                  .compressed = compressed_,
                  .kv_selected = kv_[1],
                  .kv_window = kv_[2],
                  .out = {out[0], out[1], out[2]},
                  .lse = {lse[0], lse[1], lse[2]},
                  .selected = selected,
                  .d_out = {d_out_[0], d_out_[1], d_out_[2]},
                  .d_q = d_q,
                  .d_compressed = d_compressed_,
                  .d_kv_selected = d_kv[1],
                  .d_kv_window = d_kv[2]});
    ops::fill(ctx_, {.y = d_kv[0], .value = 0});
    if (has_halo_) {
      ops::fill(ctx_, {.y = d_halo_k_, .value = 0});
      ops::fill(ctx_, {.y = d_halo_v_, .value = 0});
    }
    const TensorView d_k = d_compressed_[0].reshape(by_chunk), d_v = d_compressed_[1].reshape(by_chunk);
    block_mean_backward(ctx_, {.d_y = d_k, .d_x = d_kv[0][0], .d_halo = d_halo_k_, .blocks = blocks});
    block_mean_backward(ctx_, {.d_y = d_v, .d_x = d_kv[0][1], .d_halo = d_halo_v_, .blocks = blocks});
    if (has_halo_) {
      return_halo(ctx_, batch_, HaloSide::behind, count, d_halo_k_, d_halo_v_, d_kv[0][0], d_kv[0][1]);
    }
  }

  const Problem& p_;
  parallel::Mesh mesh_;
  parallel::SequenceLayout layout_;
  Arena arena_, scratch_;
  Context ctx_;
  SequenceBatch batch_;
  TensorView q_, kv_[3], d_out_[3], compressed_, d_compressed_, halo_k_, halo_v_, d_halo_k_, d_halo_v_;
  bool has_halo_ = false;
};

// fp64 sums of some hundred terms of size 1.
constexpr double kTolerance = 1e-12;

Values sum(const Values& a, const Values& b, const Values& c) {
  Values out(a);
  for (std::size_t i = 0; i < a.size(); ++i) out[i] += b[i] + c[i];
  return out;
}

// The transpose of Problem::compress.
Values spread(const Problem& p, const Values& d) {
  const Case& c = p.c;
  const std::int64_t blocks = c.shape.num_blocks(c.tokens), width = c.kv_heads * c.depth;
  Values out(static_cast<std::size_t>(c.batch * c.tokens * width), 0);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t i = 0; i < blocks; ++i) {
      for (std::int64_t j = 0; j < c.shape.block; ++j) {
        for (std::int64_t e = 0; e < width; ++e) {
          out[static_cast<std::size_t>((b * c.tokens + i * c.shape.stride + j) * width + e)] +=
              d[static_cast<std::size_t>((b * blocks + i) * width + e)] / static_cast<double>(c.shape.block);
        }
      }
    }
  }
  return out;
}

// n · l' >= S: the selection is dense attention within documents.
void check(const Case& c, parallel::Communicator& world, parallel::LayoutKind kind) {
  ASSERT_GE(c.shape.select_count * c.shape.select_block, c.tokens);
  const Problem p(c);
  const Ranks got(p, world, kind);
  const auto first = [&](std::int64_t t) -> std::int64_t { return p.start[static_cast<std::size_t>(t)]; };
  const auto compressed =
      p.attend(0, p.compress(p.k[0]), p.compress(p.v[0]), c.shape.num_blocks(c.tokens), [&](std::int64_t t) {
        std::int64_t lo = 0, hi = -1;  // from the definition of visible
        for (std::int64_t i = 0, seen = 0; i < c.shape.num_blocks(c.tokens); ++i) {
          if (i * c.shape.stride < first(t) || i * c.shape.stride + c.shape.block - 1 > t) continue;
          if (seen++ == 0) lo = i;
          hi = i;
        }
        return std::pair{lo, hi};
      });
  const auto selected = p.attend(1, p.k[1], p.v[1], c.tokens, [&](std::int64_t t) { return std::pair{first(t), t}; });
  const auto window = p.attend(2, p.k[2], p.v[2], c.tokens, [&](std::int64_t t) {
    return std::pair{std::max(first(t), t - c.shape.window + 1), t};
  });
  EXPECT_LE(got.error(got.out[0], compressed.o), kTolerance);
  EXPECT_LE(got.error(got.out[1], selected.o), kTolerance);
  EXPECT_LE(got.error(got.out[2], window.o), kTolerance);
  EXPECT_LE(got.error(got.d_q, sum(compressed.d_q, selected.d_q, window.d_q)), kTolerance);
  EXPECT_LE(got.error(got.d_kv[0][0], spread(p, compressed.d_k)), kTolerance);
  EXPECT_LE(got.error(got.d_kv[0][1], spread(p, compressed.d_v)), kTolerance);
  EXPECT_LE(got.error(got.d_kv[1][0], selected.d_k), kTolerance);
  EXPECT_LE(got.error(got.d_kv[1][1], selected.d_v), kTolerance);
  EXPECT_LE(got.error(got.d_kv[2][0], window.d_k), kTolerance);
  EXPECT_LE(got.error(got.d_kv[2][1], window.d_v), kTolerance);
}

constexpr parallel::LayoutKind kLayouts[] = {parallel::LayoutKind::zigzag, parallel::LayoutKind::contiguous};

Case spread_case(std::int64_t kv_heads, std::vector<std::int64_t> documents) {
  std::int64_t tokens = 0;
  for (const auto length : documents) tokens += length;
  return {tokens,
          2,
          8,
          kv_heads,
          5,
          {.block = 6,
           .stride = 2,
           .select_block = 6,
           .select_count = 24,
           .init_blocks = 1,
           .local_blocks = 2,
           .window = 11},
          std::move(documents)};
}

TEST(NsaBranches, EqualTheirClosedForms) {
  for (const auto layout : kLayouts) {
    for (const std::int64_t kv_heads : {8, 2, 1}) {
      SCOPED_TRACE(kv_heads);
      check(spread_case(kv_heads, {144}), runtime().world(), layout);
      check(spread_case(kv_heads, {1, 40, 5, 13, 61, 24}), runtime().world(), layout);
    }
  }
}

// Compression of single tokens is dense attention on its K, V; so is a window as long as the sequence (one rank: a halo
// comes from one chunk only).
TEST(NsaBranches, SingleTokenBlocksAndLongWindows) {
  Case c = spread_case(2, {50, 22});
  c.shape = {
      .block = 1, .stride = 1, .select_block = 1, .select_count = 72, .init_blocks = 0, .local_blocks = 1, .window = 1};
  for (const auto layout : kLayouts) check(c, runtime().world(), layout);
  const auto alone = runtime().world().split(runtime().world().rank(), 0);
  c.shape.window = 72;
  check(c, *alone, kLayouts[0]);
  c.shape.window = 1000;
  check(c, *alone, kLayouts[0]);
}

// S = l − 1, l, l + 1, and lengths that are no multiple of anything.
TEST(NsaBranches, LengthsOnOneRank) {
  const auto alone = runtime().world().split(runtime().world().rank(), 0);
  for (const std::int64_t tokens : {1, 5, 6, 7, 8, 11, 12, 13, 71}) {
    SCOPED_TRACE(tokens);
    check(spread_case(2, {tokens}), *alone, kLayouts[0]);
    if (tokens > 7) check(spread_case(2, {3, tokens - 3}), *alone, kLayouts[0]);
  }
}

// P ranks choose as one does, and a row's choice has no index outside its candidates.
TEST(NsaBranches, SelectionIsThatOfOneRank) {
  const auto alone = runtime().world().split(runtime().world().rank(), 0);
  Case c = spread_case(2, {1, 40, 5, 13, 61, 24});
  c.shape.select_count = 4;
  const Problem p(c);
  const Ranks one(p, *alone, kLayouts[0]);
  const auto* whole = one.selected.as<std::int32_t>();
  for (const auto layout : kLayouts) {
    const Ranks many(p, runtime().world(), layout);
    const std::vector<std::int32_t> all(whole, whole + one.selected.numel());
    const auto wanted = many.shard(all, c.kv_heads * c.shape.select_count);
    const auto* found = many.selected.as<std::int32_t>();
    EXPECT_EQ(std::vector<std::int32_t>(found, found + many.selected.numel()), wanted);
    // The carried state: outputs equal to rounding.
    for (int b = 0; b < 3; ++b) {
      const Values reference(one.out[b].as<double>(), one.out[b].as<double>() + one.out[b].numel());
      EXPECT_LE(many.error(many.out[b], reference), kTolerance);
    }
  }
}

}  // namespace
}  // namespace annulus::attention
