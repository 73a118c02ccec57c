// Shape and TensorView: a non-owning, contiguous, row-major tensor of up to five dimensions on one device.
// Slices along dimension 0 are views; everything else is an operation. Owners are arenas (core/arena.h).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/error.h"

namespace annulus {

enum class DeviceKind : std::uint8_t { cpu, cuda };

class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);

  int rank() const { return rank_; }
  std::int64_t operator[](int dim) const { return dims_[static_cast<std::size_t>(dim < 0 ? dim + rank_ : dim)]; }
  std::int64_t numel() const;  // 1 for rank 0
  Shape tail() const;          // without dimension 0
  Shape with_dim0(std::int64_t size) const;
  std::string str() const;  // "[2, 3]"
  bool operator==(const Shape&) const = default;

 private:
  std::array<std::int64_t, kMaxRank> dims_{};  // unused entries stay 0, so that == compares whole arrays
  int rank_ = 0;
};

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  DeviceKind device = DeviceKind::cpu;
  Shape shape;

  std::int64_t numel() const { return shape.numel(); }
  std::int64_t bytes() const { return numel() * static_cast<std::int64_t>(size_of(dtype)); }
  std::int64_t dim(int i) const { return shape[i]; }

  // Typed access; a wrong type is an internal error. Null while an arena is only planned.
  template <class T>
  T* as() const {
    check_dtype(dtype_of<T>());
    return static_cast<T*>(data);
  }

  TensorView rows(std::int64_t begin, std::int64_t count) const;  // [begin, begin + count) of dimension 0
  TensorView operator[](std::int64_t index) const;                // one row, dimension 0 dropped
  TensorView reshape(const Shape& new_shape) const;               // the same number of elements
  TensorView flat() const { return reshape({numel()}); }

 private:
  void check_dtype(DType wanted) const;
};

// A view of host memory that the caller owns and that outlives the view.
template <class T>
TensorView host_view(T* data, const Shape& shape) {
  return {data, dtype_of<T>(), DeviceKind::cpu, shape};
}

}  // namespace annulus
