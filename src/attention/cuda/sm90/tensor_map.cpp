#include "attention/cuda/sm90/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>

#include "core/cuda/device.h"

namespace annulus::attention::cuda::sm90 {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

Encode find_encode() {  // from the driver, without linking to it
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  ANNULUS_CUDA_TRY(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  ANNULUS_CHECK(found == cudaDriverEntryPointSuccess, "the CUDA driver has no cuTensorMapEncodeTiled (12.0 has)");
  return reinterpret_cast<Encode>(function);
}

bool aligned16(const TensorView& x) { return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0; }

}  // namespace

bool fits(const Context& ctx, std::initializer_list<const TensorView*> tensors) {
  if (!std::all_of(tensors.begin(), tensors.end(), [](const TensorView* x) { return aligned16(*x); })) return false;
  int major = 0, minor = 0;
  ANNULUS_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx.cuda->index));
  ANNULUS_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ctx.cuda->index));
  return major == 9 && minor == 0;
}

CUtensorMap head_boxes(const TensorView& x, int box_rows) {
  ANNULUS_CHECK(x.dtype == DType::bf16 || x.dtype == DType::f32, "head_boxes takes bf16 and f32");
  const bool wide = x.dtype == DType::f32;
  const cuuint64_t bytes = wide ? 4 : 2;
  static const Encode encode = find_encode();
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(x.dim(dim)); };
  const cuuint64_t sizes[] = {size(3), size(2), size(1), size(0)};
  const cuuint64_t row = size(2) * size(3) * bytes;
  const cuuint64_t strides[] = {size(3) * bytes, row, size(1) * row};  // bytes, of all but the columns
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / bytes), 1, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode(&map, wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  ANNULUS_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: {} for {} in boxes of {} rows",
                static_cast<int>(result), x.shape.str(), box_rows);
  return map;
}

}  // namespace annulus::attention::cuda::sm90
