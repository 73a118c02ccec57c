// The best of a stream of scores, for every vector lane on its own, and the exponential that makes the scores.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "attention/cpu/micro_kernel.h"

namespace annulus::attention::cpu {

template <class T>
struct IndexOf;
template <>
struct IndexOf<float> {
  using Scalar = std::int32_t;
  typedef std::int32_t Type __attribute__((vector_size(kVectorBytes), may_alias));
  typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes), may_alias));
};
template <>
struct IndexOf<double> {
  using Scalar = std::int64_t;
  typedef std::int64_t Type __attribute__((vector_size(kVectorBytes), may_alias));
  typedef std::uint64_t Bits __attribute__((vector_size(kVectorBytes), may_alias));
};
template <class T>
using LaneIndex = typename IndexOf<T>::Scalar;  // as wide as T: comparisons of T and of indices mask each other
template <class T>
using IndexVector = typename IndexOf<T>::Type;

template <class T>
inline const IndexVector<T>& index_at(const LaneIndex<T>* p) {
  return *reinterpret_cast<const IndexVector<T>*>(p);
}
template <class T>
inline IndexVector<T>& index_at(LaneIndex<T>* p) {
  return *reinterpret_cast<IndexVector<T>*>(p);
}

// Whether any lane of a comparison's result holds.
template <class Mask>
inline bool any(const Mask& mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#else
  std::uint64_t words[kVectorBytes / 8], all = 0;
  std::memcpy(words, &mask, sizeof(words));
  for (const std::uint64_t word : words) all |= word;
  return all != 0;
#endif
}

// Coefficients of 2^f, |f| <= 1/2, in powers of f: minimax for the relative error, 2e-9 (float), and Taylor's, 4e-18.
template <class T>
inline constexpr std::array<T, 14> kExp2Coefficients = [] {
  std::array<T, 14> c{1};
  for (std::size_t i = 1; i < c.size(); ++i)
    c[i] = c[i - 1] * static_cast<T>(0.693147180559945309417L / static_cast<long double>(i));
  return c;
}();
template <>
inline constexpr std::array<float, 7> kExp2Coefficients<float> = {1.0f,
                                                                  6.9314720574e-01f,
                                                                  2.4022646891e-01f,
                                                                  5.5503287770e-02f,
                                                                  9.6184889571e-03f,
                                                                  1.3399931219e-03f,
                                                                  1.5345812001e-04f};

// 2^x for x that is not large: below 1 ulp (float) and 2 ulp (double) of error for normal results, 0 where the result
// is smaller. What it gives for x above the largest exponent or NaN means nothing, which spares a third of the work of
// vector_exp2 (core/vector_math.h).
template <class T>
[[gnu::always_inline]] inline Vector<T> exp2_of(Vector<T> x) {
  constexpr bool kFloat = sizeof(T) == 4;
  constexpr T kRound = kFloat ? T(0x1.8p23) : T(0x1.8p52), kLowest = kFloat ? -126 : -1022;
  constexpr const auto& c = kExp2Coefficients<T>;
  constexpr int kDegree = static_cast<int>(c.size()) - 1;
  const Vector<T> rounded = x + kRound;  // the integer stands in the low bits
  const Vector<T> f = x - (rounded - kRound);
  Vector<T> p = f * c[kDegree] + c[kDegree - 1];
#pragma GCC unroll 16
  for (int i = kDegree - 2; i >= 0; --i) p = p * f + c[i];
  using Bits = typename IndexOf<T>::Bits;  // unsigned: where x is out of range the sum wraps round
  p = reinterpret_cast<Vector<T>>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(rounded) << (kFloat ? 23 : 52)));
  return x < kLowest ? Vector<T>{} : p;
}

// The `size` best of a stream of scores >= 0 with ascending indices, per lane of a strip of N vectors: sorted by score,
// descending, until sort_by_index(); of equal scores the one that came first. All lanes of a vector insert together, as
// neighbouring rows mostly agree in what is good.
template <class T, int N>
class TopLists {
 public:
  static constexpr std::int64_t kWidth = N * kLanes<T>;

  // Memory for size · kWidth scores and as many indices.
  TopLists(std::int64_t size, T* scores, LaneIndex<T>* indices) : size_(size), scores_(scores), indices_(indices) {}

  void clear() {
    for (std::int64_t i = 0; i < size_ * kWidth; ++i) {
      scores_[i] = -1;
      indices_[i] = -1;
    }
  }

  // Offers index `block` with `score` to vector n's lanes of `wanted`.
  [[gnu::always_inline]] void offer(int n, std::int64_t block, Vector<T> score, IndexVector<T> wanted) {
    const std::int64_t last = (size_ - 1) * kWidth + n * kLanes<T>;
    score = wanted ? score : Vector<T>{} - 1;
    if (any(score > vector_at(scores_ + last))) insert(last, static_cast<LaneIndex<T>>(block), score);
  }

  // Reorders every lane's list by index: Batcher's merge exchange (Knuth, 5.2.2 M), the same steps for all lanes.
  void sort_by_index() {
    for (std::int64_t run = 1; run < size_; run *= 2) {
      for (std::int64_t step = run; step > 0; step /= 2) {
        for (std::int64_t begin = step % run; begin + step < size_; begin += 2 * step) {
          for (std::int64_t i = begin; i < std::min(begin + step, size_ - step); ++i) {
            if (i / (2 * run) == (i + step) / (2 * run)) exchange(indices_ + i * kWidth, step * kWidth);
          }
        }
      }
    }
  }

  LaneIndex<T> index(std::int64_t rank, std::int64_t lane) const { return indices_[rank * kWidth + lane]; }

 private:
  // From the worst entry upwards, each becomes the middle one of itself, the entry above and the new one.
  [[gnu::noinline]] void insert(std::int64_t at, LaneIndex<T> block, Vector<T> score) {
    const IndexVector<T> fresh = IndexVector<T>{} + block;
    Vector<T> entry = vector_at(scores_ + at);
    IndexVector<T> moved = score > entry;
    for (; at >= kWidth; at -= kWidth) {
      const Vector<T> above = vector_at(scores_ + at - kWidth);
      const IndexVector<T> further = score > above;
      vector_at(scores_ + at) = further ? above : (moved ? score : entry);
      IndexVector<T>& index = index_at<T>(indices_ + at);
      index = further ? index_at<T>(indices_ + at - kWidth) : (moved ? fresh : index);
      if (!any(further)) return;
      entry = above;
      moved = further;
    }
    vector_at(scores_ + at) = moved ? score : entry;
    index_at<T>(indices_ + at) = moved ? fresh : index_at<T>(indices_ + at);
  }

  static void exchange(LaneIndex<T>* at, std::int64_t distance) {
    for (int n = 0; n < N; ++n, at += kLanes<T>) {
      const IndexVector<T> a = index_at<T>(at), b = index_at<T>(at + distance);
      index_at<T>(at) = a < b ? a : b;
      index_at<T>(at + distance) = a < b ? b : a;
    }
  }

  std::int64_t size_;
  T* scores_;
  LaneIndex<T>* indices_;
};

}  // namespace annulus::attention::cpu
