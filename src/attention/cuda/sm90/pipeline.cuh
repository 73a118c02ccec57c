// What the kernels' pipelines in shared memory share: stages that a producer fills and consumers give back, each side
// by an mbarrier of its own.
#pragma once

#include "attention/cuda/sm90/ptx.h"

namespace annulus::attention::cuda::sm90 {

constexpr unsigned kAllLanes = 0xffffffffu;

template <int kStages>
struct Stage {  // of a pipeline, and the parity of its barriers' phase, for the use-th use of the pipeline
  std::uint32_t uses = 0;
  __device__ __forceinline__ std::uint32_t index() const { return uses % kStages; }
  __device__ __forceinline__ std::uint32_t parity() const { return uses / kStages & 1; }
};

// A warp has read what `b` guards.
__device__ __forceinline__ void release(Barrier* b) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(b);
}

// Rows of a head, in slabs of 64 columns; `full` counts their bytes.
template <int kSlabs>
__device__ __forceinline__ void copy_tile(char* to, const CUtensorMap* map, Barrier* full, int slab_bytes, int head,
                                          int row, int batch) {
  arrive_expecting(full, kSlabs * slab_bytes);
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) copy_box(to + slab * slab_bytes, map, full, 64 * slab, head, row, batch);
}

}  // namespace annulus::attention::cuda::sm90
