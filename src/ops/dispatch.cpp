// ops::name: check, plan, or run the twin of the context's device (ops/dispatch.h).
#include "ops/dispatch.h"

#include "ops/checks.h"
#include "ops/cuda_missing.h"

namespace annulus::ops {

#define ANNULUS_DISPATCH_OP(name, Args)                                                           \
  void name(Context& ctx, const Args& args) {                                                     \
    dispatch<Args>(                                                                               \
        ctx, args, #name, [](const Context& c, const Args& a) { check(c, a); },                   \
        [](DeviceKind device, const Args& a) -> std::int64_t {                                    \
          return device == DeviceKind::cuda ? cuda::workspace_bytes(a) : cpu::workspace_bytes(a); \
        },                                                                                        \
        cpu::name, ANNULUS_CUDA_TWIN(name));                                                      \
  }
ANNULUS_OPS(ANNULUS_DISPATCH_OP)

#ifdef ANNULUS_CUDA
namespace cuda {
ANNULUS_OPS_WITHOUT_CUDA(ANNULUS_REFUSE_OP)
}  // namespace cuda
#endif

}  // namespace annulus::ops
