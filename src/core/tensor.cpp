#include "core/tensor.h"

#include <algorithm>

namespace annulus {

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  ANNULUS_CHECK(dims.size() <= kMaxRank, "a shape has at most {} dimensions, got {}", kMaxRank, dims.size());
  std::copy(dims.begin(), dims.end(), dims_.begin());
  rank_ = static_cast<int>(dims.size());
  for (auto d : dims) ANNULUS_CHECK(d >= 0, "dimensions are not negative: {}", str());
}

std::int64_t Shape::numel() const {
  std::int64_t n = 1;
  for (int i = 0; i < rank_; ++i) {
    ANNULUS_CHECK(!__builtin_mul_overflow(n, (*this)[i], &n), "the number of elements of {} overflows", str());
  }
  return n;
}

Shape Shape::tail() const {
  ANNULUS_CHECK(rank_ > 0, "a scalar has no rows");
  Shape out;
  out.rank_ = rank_ - 1;
  std::copy(dims_.begin() + 1, dims_.begin() + rank_, out.dims_.begin());
  return out;
}

Shape Shape::with_dim0(std::int64_t size) const {
  ANNULUS_CHECK(rank_ > 0, "a scalar has no rows");
  Shape out = *this;
  out.dims_[0] = size;
  return out;
}

std::string Shape::str() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) text += (i ? ", " : "") + std::to_string((*this)[i]);
  return text + "]";
}

void TensorView::check_dtype(DType wanted) const {
  ANNULUS_CHECK(dtype == wanted, "tensor {} holds {}, not {}", shape.str(), name_of(dtype), name_of(wanted));
}

TensorView TensorView::rows(std::int64_t begin, std::int64_t count) const {
  ANNULUS_CHECK(begin >= 0 && count >= 0 && begin + count <= shape[0], "rows {}+{} of {}", begin, count, shape.str());
  TensorView out = *this;
  out.shape = shape.with_dim0(count);
  if (data)
    out.data = static_cast<char*>(data) + begin * shape.tail().numel() * static_cast<std::int64_t>(size_of(dtype));
  return out;
}

TensorView TensorView::operator[](std::int64_t index) const {
  TensorView out = rows(index, 1);
  out.shape = shape.tail();
  return out;
}

TensorView TensorView::reshape(const Shape& new_shape) const {
  ANNULUS_CHECK(new_shape.numel() == numel(), "cannot view {} as {}", shape.str(), new_shape.str());
  TensorView out = *this;
  out.shape = new_shape;
  return out;
}

}  // namespace annulus
