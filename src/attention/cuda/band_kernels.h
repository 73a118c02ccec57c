// The kernels behind band_forward and band_backward on a GPU; band_choice.cpp chooses.
#pragma once

#include "attention/band.h"

namespace annulus::attention::cuda::plain {

// Any GPU, f32 and bf16, head dimensions up to 256.
void band_forward(Context& ctx, const BandForward& args);
void band_backward(Context& ctx, const BandBackward& args);

}  // namespace annulus::attention::cuda::plain
