// Banded attention forward on sm_90a, bf16: the structure of FlashAttention-3 (arXiv 2407.08608, section 3) for bands.
//
// A block lives as long as the launch and takes tiles of query rows of one head off a counter, longest first. Warp 0
// copies queries, keys and values by TMA into pipelines of shared memory. Each of the kConsumers consumer warpgroups
// owns 64 of the tile's rows: S = Q Kᵀ and O += P V by wgmma, P from registers. A consumer issues the products of the
// next key tile before the exponentials of this one; one computes exponentials while another's products run. Keys are
// visited from the last to the first; a tile that all rows of a consumer see whole takes no masks. State carried in is
// merged at the end. Every tile is computed by one block in one order: deterministic.
#pragma once

#include "attention/cuda/sm90/forward_consumer.cuh"

namespace annulus::attention::cuda::sm90 {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) band_forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) char shared[];
  auto& m = *reinterpret_cast<ForwardMemory<S>*>(shared);
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
    constexpr int kReaders = 4 * S::kConsumers;  // warps
    for (int i = 0; i < 2; ++i) {
      barrier_init(&m.tile_full[i], 32);  // every thread that writes or reads tiles arrives, as racecheck expects
      barrier_init(&m.tile_empty[i], 128 * S::kConsumers);
    }
    barrier_init(&m.q_read, kReaders);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&m.k_full[i], 1);
      barrier_init(&m.v_full[i], 1);
      barrier_init(&m.k_empty[i], kReaders);
      barrier_init(&m.v_empty[i], kReaders);
    }
    barrier_init_done();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
  }
  __syncthreads();
  if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
    give_registers<S::kProducerRegisters>();
    if (uniform(static_cast<int>(threadIdx.x) / 32) == 0) produce<S>(p, m);
  } else {
    take_registers<S::kConsumerRegisters>();
    Consumer<S>(p, m).run();
  }
}

}  // namespace annulus::attention::cuda::sm90
