// band_forward and band_backward in bf16 with 64 and 128 columns, where a GPU has kernels of its own for it
// (cuda/sm90).
#include "attention/cuda/band_backward_run.h"
#include "attention/cuda/band_run.h"

namespace annulus::testing {
namespace {

class BandTensorCores : public ::testing::TestWithParam<Case> {};

TEST_P(BandTensorCores, IsNearTheTruth) {
  Band band(GetParam(), true);
  band.run();
  band.expect_near_truth();
}

TEST_P(BandTensorCores, TheSameBitsAgainAndWithoutOut) {
  Band once(GetParam(), false), again(GetParam(), true);
  once.run();
  again.run();
  const auto a = once.o(), b = again.o();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
  const auto x = once.lse(), y = again.lse();
  EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0);
}

TEST_P(BandTensorCores, GradientsAreNearTheTruthAndTheSameBitsAgain) {
  BandGradients band(GetParam());
  const Gradients ours = band.run(0);
  expect_near_truth(band, ours);
  EXPECT_TRUE(band.run(0) == ours) << "other bits the second time";
}

TEST_P(BandTensorCores, GradientsInAnyOrder) {
  BandGradients band(GetParam());
  expect_near_truth(band, band.run(0, false));
}

INSTANTIATE_TEST_SUITE_P(Tiles, BandTensorCores, ::testing::ValuesIn(kTiles),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace annulus::testing
