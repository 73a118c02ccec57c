#include "attention/cuda/sm90/forward.h"

#include <algorithm>
#include <limits>
#include <numbers>

#include "attention/cuda/sm90/tensor_map.h"
#include "core/cuda/device.h"

namespace annulus::attention::cuda::sm90 {
namespace {

constexpr std::int64_t kL2Bytes = std::int64_t{32} << 20;  // of keys and values that stay in half of an H200's L2

int as_int(std::int64_t x) {
  ANNULUS_CHECK(x <= std::numeric_limits<int>::max(), "band_forward: {} tiles of work", x);
  return static_cast<int>(x);
}

}  // namespace

bool takes(const Context& ctx, const BandForward& args) {
  if (args.q.dtype != DType::bf16 || args.k.numel() == 0) return false;
  if (args.q.dim(3) != 64 && args.q.dim(3) != 128) return false;
  return fits(ctx, {&args.q, &args.k, &args.v, &args.o, &args.out});
}

void band_forward(Context& ctx, const BandForward& args) {
  const std::int64_t batches = args.q.dim(0), tokens = args.q.dim(1), q_heads = args.q.dim(2), dim = args.q.dim(3);
  const std::int64_t keys = args.k.dim(1), kv_heads = args.k.dim(2);
  const ForwardKernel kernel = dim == 64 ? forward_kernel_64() : forward_kernel_128();
  const std::int64_t row_tiles = (tokens + kernel.rows - 1) / kernel.rows;
  const std::int64_t head_bytes = 2 * keys * dim * 2;

  ForwardParams p{};
  p.q = head_boxes(args.q, kernel.rows);
  p.k = head_boxes(args.k, kForwardKeys);
  p.v = head_boxes(args.v, kForwardKeys);
  p.first = args.first.as<std::int32_t>();
  p.last = args.last.as<std::int32_t>();
  p.o = args.o.as<float>();
  p.lse = args.lse.as<float>();
  p.out = static_cast<__nv_bfloat16*>(args.out.data);
  p.next_tile = static_cast<int*>(ctx.cuda->workspace);
  p.tiles = as_int(row_tiles * batches * q_heads);
  p.row_tiles = static_cast<int>(row_tiles);
  p.section_heads = static_cast<int>(std::clamp<std::int64_t>(kL2Bytes / head_bytes, 1, batches * kv_heads));
  p.batches = static_cast<int>(batches);
  p.tokens = static_cast<int>(tokens);
  p.keys = static_cast<int>(keys);
  p.q_heads = static_cast<int>(q_heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.scale = static_cast<float>(args.scale);
  p.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  p.has_state = args.has_state;

  ANNULUS_CUDA_TRY(cudaMemsetAsync(p.next_tile, 0, sizeof(int), ctx.cuda->stream));
  ANNULUS_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
  void* arguments[] = {&p};
  ANNULUS_CUDA_TRY(cudaLaunchKernel(reinterpret_cast<const void*>(kernel.kernel),
                                    dim3(static_cast<unsigned>(std::min(p.tiles, ctx.cuda->num_sms))),
                                    dim3(static_cast<unsigned>(kernel.threads)), arguments,
                                    static_cast<std::size_t>(kernel.shared_bytes), ctx.cuda->stream));
}

}  // namespace annulus::attention::cuda::sm90
