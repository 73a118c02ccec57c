// cross_entropy: one row at a time; a row of 50,000 logits stays in the second-level cache over its three passes.
#include <cmath>
#include <limits>

#include "core/vector_math.h"
#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {
namespace {

template <class T>
T largest(const T* x, std::int64_t n) {  // ignores NaN, which the sum of exponentials then carries
  T best = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : best)
  for (std::int64_t i = 0; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// The loss of one row; leaves the gradient in x if asked.
template <class T, bool gradient>
T row_loss(T* x, std::int64_t n, std::int64_t target, T scale) {
  const T highest = largest(x, n), at_target = x[target];
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) {
    const T e = vector_exp(x[i] - highest);
    if constexpr (gradient) x[i] = e;
    sum += e;
  }
  if constexpr (gradient) {
    const T e_target = x[target], factor = scale / sum;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
    x[target] = (e_target / sum - T(1)) * scale;
  }
  return std::log(sum) + (highest - at_target);
}

// Whether no other logit is as great as the target's; false where the target's is NaN.
template <class T>
bool is_greatest(const T* x, std::int64_t n, std::int64_t target) {
  const T at_target = x[target];
  std::int64_t as_great = 0;
#pragma omp simd reduction(+ : as_great)
  for (std::int64_t i = 0; i < n; ++i) as_great += x[i] >= at_target;
  return as_great == 1;
}

template <class T>
void run(const CrossEntropy& args) {
  const std::int64_t v = args.logits.dim(1);
  T* logits = args.logits.as<T>();
  T* loss = args.loss.as<T>();
  const std::int32_t* target = args.target.as<std::int32_t>();
  const T scale = static_cast<T>(args.scale);
  const bool gradient = args.gradient;
  std::int32_t* correct = args.correct.data ? args.correct.as<std::int32_t>() : nullptr;
  for_rows(args.logits.dim(0), 2 * v, [=](std::int64_t r) {
    T* row = logits + r * v;
    if (correct) correct[r] = target[r] >= 0 && is_greatest(row, v, target[r]);
    if (target[r] < 0) {
      loss[r] = 0;
      if (gradient) std::fill(row, row + v, T(0));
    } else {
      loss[r] = gradient ? row_loss<T, true>(row, v, target[r], scale) : row_loss<T, false>(row, v, target[r], scale);
    }
  });
}

}  // namespace

void cross_entropy(Context&, const CrossEntropy& args) {
  const std::int32_t* target = args.target.as<std::int32_t>();
  for (std::int64_t r = 0; r < args.target.dim(0); ++r) {
    ANNULUS_CHECK(target[r] < args.logits.dim(1),
                  "operation cross_entropy: target {} in row {} is outside a vocabulary of {}", target[r], r,
                  args.logits.dim(1));
  }
  for_type(args.logits, [&](auto type) { run<decltype(type)>(args); });
}

}  // namespace annulus::ops::cpu
