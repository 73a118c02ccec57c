#include "ops/cpu/blas_core.h"

#include <cblas.h>

#include <algorithm>
#include <array>
#include <cstdlib>

namespace annulus::ops::cpu {
namespace {

CpuFeatures cpu_features() {
  CpuFeatures out;
#ifdef __x86_64__
  __builtin_cpu_init();
  const auto has512 = [] {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
  };
  out = {.avx512 = has512(), .avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")};
#endif
  return out;
}

}  // namespace

std::string_view better_blas_core(std::string_view core, const CpuFeatures& features) {
  // What OpenBLAS chooses where it knows the CPU: left alone.
  constexpr std::array<std::string_view, 6> kModern{"SkylakeX", "Cooperlake", "Sapphirerapids",
                                                    "Haswell",  "Zen",        "Excavator"};
  if (std::find(kModern.begin(), kModern.end(), core) != kModern.end()) return {};
  if (features.avx512) return "SkylakeX";
  return features.avx2 ? "Haswell" : "";
}

std::string_view better_blas_core() {
  if (std::getenv("OPENBLAS_CORETYPE")) return {};
  return better_blas_core(openblas_get_corename(), cpu_features());
}

}  // namespace annulus::ops::cpu
