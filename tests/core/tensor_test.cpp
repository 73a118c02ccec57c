// Shape and TensorView.
#include "core/tensor.h"

#include <gtest/gtest.h>

#include <vector>

namespace annulus {
namespace {

TEST(Shape, Basics) {
  const Shape scalar, shape{2, 3, 4};
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape.numel(), 24);
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(shape[-1], 4);
  EXPECT_EQ(shape.str(), "[2, 3, 4]");
  EXPECT_EQ(scalar.str(), "[]");
  EXPECT_EQ(shape.tail(), (Shape{3, 4}));
  EXPECT_EQ(shape.with_dim0(9), (Shape{9, 3, 4}));
  EXPECT_EQ((Shape{2, 0, 4}.numel()), 0);
  EXPECT_NE((Shape{2, 3}), (Shape{2, 3, 0}));  // the rank counts
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
}

TEST(Shape, Refusals) {
  EXPECT_THROW((Shape{1, 2, 3, 4, 5, 6}), Error);
  EXPECT_THROW((Shape{2, -1}), Error);
  EXPECT_THROW(Shape().tail(), Error);
  EXPECT_THROW(Shape().with_dim0(1), Error);
  EXPECT_THROW((Shape{std::int64_t{1} << 40, std::int64_t{1} << 40}.numel()), Error);
}

TEST(TensorView, SlicesAlongDimension0AreViews) {
  std::vector<float> data(24);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  const TensorView x = host_view(data.data(), {4, 3, 2});
  EXPECT_EQ(x.bytes(), 96);
  const TensorView rows = x.rows(1, 2);
  EXPECT_EQ(rows.shape, (Shape{2, 3, 2}));
  EXPECT_EQ(rows.as<float>(), data.data() + 6);
  EXPECT_EQ(x[3].shape, (Shape{3, 2}));
  EXPECT_EQ(x[3][1].as<float>()[0], 20);
  EXPECT_EQ(x[3][1][1].shape, Shape());
  EXPECT_EQ(x[3][1][1].as<float>()[0], 21);
  EXPECT_EQ(x.rows(4, 0).numel(), 0);
  EXPECT_EQ(x.reshape({2, 12}).as<float>(), data.data());
  EXPECT_EQ(x.flat().shape, (Shape{24}));
}

TEST(TensorView, Refusals) {
  std::vector<float> data(12);
  const TensorView x = host_view(data.data(), {4, 3});
  EXPECT_THROW(x.as<double>(), Error);
  EXPECT_THROW(x.as<BFloat16>(), Error);
  EXPECT_THROW(x.rows(3, 2), Error);
  EXPECT_THROW(x.rows(-1, 2), Error);
  EXPECT_THROW(x.rows(0, -1), Error);
  EXPECT_THROW(x[4], Error);
  EXPECT_THROW(x.reshape({5, 2}), Error);
}

TEST(TensorView, ViewsOfAPlanHaveNoMemory) {
  const TensorView planned{nullptr, DType::f32, DeviceKind::cpu, {4, 3}};
  EXPECT_EQ(planned.rows(2, 1).data, nullptr);
  EXPECT_EQ(planned[3].data, nullptr);
  EXPECT_EQ(planned.as<float>(), nullptr);
}

}  // namespace
}  // namespace annulus
