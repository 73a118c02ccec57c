// Cases of banded attention on a GPU: sizes, bands, key buffers, and tensors' values.
#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "attention/cuda/bands.h"
#include "core/rng.h"
#include "support/device.h"
#include "support/require_gpu.h"

namespace annulus::testing {

constexpr double kEps = 0x1p-24;  // half a unit in the last place of fp32, relative

struct Case {
  const char* name;
  BandSize shape;
  BandKind kind;
  DType dtype;
  std::vector<std::int64_t> cuts;  // key buffers, as in naive_band
  std::int64_t shift = 0;          // elements by which every tensor is off its alignment
  double sharpness = 1;            // of the scores, over 1/√D
  double tilt = 0;                 // added to k and taken from q: logits around −tilt² · √D
};

inline void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

inline std::vector<double> draw(std::int64_t n, DType dtype, const char* stream) {
  const CounterRng rng(7, stream);
  std::vector<double> out(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto x = static_cast<float>(rng.normal(i));
    out[i] = dtype == DType::bf16 ? to_float(to_bfloat16(x)) : x;
  }
  return out;
}

inline void put(std::byte* to, DType dtype, std::int64_t at, double value) {
  if (dtype == DType::bf16) {
    const BFloat16 x = to_bfloat16(static_cast<float>(value));
    std::memcpy(to + at * 2, &x, 2);
  } else {
    const auto x = static_cast<float>(value);
    std::memcpy(to + at * 4, &x, 4);
  }
}

template <class T>
std::vector<T> values(GuardedTensors& tensors, std::size_t index) {
  std::vector<T> out(static_cast<std::size_t>(tensors.view(index).numel()));
  std::memcpy(out.data(), tensors.host(index), out.size() * sizeof(T));
  return out;
}

// batch, tokens, keys, query heads, KV heads, head dim
// Cuts and sizes around tiles of 64 and 128 queries and 128 keys, for kernels on tensor cores: rows and consumers that
// see nothing, keys that only some rows see, keys that no row sees between those that some do.
inline const Case kTiles[] = {
    {"one_64", {1, 1, 1, 1, 1, 64}, BandKind::causal, DType::bf16, {1}},
    {"one_128", {1, 1, 1, 1, 1, 128}, BandKind::causal, DType::bf16, {1}},
    {"tile_64", {1, 128, 128, 1, 1, 64}, BandKind::full, DType::bf16, {128}},
    {"tile_128", {1, 128, 128, 1, 1, 128}, BandKind::full, DType::bf16, {128}},
    {"over_a_tile_64", {1, 129, 129, 2, 2, 64}, BandKind::causal, DType::bf16, {129}},
    {"over_a_tile_128", {1, 129, 129, 2, 2, 128}, BandKind::causal, DType::bf16, {129}},
    {"half_a_tile", {2, 64, 320, 2, 1, 128}, BandKind::full, DType::bf16, {320}},
    {"batch_and_groups_64", {2, 257, 257, 8, 2, 64}, BandKind::causal, DType::bf16, {257}},
    {"batch_and_groups_128", {2, 255, 255, 8, 1, 128}, BandKind::causal, DType::bf16, {255}},
    {"no_groups", {2, 200, 391, 3, 3, 128}, BandKind::full, DType::bf16, {391}},
    {"later_queries", {1, 150, 700, 2, 1, 64}, BandKind::causal, DType::bf16, {700}},
    {"window_64", {2, 500, 500, 2, 1, 64}, BandKind::window, DType::bf16, {500}},
    {"window_128", {2, 300, 433, 2, 1, 128}, BandKind::window, DType::bf16, {433}},
    {"documents_64", {2, 400, 400, 4, 2, 64}, BandKind::documents, DType::bf16, {400}},
    {"documents_128", {2, 333, 333, 2, 1, 128}, BandKind::documents, DType::bf16, {333}},
    {"long_documents", {1, 900, 900, 1, 1, 128}, BandKind::long_documents, DType::bf16, {900}},
    {"compressed_64", {2, 600, 149, 4, 1, 64}, BandKind::compressed, DType::bf16, {149}},
    {"compressed_128", {1, 600, 149, 16, 1, 128}, BandKind::compressed, DType::bf16, {149}},
    {"empty_64", {2, 131, 140, 2, 1, 64}, BandKind::empty, DType::bf16, {140}},
    {"stairs_64", {2, 300, 460, 2, 1, 64}, BandKind::stairs, DType::bf16, {460}},
    {"stairs_128", {2, 300, 460, 2, 1, 128}, BandKind::stairs, DType::bf16, {460}},
    {"gaps_64", {2, 300, 900, 2, 1, 64}, BandKind::gaps, DType::bf16, {900}},
    {"gaps_128", {1, 300, 900, 2, 1, 128}, BandKind::gaps, DType::bf16, {900}},
    {"causal_hops_64", {2, 260, 260, 4, 1, 64}, BandKind::causal, DType::bf16, {100, 130, 260}},
    {"causal_hops_128", {1, 390, 390, 2, 1, 128}, BandKind::causal, DType::bf16, {128, 256, 390}},
    {"window_hops", {1, 390, 390, 2, 1, 128}, BandKind::window, DType::bf16, {1, 300, 390}},
    {"documents_hops", {2, 390, 390, 2, 1, 64}, BandKind::documents, DType::bf16, {128, 200, 390}},
    {"empty_hops", {1, 140, 260, 2, 1, 128}, BandKind::empty, DType::bf16, {100, 260}},
    {"stairs_hops", {2, 300, 460, 2, 1, 128}, BandKind::stairs, DType::bf16, {31, 132, 460}},
    {"gaps_hops", {1, 300, 900, 2, 1, 64}, BandKind::gaps, DType::bf16, {200, 513, 900}},
    {"sharp_64", {1, 300, 300, 2, 1, 64}, BandKind::causal, DType::bf16, {300}, 0, 40},
    {"sharp_128", {1, 300, 300, 2, 1, 128}, BandKind::causal, DType::bf16, {130, 300}, 0, 40},
    {"flat_128", {1, 300, 300, 2, 1, 128}, BandKind::full, DType::bf16, {300}, 0, 1e-3},
    {"many_tiles", {3, 260, 260, 32, 4, 64}, BandKind::causal, DType::bf16, {260}},  // more than the GPU has processors
    {"misaligned_128", {1, 150, 150, 2, 1, 128}, BandKind::causal, DType::bf16, {150}, 1},
};

}  // namespace annulus::testing
