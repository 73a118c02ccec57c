// The kernels behind band_forward on a GPU; band_choice.cpp chooses.
#pragma once

#include "attention/band.h"

namespace annulus::attention::cuda::plain {

void band_forward(Context& ctx, const BandForward& args);  // any GPU, any shape, f32 and bf16

}  // namespace annulus::attention::cuda::plain
