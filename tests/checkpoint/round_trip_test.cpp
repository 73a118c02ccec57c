// What was saved is what is read, bit by bit, whatever wrote it and whatever range is asked for.
#include <cmath>

#include "checkpoint/convert_type.h"
#include "checkpoint/folder.h"
#include "fixture.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;

TEST(RoundTrip, AnyNumberOfWritersAnyRange) {
  const TempFolder run;
  const auto model = small_model();
  for (const int ranks : {1, 2, 3, 4, 90}) {  // 90: the last nine have nothing to write
    const std::string folder = run / ("step-" + std::to_string(ranks));
    save_as(ranks, folder, model, 5);
    const Checkpoint c = Checkpoint::open(folder);
    c.verify();
    EXPECT_EQ(c.meta(), meta_of(5));
    expect_holds(c, model, 5);
    for (const Tensor& t : model) {
      ASSERT_NE(c.find(t.group, t.name), nullptr);
      EXPECT_EQ(c.find(t.group, t.name)->dtype, t.dtype);
      EXPECT_EQ(c.require(t.group, t.name, t.shape).shape, t.shape);
    }
    if (ranks > 4) continue;
    for (const Tensor& t : {model[0], model[1], model[2]}) {
      const CounterRng rng(1, t.group);
      for (std::uint64_t i = 0; i < 60; ++i) {
        const auto a = static_cast<std::int64_t>(rng.bits(2 * i) % static_cast<std::uint64_t>(t.shape.numel() + 1));
        const auto b = static_cast<std::int64_t>(rng.bits(2 * i + 1) % static_cast<std::uint64_t>(t.shape.numel() + 1));
        EXPECT_TRUE(holds_range(c, t, 5, std::min(a, b), std::max(a, b) - std::min(a, b)));
      }
    }
  }
}

TEST(RoundTrip, ManyChunksWideAndTall) {
  const TempFolder run;
  const std::vector<Tensor> model{{"model", "wide", {3, 1400003}, DType::f32},
                                  {"model", "tall", {1501, 1777}, DType::f32},
                                  {"optimizer/m", "vector", {3000001}, DType::bf16}};
  save_as(2, run / "c", model, 1);
  const Checkpoint c = Checkpoint::open(run / "c");
  c.verify();
  expect_holds(c, model, 1);
  EXPECT_TRUE(holds_range(c, model[0], 1, 1400002, 1400005));
  EXPECT_EQ(c.bytes(), 4 * (3 * 1400003 + 1501 * 1777) + 2 * 3000001);
  // Conversion goes block by block.
  std::vector<double> wide(1501 * 1777, std::nan(""));
  c.read("model", "tall", 0, host_view(wide.data(), {1501, 1777}));
  const auto bytes = values_of(model[1], 1);
  std::vector<double> wanted(wide.size());
  convert_type(DType::f32, bytes.data(), DType::f64, wanted.data(), static_cast<std::int64_t>(wanted.size()));
  EXPECT_EQ(std::memcmp(wide.data(), wanted.data(), 8 * wide.size()), 0);
  // Chunks waste little: the files are not much larger than their values.
  std::int64_t on_disk = 0;
  for (const char* name : {"shard-00000.h5", "shard-00001.h5"}) on_disk += file_size(run / "c" + "/" + name);
  EXPECT_LT(on_disk, c.bytes() * 102 / 100);
}

TEST(RoundTrip, ReadsIntoAnotherType) {
  const TempFolder run;
  std::vector<float> f(5000);
  std::vector<double> d(5000);
  std::vector<BFloat16> b(5000);
  const CounterRng rng(3, "values");
  for (std::size_t i = 0; i < f.size(); ++i) {
    d[i] = rng.normal(i);
    f[i] = static_cast<float>(d[i]);
    b[i] = annulus::to_bfloat16(f[i]);
  }
  write_folder(run / "c", meta_of(1),
               {{"model", "d", {50, 100}, 0, host_view(d.data(), {5000})},
                {"model", "f", {5000}, 0, host_view(f.data(), {5000})},
                {"model", "b", {5000}, 0, host_view(b.data(), {5000})}});
  const Checkpoint c = Checkpoint::open(run / "c");
  std::vector<float> as_float(4000);
  std::vector<double> as_double(4000);
  std::vector<BFloat16> as_bf16(4000);
  c.read("model", "b", 7, host_view(as_float.data(), {4000}));
  c.read("model", "f", 7, host_view(as_double.data(), {4000}));
  c.read("model", "d", 7, host_view(as_bf16.data(), {4000}));
  for (std::size_t i = 0; i < 4000; ++i) {
    ASSERT_EQ(as_float[i], to_float(b[i + 7]));
    ASSERT_EQ(as_double[i], static_cast<double>(f[i + 7]));
    ASSERT_EQ(as_bf16[i].bits, to_bfloat16(d[i + 7]).bits);
  }
  c.read("model", "d", 0, host_view(as_float.data(), {10, 400}));  // any shape of the right size
  for (std::size_t i = 0; i < 4000; ++i) ASSERT_EQ(as_float[i], f[i]);
}

TEST(RoundTrip, WhatIsAskedForMustBeThere) {
  const TempFolder run;
  save_as(1, run / "c", small_model(), 1);
  const Checkpoint c = Checkpoint::open(run / "c");
  float x = 0;
  EXPECT_EQ(c.find("model", "model.layers.9.weight"), nullptr);
  expect_parts(checkpoint_error([&] { c.read("model", "missing", 0, host_view(&x, {1})); }),
               {"model/missing", "not found"});
  expect_parts(checkpoint_error([&] {
                 c.require("optimizer/v", "w", {23, 1});
               }),
               {"optimizer/v/w", "[23, 1]", "not found"});
  expect_parts(checkpoint_error([&] {
                 c.require("model", "w", {1, 23});
               }),
               {"model/w", "wanted shape [1, 23]", "found [23, 1]"});
  EXPECT_THROW(c.read("model", "w", 23, host_view(&x, {1})), Error);
}

// Slices that leave a hole, overlap or disagree are found before anything is committed.
TEST(RoundTrip, SlicesMustTileEveryTensor) {
  const TempFolder run;
  std::vector<float> x(20);
  const auto save = [&](std::vector<Slice> slices) {
    return checkpoint_error([&] { write_folder(run / "c", meta_of(1), slices); });
  };
  const auto slice = [&](std::int64_t begin, std::int64_t count, Shape shape) {
    return Slice{"model", "w", shape, begin, host_view(x.data(), {count})};
  };
  expect_parts(save({slice(0, 10, {4, 5}), slice(12, 8, {4, 5})}), {"model/w", "10 to 12", "missing"});
  expect_parts(save({slice(0, 10, {4, 5}), slice(8, 12, {4, 5})}), {"model/w", "8 to 10", "twice"});
  expect_parts(save({slice(0, 19, {4, 5})}), {"model/w", "19 to 20", "missing"});
  expect_parts(save({slice(0, 10, {4, 5}), slice(10, 10, {5, 4})}), {"model/w", "[4, 5]", "[5, 4]"});
  EXPECT_TRUE(names_in(run.path()).empty());
  EXPECT_THROW(write_folder(run / "c", meta_of(1), {slice(15, 10, {4, 5})}), Error);
  EXPECT_EQ(save({slice(0, 20, {4, 5})}), "");
  expect_parts(save({slice(0, 20, {4, 5})}), {run / "c", "there already"});
}

}  // namespace
}  // namespace annulus::checkpoint
