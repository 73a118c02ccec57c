// Banded attention backward on sm_90a, bf16: key-stationary as FlashAttention-3's (arXiv 2407.08608), for bands and
// grouped heads.
//
// A block lives as long as the launch and takes tiles of 128 keys of one KV head off a counter; rows of the G query
// heads of the group visit, from the last that see the keys to the first, head after head for the same rows. Two
// consumer warpgroups own 64 keys each, with their d_k and d_v in registers: Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO and
// dK += dSᵀ Q, with Pᵀ and dSᵀ from registers; dS goes through shared memory for dQ = dS K, which the copy engine adds
// to d_q, in the order of the keys. Warps of the first warpgroup: 0 takes tiles and brings the rows' statistics, 1
// copies, 2 and 3 add to d_q. In that order, without p.ordered aside, the result has the same bits every time.
#pragma once

#include "attention/cuda/sm90/backward_consumer.cuh"

namespace annulus::attention::cuda::sm90 {

template <class S>
__device__ __forceinline__ void init_barriers(BackwardMemory<S>& m) {
  constexpr int kReaders = 4 * S::kConsumers;  // warps
  for (int i = 0; i < 2; ++i) {
    barrier_init(&m.tile_full[i], 32);  // every thread that writes or reads tiles arrives, as racecheck expects
    barrier_init(&m.tile_empty[i], 96 + 128 * S::kConsumers);
  }
  barrier_init(&m.kv_full, 1);
  barrier_init(&m.kv_empty, kReaders);
  for (int i = 0; i < S::kQueries; ++i) {
    barrier_init(&m.q_full[i], 1 + 32);
    barrier_init(&m.q_empty[i], kReaders);
  }
  for (int i = 0; i < S::kOutputs; ++i) {
    barrier_init(&m.d_o_full[i], 1);
    barrier_init(&m.d_o_empty[i], kReaders);
  }
  barrier_init(&m.d_q_empty, 1);
  barrier_init_done();
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) band_backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char shared[];
  auto& m = *reinterpret_cast<BackwardMemory<S>*>(shared);
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
    init_barriers(m);
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v, &p.d_o, &p.d_q}) prefetch_map(map);
  }
  __syncthreads();
  if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
    give_registers<S::kProducerRegisters>();
    switch (uniform(static_cast<int>(threadIdx.x) / 32)) {
      case 0:
        return bring_statistics<S>(p, m);
      case 1:
        return copy_backward<S>(p, m);
      case 2:
        return add_query_gradients<S>(p, m, 0);
      default:
        return add_query_gradients<S>(p, m, 1);
    }
  } else {
    take_registers<S::kConsumerRegisters>();
    BackwardConsumer<S>(p, m).run();
  }
}

}  // namespace annulus::attention::cuda::sm90
