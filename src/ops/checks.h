// Argument checks of the operations: ranks, shapes, dtypes, devices, memory and overlap, as ops.h states them. Run
// before planning and before every twin, so that a twin may rely on its arguments. A failure is an Error that names the
// operation, the tensor, what it is and what was expected. bf16 on the CPU is refused here for everything but cast.
#pragma once

#include "ops/ops.h"

namespace annulus::ops {

#define ANNULUS_DECLARE_CHECK(name, Args) void check(const Context& ctx, const Args& args);
ANNULUS_OPS(ANNULUS_DECLARE_CHECK)
#undef ANNULUS_DECLARE_CHECK

}  // namespace annulus::ops
