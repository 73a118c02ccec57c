#include "train/peak.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>

namespace annulus::train {

double measured_peak_flops(Context& ctx, DType dtype, const Allocator& allocator) {
  const std::int64_t n = ctx.device == DeviceKind::cuda ? 8192 : 1024;
  Arena arena("peak", ctx.device, allocator);
  TensorView a, b, c;
  for (int pass = 0; pass < 2; ++pass) {
    a = arena.allocate("a", dtype, {n, n});
    b = arena.allocate("b", dtype, {n, n});
    c = arena.allocate("c", dtype, {n, n});
    if (pass == 0) arena.commit();
  }
  ops::fill(ctx, {.y = a, .value = 0.5});
  ops::fill(ctx, {.y = b, .value = 0.25});
  double best = 1e30;
  for (int repeat = 0; repeat < 20; ++repeat) {
    synchronize(ctx);
    const auto begin = std::chrono::steady_clock::now();
    ops::matmul(ctx, {.a = a, .b = b, .c = c, .transpose_b = true});
    synchronize(ctx);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (repeat > 0) best = std::min(best, seconds);  // the first warms up
  }
  const double size = static_cast<double>(n);
  return 2 * size * size * size / best;
}

double peak_memory_gib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1 << 20);  // KiB on Linux
}

}  // namespace annulus::train
