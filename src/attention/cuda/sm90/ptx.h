// The instructions of sm_90a that CUDA C++ has no names for: mbarriers, tensor copies (TMA), named barriers, register
// hand-over between warpgroups, warpgroup matrix products (wgmma) and their shared-memory descriptors. PTX ISA 9.0,
// "Asynchronous Warpgroup Level Matrix Instructions" and "cp.async.bulk.tensor". For .cu files compiled for sm_90a.
//
// Tiles in shared memory: bf16 [rows][64 columns], 128 bytes a row, 1024-byte aligned, swizzled as TMA's SWIZZLE_128B
// writes it: bits 4-6 of an address are xored with its bits 7-9. Wider matrices are several such slabs.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace annulus::attention::cuda::sm90 {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// --- mbarriers -------------------------------------------------------------------------------------------------------
// A phase ends when `count` arrivals and all announced bytes are in. wait(parity) returns once the phase of that parity
// has ended; on a fresh barrier, the phase before the first, of parity 1, has.

using Barrier = std::uint64_t;

__device__ __forceinline__ void barrier_init(Barrier* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_done() {  // initialised barriers become visible to the copy engine
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool has_ended(Barrier* b, std::uint32_t parity) {  // does not wait
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(shared_address(b)), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void wait(Barrier* b, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
  }
}

// --- copies ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a tensor of four dimensions to shared memory; coordinates innermost first, zero outside the tensor.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, Barrier* b, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Adds a box of fp32 in shared memory to a tensor of four dimensions; what lies outside the tensor is dropped. The box
// is free once adds_read() returns, the sums are in memory once adds_done() does, in the thread that commits.
__device__ __forceinline__ void add_box(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void adds_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void adds_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void adds_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 x 8 tiles of bf16; lane l names row l % 8 of tile l / 8 and gets row l / 4, columns 2 (l % 4) … of each.
__device__ __forceinline__ void load_tiles(std::uint32_t* to, std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
// The reverse, every tile transposed: lane l holds column l / 4, rows 2 (l % 4) … of what is stored.
__device__ __forceinline__ void store_tiles_transposed(std::uint32_t address, const std::uint32_t* from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
__device__ __forceinline__ void store_pair(std::uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
// This thread's ordinary writes to shared memory come before later reads by wgmma and TMA (after a barrier).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- between blocks --------------------------------------------------------------------------------------------------

__device__ __forceinline__ int read_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(int* p, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
// Adds without waiting for what was there.
__device__ __forceinline__ void add_pair(float* p, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}
// This thread's ordinary accesses to global memory come before its later copies and adds.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- named barriers and registers ------------------------------------------------------------------------------------

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {  // and goes on
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The value of lane 0, so that the compiler knows it to be the same in the whole warp and keeps what follows from it in
// uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// --- arithmetic ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// --- wgmma -----------------------------------------------------------------------------------------------------------
// D[64 x N] (+)= A[64 x 16] · B[16 x N], bf16 into fp32, by the four warps of a warpgroup. Thread t holds D's row
// 16 (t / 32) + t % 32 / 4 + 8 (i / 2), column 8 j + 2 (t % 4) + i % 2 in d[4 j + i]. An A in registers has the same
// map, two columns packed in a word: the words of columns 16 k … of a D, packed, are the A of step k.
// Order: hold() on all registers that the products read or add to, mma_fence, products, mma_commit, mma_wait, hold() on
// the results before they are used. Registers of unfinished products are left alone.

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>  // until at most so many committed groups are unfinished
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kN>  // the values are final above this point and not used before it
__device__ __forceinline__ void hold(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kN>
__device__ __forceinline__ void hold(std::uint32_t (&a)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Descriptors of swizzled slabs. The reduced dimension lies along the columns of a slab (a step of 16 is +32 bytes) …
__device__ __forceinline__ std::uint64_t descriptor_of_columns(std::uint32_t address) {
  return (std::uint64_t{1u << 30 | 1024 >> 4} << 32) | (1u << 16 | address >> 4);
}
// … or along its rows (a step of 16 is +2048 bytes; slab_bytes from one 64 columns of N to the next).
__device__ __forceinline__ std::uint64_t descriptor_of_rows(std::uint32_t address, std::uint32_t slab_bytes) {
  return (std::uint64_t{1u << 30 | 1024 >> 4} << 32) | (slab_bytes >> 4 << 16 | address >> 4);
}
// Further on in the same block of shared memory; the address has room below its field's end.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, std::uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<std::uint32_t>(descriptor) + (bytes >> 4));
}

#define ANNULUS_MMA_F8(d, i)                                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ANNULUS_MMA_F32(d, i) \
  ANNULUS_MMA_F8(d, i), ANNULUS_MMA_F8(d, i + 8), ANNULUS_MMA_F8(d, i + 16), ANNULUS_MMA_F8(d, i + 24)
#define ANNULUS_MMA_R32                                                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27" \
  ",%28,%29,%30,%31"
#define ANNULUS_MMA_R64                                                                                      \
  ANNULUS_MMA_R32                                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57" \
  ",%58,%59,%60,%61,%62,%63"

// A and B in shared memory, A with the reduced dimension along columns, B along rows (kRows = 1) or columns (0);
// `add`: D += …, else D = ….
template <int kRows>
__device__ __forceinline__ void mma_shared(float (&d)[64], std::uint64_t a, std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ANNULUS_MMA_R64 "}, %64, %65, p, 1, 1, 0, %67;\n}\n"
      : ANNULUS_MMA_F32(d, 0), ANNULUS_MMA_F32(d, 32)
      : "l"(a), "l"(b), "r"(add), "n"(kRows));
}
template <int kRows>
__device__ __forceinline__ void mma_shared(float (&d)[32], std::uint64_t a, std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ANNULUS_MMA_R32 "}, %32, %33, p, 1, 1, 0, %35;\n}\n"
      : ANNULUS_MMA_F32(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(kRows));
}
// A in registers.
template <int kRows>
__device__ __forceinline__ void mma_registers(float (&d)[64], const std::uint32_t* a, std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ANNULUS_MMA_R64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
      : ANNULUS_MMA_F32(d, 0), ANNULUS_MMA_F32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kRows));
}
template <int kRows>
__device__ __forceinline__ void mma_registers(float (&d)[32], const std::uint32_t* a, std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ANNULUS_MMA_R32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
      : ANNULUS_MMA_F32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kRows));
}

#undef ANNULUS_MMA_R64
#undef ANNULUS_MMA_R32
#undef ANNULUS_MMA_F32
#undef ANNULUS_MMA_F8

}  // namespace annulus::attention::cuda::sm90
