// embedding_forward, embedding_backward.
#include <omp.h>

#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {
namespace {

void check_tokens(const char* operation, const TensorView& token, std::int64_t vocab) {
  const std::int32_t* t = token.as<std::int32_t>();
  for (std::int64_t r = 0; r < token.dim(0); ++r) {
    ANNULUS_CHECK(t[r] >= 0 && t[r] < vocab, "operation {}: token {} in row {} is outside a vocabulary of {}",
                  operation, t[r], r, vocab);
  }
}

}  // namespace

void embedding_forward(Context&, const EmbeddingForward& args) {
  check_tokens("embedding_forward", args.token, args.w.dim(0));
  for_type(args.w, [&](auto type) {
    using T = decltype(type);
    const std::int64_t h = args.w.dim(1);
    const std::int32_t* token = args.token.as<std::int32_t>();
    const T* w = args.w.as<T>();
    T* y = args.y.as<T>();
    for_rows(args.token.dim(0), h, [=](std::int64_t r) { std::copy_n(w + token[r] * h, h, y + r * h); });
  });
}

// Threads share columns, not rows: every element of d_w then receives its rows in ascending order.
void embedding_backward(Context&, const EmbeddingBackward& args) {
  check_tokens("embedding_backward", args.token, args.d_w.dim(0));
  for_type(args.d_y, [&](auto type) {
    using T = decltype(type);
    const std::int64_t rows = args.token.dim(0), h = args.d_w.dim(1);
    constexpr std::int64_t kLine = 16;  // elements of a cache line, which two threads should not share
    const std::int64_t threads = rows * h < kParallelElements ? 1 : omp_get_max_threads();
    const std::int64_t width = (h + threads * kLine - 1) / (threads * kLine) * kLine;
    const std::int32_t* token = args.token.as<std::int32_t>();
    const T* d_y = args.d_y.as<T>();
    T* d_w = args.d_w.as<T>();
    for_rows(width ? (h + width - 1) / width : 0, rows * width, [=](std::int64_t part) {
      const std::int64_t begin = part * width, end = std::min(h, begin + width);
      for (std::int64_t r = 0; r < rows; ++r) {
        T* to = d_w + token[r] * h;
        const T* from = d_y + r * h;
#pragma omp simd
        for (std::int64_t j = begin; j < end; ++j) to[j] += from[j];
      }
    });
  });
}

}  // namespace annulus::ops::cpu
