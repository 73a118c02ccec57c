// attention::band_*: check, plan, or run the twin of the context's device.
#include "attention/band_workspace.h"
#include "attention/checker.h"
#include "ops/cuda_missing.h"
#include "ops/dispatch.h"

namespace annulus::attention {
namespace {

void check(const Context& ctx, const BandForward& args) {
  const Checker is(ctx, "band_forward");
  is.inputs(args);
  const DType stat = stat_type(args.q.dtype);
  is.tensor("o", args.o, stat, args.q.shape);
  is.tensor("lse", args.lse, stat, statistics_of(args.q));
  if (args.out.shape.rank() > 0) is.tensor("out", args.out, args.q.dtype, args.q.shape);
}

void check(const Context& ctx, const BandDelta& args) {
  const Checker is(ctx, "band_delta");
  is.working(args.d_o);
  if (args.d_o.shape.rank() != 4) is.fail("d_o", args.d_o, "[B, T, Hq, D]");
  is.tensor("d_o", args.d_o, args.d_o.dtype, args.d_o.shape);
  const DType stat = stat_type(args.d_o.dtype);
  is.tensor("o", args.o, args.o.dtype == stat ? stat : args.d_o.dtype, args.d_o.shape);
  is.tensor("delta", args.delta, stat, statistics_of(args.d_o));
}

void check(const Context& ctx, const BandBackward& args) {
  const Checker is(ctx, "band_backward");
  is.inputs(args);
  const DType stat = stat_type(args.q.dtype);
  is.tensor("d_o", args.d_o, args.q.dtype, args.q.shape);
  is.tensor("lse", args.lse, stat, statistics_of(args.q));
  is.tensor("delta", args.delta, stat, args.lse.shape);
  is.tensor("d_q", args.d_q, stat, args.q.shape);
  is.tensor("d_k", args.d_k, stat, args.k.shape);
  is.tensor("d_v", args.d_v, stat, args.k.shape);
}

void check(const Context& ctx, const BandBounds& args) {
  const Checker is(ctx, "band_bounds");
  const Shape& shape = args.global_first.shape;
  is.tensor("global_first", args.global_first, DType::i32, shape);
  is.tensor("global_last", args.global_last, DType::i32, shape);
  is.tensor("first", args.first, DType::i32, shape);
  is.tensor("last", args.last, DType::i32, shape);
  ANNULUS_CHECK(args.chunk >= 0, "band_bounds: a chunk of {} tokens", args.chunk);
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
ANNULUS_BAND_OPS(ANNULUS_DISPATCH_OP)

#ifdef ANNULUS_CUDA
namespace cuda {
ANNULUS_BAND_OPS_WITHOUT_CUDA(ANNULUS_REFUSE_OP)
}  // namespace cuda
#endif

}  // namespace annulus::attention
