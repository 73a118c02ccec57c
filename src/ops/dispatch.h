// How an operation is run: its checks, then a count of its workspace (planning) or the twin of the context's device.
// Shared by ops/dispatch.cpp and attention/band_dispatch.cpp.
#pragma once

#include "ops/workspace.h"

#ifdef ANNULUS_CUDA
#define ANNULUS_CUDA_TWIN(name) cuda::name
#else
#define ANNULUS_CUDA_TWIN(name) nullptr
#endif

// For the rows of ops/cuda_missing.h.
#define ANNULUS_REFUSE_OP(name, Args) \
  void name(Context&, const Args&) { ::annulus::ops::refuse_without_twin(#name); }

namespace annulus::ops {

// `check` throws Error for arguments that break the contract; workspace bytes are asked for while planning only.
// on_cuda is null in a build without CUDA.
template <class Args, class Check, class Bytes>
void dispatch(Context& ctx, const Args& args, const char* name, Check check, Bytes workspace_bytes,
              void (*on_cpu)(Context&, const Args&), void (*on_cuda)(Context&, const Args&)) {
  check(ctx, args);
  if (ctx.planning) {
    if (const std::int64_t bytes = workspace_bytes(ctx.device, args)) Workspace counted(ctx, name, bytes);
  } else if (ctx.device == DeviceKind::cpu) {
    on_cpu(ctx, args);
    ctx.poll();
  } else if (on_cuda) {
    on_cuda(ctx, args);
  } else {
    throw Error(fmt::format("operation {} on cuda: this program was built without CUDA; use the preset cuda", name));
  }
}

[[noreturn]] inline void refuse_without_twin(const char* name) {
  throw Error(fmt::format("operation {} has no CUDA twin yet", name));
}

}  // namespace annulus::ops
