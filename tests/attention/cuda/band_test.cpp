// band_forward, band_bounds and band_delta on the GPU against naive code in fp64: every kind of band, carried state,
// odd sizes.
#include "attention/cuda/band_run.h"

namespace annulus::testing {
namespace {

// batch, tokens, keys, query heads, KV heads, head dim
const Case kCases[] = {
    {"one_by_one", {1, 1, 1, 1, 1, 1}, BandKind::causal, DType::f32, {1}},
    {"causal_odd", {2, 37, 37, 4, 2, 7}, BandKind::causal, DType::f32, {37}},
    {"causal_64", {1, 70, 70, 2, 1, 64}, BandKind::causal, DType::bf16, {70}},
    {"causal_128_mqa", {1, 65, 65, 4, 1, 128}, BandKind::causal, DType::bf16, {65}},
    {"full_96_mha", {2, 33, 45, 3, 3, 96}, BandKind::full, DType::f32, {45}},
    {"full_255", {1, 9, 40, 2, 2, 255}, BandKind::full, DType::bf16, {40}},
    {"window_256", {1, 50, 83, 2, 1, 256}, BandKind::window, DType::f32, {83}},
    {"window_hops", {2, 50, 83, 2, 1, 33}, BandKind::window, DType::f32, {10, 44, 83}},
    {"documents_hops", {2, 70, 70, 4, 2, 32}, BandKind::documents, DType::bf16, {35, 64, 70}},
    {"causal_hops_129", {1, 40, 40, 2, 1, 129}, BandKind::causal, DType::f32, {1, 20, 40}},
    {"compressed", {2, 90, 21, 4, 1, 64}, BandKind::compressed, DType::f32, {21}},
    {"compressed_hops", {1, 90, 21, 2, 2, 16}, BandKind::compressed, DType::bf16, {6, 21}},
    {"empty", {2, 11, 13, 2, 1, 24}, BandKind::empty, DType::bf16, {13}},
    {"empty_hops", {1, 11, 13, 2, 1, 24}, BandKind::empty, DType::f32, {5, 13}},
    {"stairs", {2, 81, 77, 2, 1, 48}, BandKind::stairs, DType::f32, {77}},
    {"stairs_hops", {2, 81, 77, 2, 1, 48}, BandKind::stairs, DType::bf16, {31, 32, 77}},
    {"misaligned", {1, 40, 40, 2, 1, 64}, BandKind::causal, DType::bf16, {40}, 3},
    {"misaligned_hops", {1, 40, 40, 2, 1, 32}, BandKind::documents, DType::f32, {17, 40}, 1},
};

class BandCuda : public ::testing::TestWithParam<Case> {};

TEST_P(BandCuda, IsNearTheTruth) {
  Band band(GetParam(), true);
  band.run();
  band.expect_near_truth();
}

TEST_P(BandCuda, WithoutOutTheStateIsTheSame) {
  Band with(GetParam(), true), without(GetParam(), false);
  with.run();
  without.run();
  const auto a = with.o(), b = without.o();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);  // and the same bits again
  const auto x = with.lse(), y = without.lse();
  EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, BandCuda, ::testing::ValuesIn(kCases),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(BandCudaOnce, LongCausalSequence) {
  Band band({"long", {1, 700, 700, 2, 1, 128}, BandKind::causal, DType::bf16, {300, 700}}, true);
  band.run();
  band.expect_near_truth();
}

TEST(BandCudaOnce, RefusesFp64ByName) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  const auto x = tensors.add(DType::f64, {1, 1, 1, 8}), lse = tensors.add(DType::f64, {1, 1, 1});
  const auto bounds = tensors.add(DType::i32, {1, 1});
  tensors.commit();
  const TensorView t = tensors.view(x), rows = tensors.view(bounds);
  try {
    attention::band_forward(
        device.context(),
        {.q = t, .k = t, .v = t, .first = rows, .last = rows, .o = t, .lse = tensors.view(lse), .out = {}});
    FAIL() << "fp64 was taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("band_forward"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("float64"), std::string::npos) << e.what();
  }
}

TEST(BandCudaOnce, BoundsCountRowsOfBothChunks) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  constexpr std::int64_t kTokens = 300, kChunk = 13;
  const Shape shape{2, kTokens};
  const auto global_first = tensors.add(DType::i32, shape), global_last = tensors.add(DType::i32, shape);
  const auto first = tensors.add(DType::i32, shape), last = tensors.add(DType::i32, shape);
  tensors.commit();
  const auto global = [](std::int64_t i, bool is_last) {
    return static_cast<std::int32_t>(is_last ? i % kTokens : i % kTokens / 3 - 1);
  };
  for (std::int64_t i = 0; i < 2 * kTokens; ++i) {
    const std::int32_t a = global(i, false), b = global(i, true);
    std::memcpy(tensors.host(global_first) + 4 * i, &a, 4);
    std::memcpy(tensors.host(global_last) + 4 * i, &b, 4);
  }
  for (const std::int64_t second : {std::int64_t{150}, std::int64_t{-1}}) {
    const std::int64_t begins[2] = {26, second};
    tensors.upload();
    attention::band_bounds(device.context(), {.global_first = tensors.view(global_first),
                                              .global_last = tensors.view(global_last),
                                              .first = tensors.view(first),
                                              .last = tensors.view(last),
                                              .chunk = kChunk,
                                              .chunk_begin = {begins[0], begins[1]}});
    tensors.download();
    EXPECT_EQ(tensors.check_guards(), "");
    const auto rows_before = [&](std::int64_t token) {  // counted, not computed
      std::int32_t rows = 0;
      for (const std::int64_t begin : begins) {
        for (std::int64_t s = begin; begin >= 0 && s < begin + kChunk; ++s) rows += s < token;
      }
      return rows;
    };
    const auto got_first = values<std::int32_t>(tensors, first), got_last = values<std::int32_t>(tensors, last);
    for (std::int64_t i = 0; i < 2 * kTokens; ++i) {
      ASSERT_EQ(got_first[static_cast<std::size_t>(i)], rows_before(global(i, false))) << i;
      ASSERT_EQ(got_last[static_cast<std::size_t>(i)], rows_before(global(i, true) + 1) - 1) << i;
    }
  }
}

