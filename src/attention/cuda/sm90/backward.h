// Banded attention backward on sm_90a (compute capability 9.0): bf16, head dimensions 64 and 128. Contract:
// BandBackward in attention/band.h. Weights and their gradients are rounded to bf16 for the products that follow;
// everything else is fp32.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/band.h"

namespace annulus::attention::cuda::sm90 {

bool takes(const Context& ctx, const BandBackward& args);    // this device, types, shapes and alignments
void band_backward(Context& ctx, const BandBackward& args);  // where takes()

constexpr int kBackwardKeys = 128;  // of a tile

struct BackwardParams {
  CUtensorMap q, k, v, d_o;  // boxes of 64 columns of one head: rows of a query tile, kBackwardKeys keys
  CUtensorMap d_q;           // of 32 columns: rows of a query tile
  const std::int32_t *first, *last;
  const float *lse, *delta;
  float *d_k, *d_v;
  int* next_tile;                         // 0 at the launch
  int* turns;                             // [B, Hq, query tiles], 0 at the launch: key tiles that are in d_q
  int tiles, query_tiles, section_heads;  // work; KV heads of all sequences that are worked on at a time
  int batches, tokens, keys, q_heads, kv_heads;
  float scale, scale_log2;  // scale_log2 = scale · log2 e
  bool ordered;             // d_q's sums in turns
};

struct BackwardKernel {  // one instantiation
  int rows;              // of a query tile
  int threads, shared_bytes;
  void (*kernel)(BackwardParams);
};
BackwardKernel backward_kernel_64();
BackwardKernel backward_kernel_128();

}  // namespace annulus::attention::cuda::sm90
