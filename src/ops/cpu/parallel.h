// Threads and types of the CPU operations. Work is cut into parts whose bounds do not depend on the number of threads
// wherever a part's result is a reduction, so that results do not either.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tensor.h"

namespace annulus::ops::cpu {

// Below this many elements of streaming work a fork and join of threads costs more than it gains.
constexpr std::int64_t kParallelElements = 1 << 15;

// body(row) for every row; rows cost `elements_per_row` elements of work each.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t elements_per_row, const Body& body) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * elements_per_row >= kParallelElements)
  for (std::int64_t r = 0; r < rows; ++r) body(r);
}

// body(begin, end) over parts of [0, n), for work element by element.
template <class Body>
void for_ranges(std::int64_t n, const Body& body) {
  constexpr std::int64_t kPart = 1 << 13;
  for_rows((n + kPart - 1) / kPart, kPart,
           [&](std::int64_t part) { body(part * kPart, std::min(n, (part + 1) * kPart)); });
}

// body(T{}) with T the tensor's type, float or double: ops/checks.cpp lets no other pass.
template <class Body>
void for_type(const TensorView& x, const Body& body) {
  if (x.dtype == DType::f64) {
    body(double{});
  } else {
    ANNULUS_CHECK(x.dtype == DType::f32, "a CPU operation got {}", name_of(x.dtype));
    body(float{});
  }
}

}  // namespace annulus::ops::cpu
