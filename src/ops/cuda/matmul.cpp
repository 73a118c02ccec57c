// matmul by cuBLASLt. Row-major operands are column-major transposes of themselves, so c = op(a)·op(b) is asked for as
// cᵀ = op(b)ᵀ·op(a)ᵀ: b comes first. fp32 is true fp32 (no TF32), bf16 accumulates in fp32. Split-K sums its parts in
// fp32 in a fixed order: deterministic.
//
// cuBLASLt's choice is kept per shape, types and alignment, so that a step whose shapes were seen before allocates
// nothing.
#include <bit>
#include <map>
#include <memory>
#include <tuple>

#include "core/cuda/device.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {
namespace {

using annulus::cuda::Device;

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      throw Error(fmt::format("matmul runs on a GPU in float32 and bfloat16, not in {}{}", name_of(dtype),
                              dtype == DType::f64 ? "; precision fp64 needs device = \"cpu\"" : ""));
  }
}

struct Layout {
  cublasLtMatrixLayout_t handle = nullptr;
  Layout(DType dtype, std::int64_t rows, std::int64_t columns) {  // column-major, dense
    ANNULUS_CUBLAS_TRY(cublasLtMatrixLayoutCreate(&handle, data_type(dtype), static_cast<std::uint64_t>(rows),
                                                  static_cast<std::uint64_t>(columns), rows));
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(handle); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
};

struct Preference {
  cublasLtMatmulPreference_t handle = nullptr;
  Preference() { ANNULUS_CUBLAS_TRY(cublasLtMatmulPreferenceCreate(&handle)); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(handle); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    ANNULUS_CUBLAS_TRY(cublasLtMatmulPreferenceSetAttribute(handle, attribute, &value, sizeof value));
  }
};

struct Operation {
  cublasLtMatmulDesc_t handle = nullptr;
  Operation(bool transpose_first, bool transpose_second) {
    ANNULUS_CUBLAS_TRY(cublasLtMatmulDescCreate(&handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_first);
    set(CUBLASLT_MATMUL_DESC_TRANSB, transpose_second);
  }
  ~Operation() { cublasLtMatmulDescDestroy(handle); }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

 private:
  void set(cublasLtMatmulDescAttributes_t attribute, bool transpose) {
    const cublasOperation_t value = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    ANNULUS_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(handle, attribute, &value, sizeof value));
  }
};

std::uint32_t alignment_of(const TensorView& x) {
  const auto address = reinterpret_cast<std::uintptr_t>(x.data);
  return 1u << std::min(std::countr_zero(address), 8);
}

struct Shape3 {
  std::int64_t m, n, k;
};
using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, DType, DType, std::uint32_t, std::uint32_t,
                       std::uint32_t>;

struct Plan {
  Operation operation;
  Layout first, second, result;  // b, a, c
  cublasLtMatmulAlgo_t algorithm{};

  Plan(Device& device, const Matmul& args, const Shape3& s)
      : operation(args.transpose_b, args.transpose_a),
        first(args.b.dtype, args.transpose_b ? s.k : s.n, args.transpose_b ? s.n : s.k),
        second(args.a.dtype, args.transpose_a ? s.m : s.k, args.transpose_a ? s.k : s.m),
        result(args.c.dtype, s.n, s.m) {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(Device::kWorkspaceBytes));
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(args.b));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(args.a));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(args.c));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(args.c));
    cublasLtMatmulHeuristicResult_t found{};
    int num_found = 0;
    ANNULUS_CUBLAS_TRY(cublasLtMatmulAlgoGetHeuristic(device.blas, operation.handle, first.handle, second.handle,
                                                      result.handle, result.handle, preference.handle, 1, &found,
                                                      &num_found));
    ANNULUS_CHECK(num_found == 1, "cuBLASLt has no kernel for [{}, {}] = [{}, {}] x [{}, {}] in {}", s.m, s.n, s.m, s.k,
                  s.k, s.n, name_of(args.a.dtype));
    algorithm = found.algo;
  }
};

const Plan& plan_for(Device& device, const Matmul& args, const Shape3& s) {
  using Plans = std::map<Key, std::unique_ptr<Plan>>;
  if (!device.matmul_plans) device.matmul_plans = std::make_shared<Plans>();
  auto& plan = (*static_cast<Plans*>(
      device.matmul_plans.get()))[Key{s.m, s.n, s.k, args.transpose_a, args.transpose_b, args.a.dtype, args.c.dtype,
                                      alignment_of(args.a), alignment_of(args.b), alignment_of(args.c)}];
  if (!plan) plan = std::make_unique<Plan>(device, args, s);
  return *plan;
}

}  // namespace

void matmul(Context& ctx, const Matmul& args) {
  const Shape3 s{args.c.dim(0), args.c.dim(1), args.a.dim(args.transpose_a ? 0 : 1)};
  data_type(args.a.dtype);  // refuses f64 before anything else, in an empty product too
  if (s.m == 0 || s.n == 0) return;
  if (s.k == 0) {
    if (args.mode == GradMode::overwrite) {
      ANNULUS_CUDA_TRY(cudaMemsetAsync(args.c.data, 0, static_cast<std::size_t>(args.c.bytes()), ctx.cuda->stream));
    }
    return;
  }
  Device& device = *ctx.cuda;
  const Plan& plan = plan_for(device, args, s);
  const float alpha = 1, beta = args.mode == GradMode::accumulate ? 1 : 0;
  ANNULUS_CUBLAS_TRY(cublasLtMatmul(device.blas, plan.operation.handle, &alpha, args.b.data, plan.first.handle,
                                    args.a.data, plan.second.handle, &beta, args.c.data, plan.result.handle,
                                    args.c.data, plan.result.handle, &plan.algorithm, device.workspace,
                                    static_cast<std::size_t>(Device::kWorkspaceBytes), device.stream));
}

}  // namespace annulus::ops::cuda