void check_delta(DType dtype, DType o_dtype) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  constexpr std::int64_t kBatch = 2, kTokens = 19, kHeads = 3, kDim = 71;
  const auto d_o = tensors.add(dtype, {kBatch, kTokens, kHeads, kDim}, 1),
             o = tensors.add(o_dtype, {kBatch, kTokens, kHeads, kDim}, 1);
  const auto delta = tensors.add(DType::f32, {kBatch, kHeads, kTokens});
  tensors.commit();
  const std::int64_t n = kBatch * kTokens * kHeads * kDim;
  const auto x = draw(n, dtype, "d_o"), y = draw(n, o_dtype, "o");
  for (std::int64_t i = 0; i < n; ++i) {
    put(tensors.host(d_o), dtype, i, x[static_cast<std::size_t>(i)]);
    put(tensors.host(o), o_dtype, i, y[static_cast<std::size_t>(i)]);
  }
  tensors.upload();
  attention::band_delta(device.context(),
                        {.d_o = tensors.view(d_o), .o = tensors.view(o), .delta = tensors.view(delta)});
  tensors.download();
  EXPECT_EQ(tensors.check_guards(), "");
  const auto got = values<float>(tensors, delta);
  for (std::int64_t row = 0; row < kBatch * kTokens; ++row) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      double sum = 0, magnitude = 0;
      for (std::int64_t c = 0; c < kDim; ++c) {
        const auto at = static_cast<std::size_t>((row * kHeads + h) * kDim + c);
        sum += x[at] * y[at];
        magnitude += std::abs(x[at] * y[at]);
      }
      const auto at = static_cast<std::size_t>((row / kTokens * kHeads + h) * kTokens + row % kTokens);
      ASSERT_LE(std::abs(got[at] - sum), kEps * kDim * magnitude) << row << " " << h;  // of a sum in any order
    }
  }
}

TEST(BandCudaOnce, Delta) {
  check_delta(DType::f32, DType::f32);
  check_delta(DType::bf16, DType::bf16);
  check_delta(DType::bf16, DType::f32);
}

}  // namespace
}  // namespace annulus::testing
