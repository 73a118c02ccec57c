// band_backward on the GPU against naive code in fp64: every kind of band, key buffers one after the other as in the
// ring, odd sizes.
#include "attention/cuda/band_backward_run.h"

namespace annulus::testing {
namespace {

// batch, tokens, keys, query heads, KV heads, head dim
const Case kCases[] = {
    {"one_by_one", {1, 1, 1, 1, 1, 1}, BandKind::causal, DType::f32, {1}},
    {"causal_odd", {2, 37, 37, 4, 2, 7}, BandKind::causal, DType::f32, {37}},
    {"causal_64", {1, 150, 150, 2, 1, 64}, BandKind::causal, DType::bf16, {150}},
    {"causal_128_mqa", {1, 165, 165, 4, 1, 128}, BandKind::causal, DType::bf16, {165}},
    {"full_tiles_128", {1, 128, 128, 2, 2, 128}, BandKind::full, DType::f32, {128}},
    {"full_96_mha", {2, 33, 45, 3, 3, 96}, BandKind::full, DType::f32, {45}},
    {"full_255", {1, 9, 40, 2, 2, 255}, BandKind::full, DType::bf16, {40}},
    {"full_256_hops", {1, 70, 96, 2, 1, 256}, BandKind::full, DType::bf16, {64, 96}},
    {"window_256", {1, 50, 83, 2, 1, 256}, BandKind::window, DType::f32, {83}},
    {"window_hops", {2, 150, 183, 2, 1, 33}, BandKind::window, DType::f32, {10, 144, 183}},
    {"documents_hops", {2, 170, 170, 4, 2, 32}, BandKind::documents, DType::bf16, {35, 64, 170}},
    {"causal_hops_129", {1, 40, 40, 2, 1, 129}, BandKind::causal, DType::f32, {1, 20, 40}},
    {"compressed", {2, 290, 71, 4, 1, 64}, BandKind::compressed, DType::f32, {71}},
    {"compressed_hops", {1, 90, 21, 2, 2, 16}, BandKind::compressed, DType::bf16, {6, 21}},
    {"empty", {2, 11, 13, 2, 1, 24}, BandKind::empty, DType::bf16, {13}},
    {"empty_hops", {1, 11, 13, 2, 1, 24}, BandKind::empty, DType::f32, {5, 13}},
    {"stairs", {2, 181, 177, 2, 1, 48}, BandKind::stairs, DType::f32, {177}},
    {"stairs_hops", {2, 81, 77, 2, 1, 48}, BandKind::stairs, DType::bf16, {31, 32, 77}},
    {"group_of_8", {1, 50, 50, 16, 2, 20}, BandKind::causal, DType::f32, {50}},
    {"misaligned", {1, 40, 40, 2, 1, 64}, BandKind::causal, DType::bf16, {40}, 3},
    {"misaligned_hops", {1, 40, 40, 2, 1, 32}, BandKind::documents, DType::f32, {17, 40}, 1},
};

class BandBackwardCuda : public ::testing::TestWithParam<Case> {};

TEST_P(BandBackwardCuda, IsNearTheTruth) {
  BandGradients band(GetParam());
  const Gradients ours = band.run(0);
  expect_near_truth(band, ours);
  EXPECT_TRUE(band.run(0) == ours) << "other bits the second time";
}

TEST_P(BandBackwardCuda, AddsToWhatIsThere) {
  BandGradients band(GetParam());
  const Gradients once = band.run(0), added = band.run(0.5f);
  const auto additions = static_cast<double>(GetParam().cuts.size());
  const auto compare = [&](const std::vector<float>& x, const std::vector<float>& y, const char* name) {
    double largest = 0.5;
    for (const float value : x) largest = std::max(largest, std::abs(static_cast<double>(value)) + 0.5);
    for (std::size_t i = 0; i < x.size(); ++i) {
      // A rounding of each addition in both sums; exact where nothing is added.
      const double allowed = x[i] == 0 ? 0 : 2 * (additions + 1) * kEps * largest;
      ASSERT_LE(std::abs(y[i] - (x[i] + 0.5)), allowed) << name << " " << i;
    }
  };
  compare(once.d_q, added.d_q, "d_q");
  compare(once.d_k, added.d_k, "d_k");
  compare(once.d_v, added.d_v, "d_v");
}

INSTANTIATE_TEST_SUITE_P(Cases, BandBackwardCuda, ::testing::ValuesIn(kCases),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(BandBackwardCudaOnce, LongCausalSequence) {
  BandGradients band({"long", {1, 700, 700, 2, 1, 128}, BandKind::causal, DType::bf16, {300, 700}});
  expect_near_truth(band, band.run(0));
}

// exp(−lse) overflows: rows beyond a tile's end must not come in, not even as zeros.
TEST(BandBackwardCudaOnce, VeryNegativeLogits) {
  BandGradients band({"negative", {1, 70, 45, 2, 1, 64}, BandKind::full, DType::f32, {45}, 0, 1, 4});
  const auto& in = band.input();
  const auto& truth = band.truth();
  const Gradients ours = band.run(0);
  // The exponent's rounding, a sum of D products of the size of lse, in every p; those of a key add up to T / S.
  const double lse = max_magnitude(truth.lse), p = kEps * std::sqrt(64.0) * lse * 70 / 45;
  EXPECT_GT(lse, 89);
  EXPECT_LE(max_error(ours.d_v, truth.d_v), p * max_magnitude(in.d_o));
  const double d_s = p * in.scale * std::sqrt(64.0) * max_magnitude(in.d_o) * max_magnitude(in.v);
  EXPECT_LE(max_error(ours.d_q, truth.d_q), d_s * max_magnitude(in.k));
  EXPECT_LE(max_error(ours.d_k, truth.d_k), d_s * max_magnitude(in.q));
}

void expect_refused(DType dtype, std::int64_t depth, const char* word) {
  TestDevice device(DeviceKind::cuda);
  GuardedTensors tensors(device);
  const auto x = tensors.add(dtype, {1, 1, 1, depth}), gradient = tensors.add(stat_type(dtype), {1, 1, 1, depth}),
             lse = tensors.add(stat_type(dtype), {1, 1, 1}), bounds = tensors.add(DType::i32, {1, 1});
  tensors.commit();
  const TensorView t = tensors.view(x), g = tensors.view(gradient), rows = tensors.view(bounds),
                   statistic = tensors.view(lse);
  try {
    attention::band_backward(device.context(), {.q = t,
                                                .k = t,
                                                .v = t,
                                                .first = rows,
                                                .last = rows,
                                                .d_o = t,
                                                .lse = statistic,
                                                .delta = statistic,
                                                .d_q = g,
                                                .d_k = g,
                                                .d_v = g});
    FAIL() << "was taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("band_backward"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST(BandBackwardCudaOnce, RefusesFp64ByName) { expect_refused(DType::f64, 8, "float64"); }
TEST(BandBackwardCudaOnce, RefusesWideHeadsByName) { expect_refused(DType::bf16, 257, "257"); }

}  // namespace
}  // namespace annulus::testing
