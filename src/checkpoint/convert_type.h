// Conversion of stored values between f32, f64 and bf16, and from f16, to nearest even: infinities, NaNs, subnormals
// and overflow as in IEEE 754. HDF5's own conversion is not used: it truncates, and turns large floats into finite
// ones.
#pragma once

#include "core/dtype.h"

namespace annulus::checkpoint {

struct Float16 {  // IEEE 754 binary16; storage only
  std::uint16_t bits;
};
float to_float(Float16 x);       // exact
BFloat16 to_bfloat16(double x);  // rounds once

void convert_type(DType from, const void* in, DType to, void* out, std::int64_t count);

}  // namespace annulus::checkpoint
