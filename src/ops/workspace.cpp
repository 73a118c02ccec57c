#include "ops/workspace.h"

#include "ops/cpu/column_sums.h"

namespace annulus::ops {

Arena& Workspace::scratch_of(Context& ctx, const char* name) {
  ANNULUS_CHECK(ctx.scratch, "{} needs a workspace, and the context has no scratch arena", name);
  ANNULUS_CHECK(ctx.scratch->device() == ctx.device, "{}: the scratch arena {} is on another device", name,
                ctx.scratch->name());
  ANNULUS_CHECK(ctx.planning || ctx.scratch->committed(), "{}: the scratch arena {} is not committed", name,
                ctx.scratch->name());
  return *ctx.scratch;
}

Workspace::Workspace(Context& ctx, const char* name, std::int64_t bytes)
    : scope_(scratch_of(ctx, name)), view_(ctx.scratch->allocate(name, DType::u8, {bytes})) {}

namespace cpu {

std::int64_t workspace_bytes(const RmsNormBackward& args) {
  return column_sums_bytes(args.x.dim(0), args.x.dim(1), args.d_w.dtype);
}

std::int64_t workspace_bytes(const AddBiasBackward& args) {
  return column_sums_bytes(args.d_y.dim(0), args.d_y.dim(1), args.d_bias.dtype);
}

}  // namespace cpu
}  // namespace annulus::ops
