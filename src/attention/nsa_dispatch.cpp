// The operations of attention/compress.h and select.h: check, plan, or run the twin of the context's device.
#include "attention/checker.h"
#include "attention/compress.h"
#include "attention/select_workspace.h"
#include "ops/cuda_missing.h"
#include "ops/dispatch.h"

namespace annulus::attention {
namespace {

void check_blocks(const Checker& is, const char* name, const TensorView& x, const TensorView& halo,
                  const LocalBlocks& blocks) {
  if (x.shape.rank() != 4) is.fail(name, x, "[B, C·c, Hkv, D]");
  const std::int64_t l = blocks.block, d = blocks.stride;
  ANNULUS_CHECK(d >= 1 && l >= d && l % d == 0, "compression: blocks of {} every {} rows", l, d);
  ANNULUS_CHECK((blocks.chunks == 1 || blocks.chunks == 2) && x.dim(1) % blocks.chunks == 0,
                "compression: {} rows in {} chunks", x.dim(1), blocks.chunks);
  if (halo.shape.rank())
    is.tensor(name[0] == 'x' ? "halo" : "d_halo", halo, x.dtype, {x.dim(0), blocks.chunks, l - d, x.dim(2), x.dim(3)});
  const std::int64_t rows = x.dim(1) / blocks.chunks + (halo.shape.rank() ? l - d : 0);
  for (std::int64_t c = 0; c < blocks.chunks; ++c) {
    const std::int64_t n = blocks.num_blocks[c];
    ANNULUS_CHECK(n >= 0 && n <= blocks.per_chunk && (n == 0 || (n - 1) * d + l <= rows),
                  "compression: {} blocks of {} every {} in {} rows, {} in memory", n, l, d, rows, blocks.per_chunk);
  }
}

Shape block_shape(const TensorView& x, const LocalBlocks& blocks) {
  return {x.dim(0), blocks.chunks, blocks.per_chunk, x.dim(2), x.dim(3)};
}

// Gradients of blocks are of the working type or stat: on the CPU the same.
DType gradient_type(const Checker& is, const char* name, const TensorView& x, DType stat) {
  is.working(x, name);
  if (x.dtype != stat && stat_type(x.dtype) != stat) is.fail(name, x, "the type of gradients, or the working type");
  return x.dtype;
}

void check_range(const Checker& is, const char* name, const TensorView& u, const TensorView& x,
                 const LocalBlocks& blocks, std::int64_t first) {
  if (u.shape.rank() != 2) is.fail(name, u, "[R, l·D]");
  is.tensor(name, u, u.dtype, {u.dim(0), blocks.block * x.dim(3)});
  ANNULUS_CHECK(first >= 0 && first + u.dim(0) <= x.dim(0) * blocks.rows() * x.dim(2),
                "compression: block vectors {} … {} of {}", first, first + u.dim(0) - 1,
                x.dim(0) * blocks.rows() * x.dim(2));
}

void check(const Context& ctx, const BlockMean& a) {
  const Checker is(ctx, "block_mean");
  is.working(a.x, "x");
  check_blocks(is, "x", a.x, a.halo, a.blocks);
  is.tensor("x", a.x, a.x.dtype, a.x.shape);
  is.tensor("y", a.y, a.x.dtype, block_shape(a.x, a.blocks));
}

void check(const Context& ctx, const BlockMeanBackward& a) {
  const Checker is(ctx, "block_mean_backward");
  check_blocks(is, "d_x", a.d_x, a.d_halo, a.blocks);
  is.tensor("d_x", a.d_x, stat_type(a.d_x.dtype), a.d_x.shape);
  is.tensor("d_y", a.d_y, gradient_type(is, "d_y", a.d_y, a.d_x.dtype), block_shape(a.d_x, a.blocks));
}

void check(const Context& ctx, const UnfoldBlocks& a) {
  const Checker is(ctx, "unfold_blocks");
  is.working(a.x, "x");
  check_blocks(is, "x", a.x, a.halo, a.blocks);
  is.tensor("x", a.x, a.x.dtype, a.x.shape);
  check_range(is, "u", a.u, a.x, a.blocks, a.first_row);
  is.tensor("u", a.u, a.x.dtype, a.u.shape);
}

void check(const Context& ctx, const FoldBlocks& a) {
  const Checker is(ctx, "fold_blocks");
  check_blocks(is, "d_x", a.d_x, a.d_halo, a.blocks);
  is.tensor("d_x", a.d_x, stat_type(a.d_x.dtype), a.d_x.shape);
  (void)gradient_type(is, "d_u", a.d_u, a.d_x.dtype);
  check_range(is, "d_u", a.d_u, a.d_x, a.blocks, a.first_row);
}

void check(const Context& ctx, const NsaBounds& a) {
  const Checker is(ctx, "nsa_bounds");
  const Shape& shape = a.token.shape;
  for (const auto& [name, view] :
       {std::pair{"token", &a.token}, std::pair{"start", &a.start}, std::pair{"compressed_first", &a.compressed_first},
        std::pair{"compressed_last", &a.compressed_last}, std::pair{"window_first", &a.window_first},
        std::pair{"window_last", &a.window_last}}) {
    is.tensor(name, *view, DType::i32, shape);
  }
  const bool alone = a.chunk_begin[0] == 0 && a.chunk_begin[1] < 0;  // all keys that a row may see are in the chunk
  ANNULUS_CHECK(a.stride >= 1 && a.block >= a.stride && a.block % a.stride == 0 && a.window >= 1 && a.halo >= 0 &&
                    a.num_blocks >= 0 && (alone || a.halo >= a.window - 1),
                "nsa_bounds: block {}, stride {}, window {}, halo {}, {} blocks", a.block, a.stride, a.window, a.halo,
                a.num_blocks);
}

// q [B, T, Hq, D], k [B, S, Hkv, D], selected [B, T, Hkv, n], token and start [B, T].
template <class Args>
void check_selection(const Checker& is, const Args& a) {
  is.working(a.q);
  if (a.q.shape.rank() != 4) is.fail("q", a.q, "[B, T, Hq, D]");
  if (a.k.shape.rank() != 4) is.fail("k", a.k, "[B, S, Hkv, D]");
  is.tensor("q", a.q, a.q.dtype, a.q.shape);
  is.tensor("k", a.k, a.q.dtype, {a.q.dim(0), a.k.dim(1), a.k.dim(2), a.q.dim(3)});
  if (a.k.dim(2) < 1 || a.q.dim(2) % a.k.dim(2) != 0) is.fail("k", a.k, "KV heads that divide the query heads");
  if (a.selected.shape.rank() != 4) is.fail("selected", a.selected, "[B, T, Hkv, n]");
  is.tensor("selected", a.selected, DType::i32, {a.q.dim(0), a.q.dim(1), a.k.dim(2), a.selected.dim(3)});
  is.tensor("token", a.token, DType::i32, {a.q.dim(0), a.q.dim(1)});
  is.tensor("start", a.start, DType::i32, {a.q.dim(0), a.q.dim(1)});
  ANNULUS_CHECK(a.scale > 0 && a.select_block >= 1 && a.selected.dim(3) >= 1,
                "selection: scale {}, {} blocks of {} tokens", a.scale, a.selected.dim(3), a.select_block);
}

void check(const Context& ctx, const SelectBlocks& a) {
  const Checker is(ctx, "select_blocks");
  check_selection(is, a);
  is.tensor("first", a.first, DType::i32, a.token.shape);
  is.tensor("last", a.last, DType::i32, a.token.shape);
  is.tensor("lse", a.lse, stat_type(a.q.dtype), statistics_of(a.q));
  ANNULUS_CHECK(a.stride >= 1 && a.block % a.stride == 0 && a.select_block % a.stride == 0 && a.block >= 1 &&
                    a.block <= a.select_block,
                "select_blocks: blocks of {} every {}, selected ones of {}", a.block, a.stride, a.select_block);
  ANNULUS_CHECK(a.init_blocks >= 0 && a.local_blocks >= 1 && a.init_blocks + a.local_blocks <= a.selected.dim(3),
                "select_blocks: {} initial and {} local blocks inside {}", a.init_blocks, a.local_blocks,
                a.selected.dim(3));
}

void check_keys(const Checker& is, const TensorView& k, const KeyChunks& keys, std::int64_t select_block) {
  const bool two = keys.begin[1] >= 0;
  if (keys.chunk * (two ? 2 : 1) != k.dim(1)) is.fail("k", k, fmt::format("chunks of {} rows", keys.chunk));
  ANNULUS_CHECK(keys.begin[0] >= 0 && keys.begin[0] % select_block == 0 &&
                    (!two || (keys.begin[1] % select_block == 0 && keys.chunk % select_block == 0 &&
                              keys.begin[1] >= keys.begin[0] + keys.chunk)),
                "selection: chunks of {} tokens from {} and {}, blocks of {}", keys.chunk, keys.begin[0], keys.begin[1],
                select_block);
}

void check(const Context& ctx, const SelectedForward& a) {
  const Checker is(ctx, "selected_forward");
  check_selection(is, a);
  is.tensor("v", a.v, a.q.dtype, a.k.shape);
  check_keys(is, a.k, a.keys, a.select_block);
  const DType stat = stat_type(a.q.dtype);
  is.tensor("o", a.o, stat, a.q.shape);
  is.tensor("lse", a.lse, stat, statistics_of(a.q));
  if (a.out.shape.rank() > 0) is.tensor("out", a.out, a.q.dtype, a.q.shape);
}

void check(const Context& ctx, const SelectedBackward& a) {
  const Checker is(ctx, "selected_backward");
  check_selection(is, a);
  is.tensor("v", a.v, a.q.dtype, a.k.shape);
  check_keys(is, a.k, a.keys, a.select_block);
  const DType stat = stat_type(a.q.dtype);
  is.tensor("d_o", a.d_o, a.q.dtype, a.q.shape);
  is.tensor("lse", a.lse, stat, statistics_of(a.q));
  is.tensor("delta", a.delta, stat, a.lse.shape);
  is.tensor("d_q", a.d_q, stat, a.q.shape);
  is.tensor("d_k", a.d_k, stat, a.k.shape);
  is.tensor("d_v", a.d_v, stat, a.k.shape);
}

void check(const Context& ctx, const GatherBlocks& a) {
  const Checker is(ctx, "gather_blocks");
  is.working(a.k, "k");
  if (a.k.shape.rank() != 4 || a.k.dim(0) != 1) is.fail("k", a.k, "[1, S, Hkv, D]");
  if (a.k_out.shape.rank() != 4) is.fail("k_out", a.k_out, "[1, R, Hkv, D]");
  is.tensor("k", a.k, a.k.dtype, a.k.shape);
  is.tensor("v", a.v, a.k.dtype, a.k.shape);
  is.tensor("k_out", a.k_out, a.k.dtype, {1, a.k_out.dim(1), a.k.dim(2), a.k.dim(3)});
  is.tensor("v_out", a.v_out, a.k.dtype, a.k_out.shape);
  if (a.selected.shape.rank() != 4) is.fail("selected", a.selected, "[1, 1, Hkv, n]");
  is.tensor("selected", a.selected, DType::i32, {1, 1, a.k.dim(2), a.selected.dim(3)});
  ANNULUS_CHECK(a.select_block >= 1 && a.k_out.dim(1) <= a.selected.dim(3) * a.select_block,
                "gather_blocks: {} rows of {} blocks of {} tokens", a.k_out.dim(1), a.selected.dim(3), a.select_block);
}

}  // namespace

#define ANNULUS_DISPATCH_OP(name, Args)                                                           \
  void name(Context& ctx, const Args& args) {                                                     \
    ops::dispatch<Args>(                                                                          \
        ctx, args, #name, [](const Context& c, const Args& a) { check(c, a); },                   \
        [](DeviceKind device, const Args& a) -> std::int64_t {                                    \
          return device == DeviceKind::cuda ? cuda::workspace_bytes(a) : cpu::workspace_bytes(a); \
        },                                                                                        \
        cpu::name, ANNULUS_CUDA_TWIN(name));                                                      \
  }
ANNULUS_COMPRESS_OPS(ANNULUS_DISPATCH_OP)
ANNULUS_SELECT_OPS(ANNULUS_DISPATCH_OP)

#ifdef ANNULUS_CUDA
namespace cuda {
ANNULUS_NSA_OPS_WITHOUT_CUDA(ANNULUS_REFUSE_OP)
}  // namespace cuda
#endif

}  // namespace annulus::attention
