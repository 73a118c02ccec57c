#include "model/compression.h"

#include <algorithm>

namespace annulus::model {
namespace {

constexpr std::int64_t kRangeBytes = std::int64_t{8} << 20;  // of unfolded blocks held at once

}  // namespace

Compression::Compression(const std::string& name, const NsaConfig& c, std::int64_t kv_heads, std::int64_t head_dim)
    : mlp_(c.compression == "mlp"),
      block_(c.block),
      head_dim_(head_dim),
      pe_{.name = name + ".pe", .shape = {c.block, head_dim}},
      w1_{.name = name + ".w1", .shape = {c.hidden, c.block * head_dim}},
      w2_{.name = name + ".w2", .shape = {head_dim, c.hidden}, .init = Init::zeros} {
  pe_.uses_per_token = 0;
  w1_.uses_per_token = w2_.uses_per_token = static_cast<double>(kv_heads) / static_cast<double>(c.stride);
}

template <class Visit>
void Compression::for_row_ranges(const TensorView& vectors, DType dtype, const Visit& visit) const {
  const std::int64_t rows = vectors.numel() / head_dim_;
  const std::int64_t row_bytes = block_ * head_dim_ * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t range = std::max<std::int64_t>(64, kRangeBytes / row_bytes / 64 * 64);
  for (std::int64_t row = 0; row < rows; row += range) visit(row, std::min(range, rows - row));
}

// u = unfolded blocks + pe, z = u·w1ᵀ.
void Compression::hidden(Context& ctx, const attention::LocalBlocks& blocks, const TensorView& x,
                         const TensorView& halo, std::int64_t first, const TensorView& u, const TensorView& z) const {
  attention::unfold_blocks(ctx, {.x = x, .halo = halo, .u = u, .first_row = first, .blocks = blocks});
  const Weight pe(ctx, pe_), w1(ctx, w1_);
  ops::add_bias(ctx, {.x = u, .bias = static_cast<const TensorView&>(pe).flat()});
  ops::matmul(ctx, {.a = u, .b = w1, .c = z, .transpose_b = true});
}

void Compression::forward(Context& ctx, const attention::LocalBlocks& blocks, const TensorView& x,
                          const TensorView& halo, const TensorView& y) const {
  attention::block_mean(ctx, {.x = x, .halo = halo, .y = y, .blocks = blocks});
  if (!mlp_) return;
  const TensorView out = y.reshape({y.numel() / head_dim_, head_dim_});
  for_row_ranges(y, x.dtype, [&](std::int64_t row, std::int64_t count) {
    const Arena::Scope scope(*ctx.scratch);
    const TensorView u = ctx.scratch->allocate("unfolded blocks", x.dtype, {count, block_ * head_dim_});
    const TensorView z = ctx.scratch->allocate("compression hidden", x.dtype, {count, w1_.shape[0]});
    hidden(ctx, blocks, x, halo, row, u, z);
    ops::silu_forward(ctx, {.x = z, .y = z});
    ops::matmul(
        ctx,
        {.a = z, .b = Weight(ctx, w2_), .c = out.rows(row, count), .transpose_b = true, .mode = GradMode::accumulate});
  });
}

void Compression::backward(Context& ctx, const attention::LocalBlocks& blocks, const TensorView& d_y,
                           const TensorView& x, const TensorView& halo, const TensorView& d_x,
                           const TensorView& d_halo) const {
  attention::block_mean_backward(ctx, {.d_y = d_y, .d_x = d_x, .d_halo = d_halo, .blocks = blocks});
  if (!mlp_) return;
  const Arena::Scope outer(*ctx.scratch);
  const TensorView d_out =
      in_working_type(ctx, "d_compressed, working type", d_y, x.dtype).reshape({d_y.numel() / head_dim_, head_dim_});
  for_row_ranges(d_y, x.dtype, [&](std::int64_t row, std::int64_t count) {
    const Arena::Scope scope(*ctx.scratch);
    const Shape wide{count, block_ * head_dim_}, narrow{count, w1_.shape[0]};
    const TensorView u = ctx.scratch->allocate("unfolded blocks", x.dtype, wide);
    const TensorView z = ctx.scratch->allocate("compression hidden", x.dtype, narrow);
    const TensorView a = ctx.scratch->allocate("compression silu", x.dtype, narrow);
    const TensorView d_a = ctx.scratch->allocate("d_compression", x.dtype, narrow);
    const TensorView d_part = d_out.rows(row, count);
    hidden(ctx, blocks, x, halo, row, u, z);
    ops::silu_forward(ctx, {.x = z, .y = a});
    ops::matmul(ctx, {.a = d_part, .b = a, .c = w2_.gradient, .transpose_a = true, .mode = GradMode::accumulate});
    ops::matmul(ctx, {.a = d_part, .b = Weight(ctx, w2_), .c = d_a});
    ops::silu_backward(ctx, {.d_y = d_a, .x = z, .d_x = d_a});
    ops::matmul(ctx, {.a = d_a, .b = u, .c = w1_.gradient, .transpose_a = true, .mode = GradMode::accumulate});
    ops::matmul(ctx, {.a = d_a, .b = Weight(ctx, w1_), .c = u});  // the gradient of u takes its place
    ops::add_bias_backward(ctx, {.d_y = u, .d_bias = pe_.gradient.flat()});
    attention::fold_blocks(ctx, {.d_u = u, .d_x = d_x, .d_halo = d_halo, .first_row = row, .blocks = blocks});
  });
}

void Compression::visit_parameters(const ParameterVisitor& visit) {
  if (!mlp_) return;
  visit(pe_);
  visit(w1_);
  visit(w2_);
}

}  // namespace annulus::model
