// sum, sum_squares, add_bias_backward: fixed blocks, whatever the number of threads.
#include <array>

#include "ops/cpu/column_sums.h"
#include "ops/workspace.h"

namespace annulus::ops::cpu {
namespace {

template <class T, class Map>
double block_sum(const T* x, std::int64_t begin, std::int64_t end, const Map& map) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (std::int64_t i = begin; i < end; ++i) total += map(static_cast<double>(x[i]));
  return total;
}

template <class Args, class Map>
void reduce(const Args& args, const Map& map) {
  constexpr std::int64_t kBlocks = 128, kMinBlock = 1 << 12;
  const std::int64_t n = args.x.numel();
  const std::int64_t block = std::max(kMinBlock, (n + kBlocks - 1) / kBlocks), count = (n + block - 1) / block;
  std::array<double, kBlocks> partial{};
  for_type(args.x, [&](auto type) {
    const auto* x = args.x.template as<decltype(type)>();
    for_rows(count, block, [&, x](std::int64_t b) {
      partial[static_cast<std::size_t>(b)] = block_sum(x, b * block, std::min(n, (b + 1) * block), map);
    });
  });
  for (std::size_t half = partial.size() / 2; half > 0; half /= 2) {  // pairwise: the error grows with log(blocks)
    for (std::size_t b = 0; b < half; ++b) partial[b] += partial[b + half];
  }
  const double total = partial[0];
  double& result = *args.result.template as<double>();
  result = args.mode == GradMode::accumulate ? result + total : total;
}

}  // namespace

void sum(Context&, const Sum& args) {
  reduce(args, [](double x) { return x; });
}

void sum_squares(Context&, const SumSquares& args) {
  reduce(args, [](double x) { return x * x; });
}

void add_bias_backward(Context& ctx, const AddBiasBackward& args) {
  const Workspace workspace(ctx, "add_bias_backward", workspace_bytes(args));
  for_type(args.d_y, [&](auto type) {
    using T = decltype(type);
    const std::int64_t n = args.d_y.dim(1);
    const T* d_y = args.d_y.as<T>();
    add_column_sums(args.d_y.dim(0), n, workspace.as<T>(), args.d_bias.as<T>(), [=](std::int64_t r, T* line) {
      const T* row = d_y + r * n;
#pragma omp simd
      for (std::int64_t j = 0; j < n; ++j) line[j] += row[j];
    });
  });
}

}  // namespace annulus::ops::cpu
