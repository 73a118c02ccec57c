// rope_table, rope.
#include <cmath>

#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {

void rope_table(Context&, const RopeTable& args) {
  for_type(args.inv_freq, [&](auto type) {
    using T = decltype(type);
    const std::int64_t half = args.inv_freq.dim(0);
    const std::int32_t* position = args.position.as<std::int32_t>();
    const T* inv_freq = args.inv_freq.as<T>();
    T* cosines = args.cos.as<T>();
    T* sines = args.sin.as<T>();
    const T magnitude = static_cast<T>(args.magnitude);
    constexpr std::int64_t kCostOfAngle = 16;  // in streamed elements
    for_rows(args.position.dim(0), kCostOfAngle * half, [=](std::int64_t r) {
      const T p = static_cast<T>(position[r]);
      for (std::int64_t j = 0; j < half; ++j) {
        const T angle = p * inv_freq[j];
        cosines[r * half + j] = std::cos(angle) * magnitude;
        sines[r * half + j] = std::sin(angle) * magnitude;
      }
    });
  });
}

void rope(Context&, const Rope& args) {
  for_type(args.x, [&](auto type) {
    using T = decltype(type);
    const std::int64_t heads = args.x.dim(1), half = args.x.dim(2) / 2;
    T* x = args.x.as<T>();
    const T* cosines = args.cos.as<T>();
    const T* sines = args.sin.as<T>();
    const T sign = args.inverse ? T(-1) : T(1);
    const std::int64_t table_row = args.table_stride * half;
    for_rows(args.x.dim(0), heads * half * 2, [=](std::int64_t r) {
      const T* c = cosines + r * table_row;
      const T* s = sines + r * table_row;
      for (std::int64_t head = 0; head < heads; ++head) {
        T* low = x + (r * heads + head) * half * 2;
        T* high = low + half;
#pragma omp simd
        for (std::int64_t j = 0; j < half; ++j) {
          const T a = low[j], b = high[j], sine = sign * s[j];
          low[j] = a * c[j] - b * sine;
          high[j] = b * c[j] + a * sine;
        }
      }
    });
  });
}

}  // namespace annulus::ops::cpu
