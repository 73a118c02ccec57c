// matmul: OpenBLAS, with as many threads as OpenMP has.
#include <cblas.h>
#include <omp.h>

#include <limits>

#include "ops/ops.h"

namespace annulus::ops::cpu {
namespace {

// Threads cost about two microseconds; OpenBLAS starts them far below that much work.
constexpr double kParallelFlops = 2e6;

// OpenBLAS keeps the number of threads it was last told, and a library that once ran with one stays at one.
void set_blas_threads(double flops) {
  const int wanted = flops < kParallelFlops ? 1 : omp_get_max_threads();
  if (openblas_get_num_threads() != wanted) openblas_set_num_threads(wanted);
}

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const float* a, int lda, const float* b, int ldb,
          float beta, float* c) {
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1.0f, a, lda, b, ldb, beta, c, n);
}

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const double* a, int lda, const double* b,
          int ldb, double beta, double* c) {
  cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1.0, a, lda, b, ldb, beta, c, n);
}

// One row times a transposed matrix, as a step of generation does all day: gemm would copy the matrix first.
void gemv(int n, int k, const float* a, const float* b, float beta, float* c) {
  cblas_sgemv(CblasRowMajor, CblasNoTrans, n, k, 1.0f, b, k, a, 1, beta, c, 1);
}

void gemv(int n, int k, const double* a, const double* b, double beta, double* c) {
  cblas_dgemv(CblasRowMajor, CblasNoTrans, n, k, 1.0, b, k, a, 1, beta, c, 1);
}

template <class T>
void multiply(const Matmul& args) {
  const auto to_int = [](std::int64_t x) {
    ANNULUS_CHECK(x <= std::numeric_limits<int>::max(), "a dimension of {} is beyond what BLAS takes", x);
    return static_cast<int>(x);
  };
  const int m = to_int(args.c.dim(0)), n = to_int(args.c.dim(1)), k = to_int(args.a.dim(args.transpose_a ? 0 : 1));
  if (m == 0 || n == 0) return;
  T* c = args.c.as<T>();
  if (k == 0) {  // leading dimensions of 0 are an error to BLAS
    if (args.mode == GradMode::overwrite) std::fill(c, c + args.c.numel(), T(0));
    return;
  }
  set_blas_threads(2.0 * m * n * k);
  const T beta = args.mode == GradMode::accumulate ? T(1) : T(0);
  if (m == 1 && !args.transpose_a && args.transpose_b) {
    gemv(n, k, args.a.as<T>(), args.b.as<T>(), beta, c);
    return;
  }
  gemm(args.transpose_a ? CblasTrans : CblasNoTrans, args.transpose_b ? CblasTrans : CblasNoTrans, m, n, k,
       args.a.as<T>(), args.transpose_a ? m : k, args.b.as<T>(), args.transpose_b ? k : n, beta, c);
}

}  // namespace

void matmul(Context&, const Matmul& args) {
  args.c.dtype == DType::f64 ? multiply<double>(args) : multiply<float>(args);
}

}  // namespace annulus::ops::cpu
