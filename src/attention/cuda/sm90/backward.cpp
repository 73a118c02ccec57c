#include "attention/cuda/sm90/backward.h"

#include <algorithm>
#include <limits>
#include <numbers>

#include "attention/cuda/sm90/tensor_map.h"
#include "core/cuda/device.h"

namespace annulus::attention::cuda::sm90 {
namespace {

using annulus::cuda::Device;

// Enough heads to give every multiprocessor a key tile of its own where sequences are short, few enough that the blocks
// of a head find its queries in the L2 cache.
constexpr std::int64_t kSectionHeads = 8;

BackwardKernel kernel_for(std::int64_t dim) { return dim == 64 ? backward_kernel_64() : backward_kernel_128(); }

std::int64_t tiles_of(std::int64_t rows, std::int64_t tile) { return (rows + tile - 1) / tile; }

std::int64_t counters(const BandBackward& args) {
  return 1 + args.q.dim(0) * args.q.dim(2) * tiles_of(args.q.dim(1), kernel_for(args.q.dim(3)).rows);
}

}  // namespace

bool takes(const Context& ctx, const BandBackward& args) {
  if (args.q.dtype != DType::bf16 || (args.q.dim(3) != 64 && args.q.dim(3) != 128)) return false;
  if (counters(args) * static_cast<std::int64_t>(sizeof(int)) > Device::kWorkspaceBytes) return false;
  return fits(ctx, {&args.q, &args.k, &args.v, &args.d_o, &args.d_q, &args.d_k, &args.d_v});
}

void band_backward(Context& ctx, const BandBackward& args) {
  const std::int64_t batches = args.q.dim(0), tokens = args.q.dim(1), q_heads = args.q.dim(2), dim = args.q.dim(3);
  const std::int64_t keys = args.k.dim(1), kv_heads = args.k.dim(2);
  const BackwardKernel kernel = kernel_for(dim);
  const std::int64_t tiles = tiles_of(keys, kBackwardKeys) * batches * kv_heads;
  ANNULUS_CHECK(tiles <= std::numeric_limits<int>::max(), "band_backward: {} tiles of work", tiles);

  BackwardParams p{};
  p.q = head_boxes(args.q, kernel.rows);
  p.k = head_boxes(args.k, kBackwardKeys);
  p.v = head_boxes(args.v, kBackwardKeys);
  p.d_o = head_boxes(args.d_o, kernel.rows);
  p.d_q = head_boxes(args.d_q, kernel.rows);
  p.first = args.first.as<std::int32_t>();
  p.last = args.last.as<std::int32_t>();
  p.lse = args.lse.as<float>();
  p.delta = args.delta.as<float>();
  p.d_k = args.d_k.as<float>();
  p.d_v = args.d_v.as<float>();
  p.next_tile = static_cast<int*>(ctx.cuda->workspace);
  p.turns = p.next_tile + 1;
  p.tiles = static_cast<int>(tiles);
  p.query_tiles = static_cast<int>(tiles_of(tokens, kernel.rows));
  p.section_heads = static_cast<int>(std::min(kSectionHeads, batches * kv_heads));
  p.batches = static_cast<int>(batches);
  p.tokens = static_cast<int>(tokens);
  p.keys = static_cast<int>(keys);
  p.q_heads = static_cast<int>(q_heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.scale = static_cast<float>(args.scale);
  p.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  p.ordered = args.ordered;

  ANNULUS_CUDA_TRY(
      cudaMemsetAsync(p.next_tile, 0, static_cast<std::size_t>(counters(args)) * sizeof(int), ctx.cuda->stream));
  ANNULUS_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
  void* arguments[] = {&p};
  ANNULUS_CUDA_TRY(cudaLaunchKernel(reinterpret_cast<const void*>(kernel.kernel),
                                    dim3(static_cast<unsigned>(std::min(p.tiles, ctx.cuda->num_sms))),
                                    dim3(static_cast<unsigned>(kernel.threads)), arguments,
                                    static_cast<std::size_t>(kernel.shared_bytes), ctx.cuda->stream));
}

}  // namespace annulus::attention::cuda::sm90
