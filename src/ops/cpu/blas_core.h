// Which of its kernels OpenBLAS runs on this CPU. A library older than the CPU may not know it and fall to its oldest
// kernels (Debian 12's 0.3.21 on a Xeon of 2023: a sixth of the speed); OPENBLAS_CORETYPE names others, but is read
// once, when the library is loaded.
#pragma once

#include <string_view>

namespace annulus::ops::cpu {

struct CpuFeatures {
  bool avx512 = false;  // F, DQ, CD, BW, VL
  bool avx2 = false;    // and FMA
};

// A value of OPENBLAS_CORETYPE whose kernels suit the features better than those of `core` (openblas_get_corename());
// empty: none.
std::string_view better_blas_core(std::string_view core, const CpuFeatures& features);

// Of this process; empty too where OPENBLAS_CORETYPE is set already.
std::string_view better_blas_core();

}  // namespace annulus::ops::cpu
