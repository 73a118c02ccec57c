// Register-blocked products for the attention kernels. All four kinds of product that banded attention needs are one
// shape: a few scalars of one operand, broadcast, times a few vectors of the other, summed over one index. A block of
// M x N accumulators stays in registers over the whole sum; nothing is packed on the broadcast side.
//
// Vectors are GCC vector extensions as wide as the target's registers; the block sizes follow the number of registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace annulus::attention::cpu {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kStripVectors = 3;  // a strip's width: 8 x 3 accumulators of 32 registers
inline constexpr int kStripRows = 8;
inline constexpr int kChunkVectors = 4;  // columns of a gradient block: at most 6 x 4
constexpr int chunk_rows(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : 12; }
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kStripVectors = 3;  // 4 x 3 of 16
inline constexpr int kStripRows = 4;
inline constexpr int kChunkVectors = 2;
constexpr int chunk_rows(int vectors) { return vectors == 2 ? 6 : 8; }
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kStripVectors = 2;  // without fused multiply-add a product needs a register of its own
inline constexpr int kStripRows = 4;
inline constexpr int kChunkVectors = 2;
constexpr int chunk_rows(int vectors) { return vectors == 2 ? 4 : 8; }
#endif

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes), may_alias));
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::Type;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
inline const Vector<T>& vector_at(const T* p) {
  return *reinterpret_cast<const Vector<T>*>(p);
}
template <class T>
inline Vector<T>& vector_at(T* p) {
  return *reinterpret_cast<Vector<T>*>(p);
}

// acc[i][n] = sum over k < count of a(i, k) · b[k · b_stride + n · lanes], where a(i, k) is a[i · a_stride + k]
// (kRowsApart: each row is contiguous) or a[i + k · a_stride]. b is aligned.
template <class T, int M, int N, bool kRowsApart>
[[gnu::always_inline]] inline void multiply_block(Vector<T> (&acc)[M][N], const T* a, std::int64_t a_stride, const T* b,
                                                  std::int64_t b_stride, std::int64_t count) {
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[i][n] = Vector<T>{};
  }
  for (std::int64_t k = 0; k < count; ++k) {
    Vector<T> column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = vector_at(b + k * b_stride + n * kLanes<T>);
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) {
      const T scalar = kRowsApart ? a[i * a_stride + k] : a[i + k * a_stride];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[i][n] += scalar * column[n];
    }
  }
}

// body(integral_constant<M>, i) for rows [0, rows) in groups of M, then of M/2, … 1.
template <int M, class Body>
[[gnu::always_inline]] inline void for_row_groups(std::int64_t begin, std::int64_t rows, const Body& body) {
  std::int64_t i = begin;
  for (; i + M <= rows; i += M) body(std::integral_constant<int, M>{}, i);
  if constexpr (M > 1) {
    if (i < rows) for_row_groups<M / 2>(i, rows, body);
  }
}

// scores[j][x] = sum over d < depth of rows[j · stride + d] · columns[d][x] for j < count: the product of `count` key
// or value rows with a transposed strip of N vectors.
template <class T, int N>
void multiply_strip(const T* rows, std::int64_t stride, const T* columns, std::int64_t depth, std::int64_t count,
                    T* scores) {
  constexpr int kWidth = N * kLanes<T>;
  for_row_groups<kStripRows>(0, count, [&](auto m, std::int64_t j) {
    constexpr int M = decltype(m)::value;
    Vector<T> acc[M][N];
    multiply_block<T, M, N, true>(acc, rows + j * stride, stride, columns, kWidth, depth);
    for (int i = 0; i < M; ++i) {
      for (int n = 0; n < N; ++n) vector_at(scores + (j + i) * kWidth + n * kLanes<T>) = acc[i][n];
    }
  });
}

// sum[d][x] = sum[d][x] · factor[x] + sum over j < count of rows[j · stride + d] · weights[j][x] for d < depth: what a
// strip of N vectors gathers from key or value rows. A null factor stands for 1. The new part is summed on its own
// first, so that rounding errors grow with the number of tiles and not of keys.
template <class T, int N>
void gather_strip(const T* rows, std::int64_t stride, const T* weights, std::int64_t count, std::int64_t depth,
                  const T* factor, T* sum) {
  constexpr int kWidth = N * kLanes<T>;
  for_row_groups<kStripRows>(0, depth, [&](auto m, std::int64_t d) {
    constexpr int M = decltype(m)::value;
    Vector<T> acc[M][N];
    multiply_block<T, M, N, false>(acc, rows + d, stride, weights, kWidth, count);
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < M; ++i) {
        Vector<T>& total = vector_at(sum + (d + i) * kWidth + n * kLanes<T>);
        if (factor) total *= vector_at(factor + n * kLanes<T>);
        total += acc[i][n];
      }
    }
  });
}

// One chunk of N vectors of scatter_strip; only `columns` <= N · lanes of them exist in `out`.
template <class T, int N>
void scatter_chunk(const T* weights, std::int64_t width, const T* rows, std::int64_t row_stride, std::int64_t count,
                   T scale, T* out, std::int64_t out_stride, std::int64_t keys, std::int64_t columns) {
  for_row_groups<chunk_rows(N)>(0, keys, [&](auto m, std::int64_t j) {
    constexpr int M = decltype(m)::value;
    Vector<T> acc[M][N];
    multiply_block<T, M, N, true>(acc, weights + j * width, width, rows, row_stride, count);
    if (columns == N * kLanes<T>) {
      for (int i = 0; i < M; ++i) {
        for (int n = 0; n < N; ++n) {
          T* to = out + (j + i) * out_stride + n * kLanes<T>;  // may be unaligned
          Vector<T> total;
          std::memcpy(&total, to, sizeof(total));
          total += scale * acc[i][n];
          std::memcpy(to, &total, sizeof(total));
        }
      }
    } else {
      for (int i = 0; i < M; ++i) {
        for (std::int64_t c = 0; c < columns; ++c) {
          out[(j + i) * out_stride + c] += scale * acc[i][c / kLanes<T>][c % kLanes<T>];
        }
      }
    }
  });
}

// out[j · out_stride + c] += scale · sum over x < count of weights[j · width + x] · rows[x · row_stride + c] for j <
// keys, c < depth: what a strip adds to the gradients of key or value rows. rows are aligned and padded to whole
// vectors.
template <class T>
void scatter_strip(const T* weights, std::int64_t width, const T* rows, std::int64_t row_stride, std::int64_t count,
                   T scale, T* out, std::int64_t out_stride, std::int64_t keys, std::int64_t depth) {
  for (std::int64_t c = 0; c < depth;) {
    const std::int64_t left = depth - c;
    const auto chunk = [&](auto n) {
      constexpr int N = decltype(n)::value;
      const std::int64_t columns = left < N * kLanes<T> ? left : N * kLanes<T>;
      scatter_chunk<T, N>(weights, width, rows + c, row_stride, count, scale, out + c, out_stride, keys, columns);
      c += columns;
    };
    const std::int64_t vectors = (left + kLanes<T> - 1) / kLanes<T>;
    if constexpr (kChunkVectors == 4) {
      if (vectors >= 4) chunk(std::integral_constant<int, 4>{});
      else if (vectors == 3) chunk(std::integral_constant<int, 3>{});
    }
    if (kChunkVectors == 2 ? vectors >= 2 : vectors == 2) chunk(std::integral_constant<int, 2>{});
    else if (vectors == 1) chunk(std::integral_constant<int, 1>{});
  }
}

}  // namespace annulus::attention::cpu
