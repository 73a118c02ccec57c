// Banded attention forward on sm_90a (compute capability 9.0): bf16, head dimensions 64 and 128. Contract: BandForward
// in attention/band.h. Weights are rounded to bf16 for the product with v; everything else is fp32.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "attention/band.h"

namespace annulus::attention::cuda::sm90 {

bool takes(const Context& ctx, const BandForward& args);   // this device, types, shapes and alignments
void band_forward(Context& ctx, const BandForward& args);  // where takes()

constexpr int kForwardKeysLog2 = 7, kForwardKeys = 1 << kForwardKeysLog2;  // keys of a tile

struct ForwardParams {
  CUtensorMap q, k, v;  // boxes of 64 columns of one head: rows of a query tile, kForwardKeys keys
  const std::int32_t *first, *last;
  float *o, *lse;
  __nv_bfloat16* out;
  int* next_tile;                       // 0 at the launch
  int tiles, row_tiles, section_heads;  // work; KV heads whose keys and values fit the L2 together
  int batches, tokens, keys, q_heads, kv_heads;
  float scale, scale_log2;  // scale_log2 = scale · log2 e
  bool has_state;
};

struct ForwardKernel {  // one instantiation
  int rows;             // of a query tile
  int threads, shared_bytes;
  void (*kernel)(ForwardParams);
};
ForwardKernel forward_kernel_64();
ForwardKernel forward_kernel_128();

}  // namespace annulus::attention::cuda::sm90
