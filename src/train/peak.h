// The measured peak: what the matrix product reaches on this rank's device. MFU and benches divide by it.
#pragma once

#include "train/engine.h"

namespace annulus::train {

// FLOP/s of one large matrix product in the working type, best of a few, all of the rank's threads; about 0.1 s on a
// CPU.
double measured_peak_flops(Context& ctx, DType dtype, const Allocator& allocator);

double peak_memory_gib();  // of this process so far (resident set), GiB

}  // namespace annulus::train
