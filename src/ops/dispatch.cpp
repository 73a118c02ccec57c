// ops::name: check, plan, or run the twin of the context's device.
#include "ops/checks.h"
#include "ops/cuda_missing.h"
#include "ops/workspace.h"

namespace annulus::ops {
namespace {

template <class Args>
std::int64_t workspace_on(DeviceKind device, const Args& args) {
  return device == DeviceKind::cuda ? cuda::workspace_bytes(args) : cpu::workspace_bytes(args);
}

template <class Args>
void run(Context& ctx, const Args& args, const char* name, void (*on_cpu)(Context&, const Args&),
         void (*on_cuda)(Context&, const Args&)) {
  check(ctx, args);
  if (ctx.planning) {
    if (const auto bytes = workspace_on(ctx.device, args)) Workspace counted(ctx, name, bytes);
    return;
  }
  if (ctx.device == DeviceKind::cpu) {
    on_cpu(ctx, args);
    ctx.poll();
  } else if (on_cuda) {
    on_cuda(ctx, args);
  } else {
    throw Error(fmt::format("operation {} on cuda: this program was built without CUDA; use the preset cuda", name));
  }
}

}  // namespace

#ifdef ANNULUS_CUDA
#define ANNULUS_CUDA_TWIN(name) cuda::name
#else
#define ANNULUS_CUDA_TWIN(name) nullptr
#endif

#define ANNULUS_DISPATCH_OP(name, Args) \
  void name(Context& ctx, const Args& args) { run<Args>(ctx, args, #name, cpu::name, ANNULUS_CUDA_TWIN(name)); }
ANNULUS_OPS(ANNULUS_DISPATCH_OP)

#ifdef ANNULUS_CUDA
namespace cuda {
#define ANNULUS_REFUSE_OP(name, Args) \
  void name(Context&, const Args&) { throw Error(fmt::format("operation {} has no CUDA twin yet", #name)); }
ANNULUS_OPS_WITHOUT_CUDA(ANNULUS_REFUSE_OP)
}  // namespace cuda
#endif

}  // namespace annulus::ops
