// fill, cast, add, scale, add_bias: bound by memory.
#include <cmath>
#include <type_traits>

#include "ops/cpu/parallel.h"
#include "ops/ops.h"

namespace annulus::ops::cpu {
namespace {

template <class T>
void fill_with(const TensorView& y, double value) {
  T* out = y.as<T>();
  const T v = static_cast<T>(value);
  for_ranges(y.numel(), [=](std::int64_t begin, std::int64_t end) { std::fill(out + begin, out + end, v); });
}

// Rounds to odd, so that the rounding to bf16 that follows sees on which side of a tie the double lay.
float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool inexact = back != x && x == x;
  const bool away = std::abs(back) > std::abs(x);
  bits -= inexact && away ? 1u : 0u;  // towards zero; from infinity to the largest number
  bits |= inexact ? 1u : 0u;
  return std::bit_cast<float>(bits);
}

template <class To, class From>
To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, BFloat16>) {
    return static_cast<To>(to_float(x));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    if constexpr (std::is_same_v<From, double>) {
      return to_bfloat16(round_to_odd(x));
    } else {
      return to_bfloat16(x);
    }
  } else {
    return static_cast<To>(x);
  }
}

template <class From, class To>
void cast_typed(const Cast& args) {
  const From* x = args.x.as<From>();
  To* y = args.y.as<To>();
  for_ranges(args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) y[i] = convert<To>(x[i]);
  });
}

template <class From>
void cast_from(const Cast& args) {
  switch (args.y.dtype) {
    case DType::f32:
      return cast_typed<From, float>(args);
    case DType::f64:
      return cast_typed<From, double>(args);
    default:
      return cast_typed<From, BFloat16>(args);
  }
}

}  // namespace

void fill(Context&, const Fill& args) {
  switch (args.y.dtype) {
    case DType::f32:
      return fill_with<float>(args.y, args.value);
    case DType::f64:
      return fill_with<double>(args.y, args.value);
    case DType::i32:
      return fill_with<std::int32_t>(args.y, args.value);
    case DType::i64:
      return fill_with<std::int64_t>(args.y, args.value);
    case DType::u8:
      return fill_with<std::uint8_t>(args.y, args.value);
    case DType::bf16:
    case DType::f16:
      break;
  }
  ANNULUS_CHECK(false, "a CPU operation got {}", name_of(args.y.dtype));
}

void cast(Context&, const Cast& args) {
  switch (args.x.dtype) {
    case DType::i32:
      return cast_typed<std::int32_t, std::int32_t>(args);
    case DType::f32:
      return cast_from<float>(args);
    case DType::f64:
      return cast_from<double>(args);
    default:
      return cast_from<BFloat16>(args);
  }
}

void add(Context&, const Add& args) {
  for_type(args.y, [&](auto type) {
    using T = decltype(type);
    const T* a = args.a.as<T>();
    const T* b = args.b.as<T>();
    T* y = args.y.as<T>();
    for_ranges(args.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) y[i] = a[i] + b[i];
    });
  });
}

void scale(Context&, const Scale& args) {
  for_type(args.y, [&](auto type) {
    using T = decltype(type);
    T* y = args.y.as<T>();
    const T factor = static_cast<T>(args.factor);
    for_ranges(args.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) y[i] *= factor;
    });
  });
}

void add_bias(Context&, const AddBias& args) {
  for_type(args.x, [&](auto type) {
    using T = decltype(type);
    const std::int64_t n = args.x.dim(1);
    T* x = args.x.as<T>();
    const T* bias = args.bias.as<T>();
    for_rows(args.x.dim(0), n, [=](std::int64_t r) {
      T* row = x + r * n;
#pragma omp simd
      for (std::int64_t j = 0; j < n; ++j) row[j] += bias[j];
    });
  });
}

}  // namespace annulus::ops::cpu
