// band_forward in bf16 with 64 and 128 columns, where a GPU has kernels of its own for it (cuda/sm90): tiles of 128
// queries and 128 keys, cut everywhere, and what follows from tiles: rows and consumers that see nothing, keys that
// only some rows see, keys that no row sees between those that some do.
#include "attention/cuda/band_run.h"

namespace annulus::testing {
namespace {

constexpr DType kBf16 = DType::bf16;

// batch, tokens, keys, query heads, KV heads, head dim
const Case kTiles[] = {
    {"one_64", {1, 1, 1, 1, 1, 64}, BandKind::causal, kBf16, {1}},
    {"one_128", {1, 1, 1, 1, 1, 128}, BandKind::causal, kBf16, {1}},
    {"tile_64", {1, 128, 128, 1, 1, 64}, BandKind::full, kBf16, {128}},
    {"tile_128", {1, 128, 128, 1, 1, 128}, BandKind::full, kBf16, {128}},
    {"over_a_tile_64", {1, 129, 129, 2, 2, 64}, BandKind::causal, kBf16, {129}},
    {"over_a_tile_128", {1, 129, 129, 2, 2, 128}, BandKind::causal, kBf16, {129}},
    {"half_a_tile", {2, 64, 320, 2, 1, 128}, BandKind::full, kBf16, {320}},
    {"batch_and_groups_64", {2, 257, 257, 8, 2, 64}, BandKind::causal, kBf16, {257}},
    {"batch_and_groups_128", {2, 255, 255, 8, 1, 128}, BandKind::causal, kBf16, {255}},
    {"no_groups", {2, 200, 391, 3, 3, 128}, BandKind::full, kBf16, {391}},
    {"later_queries", {1, 150, 700, 2, 1, 64}, BandKind::causal, kBf16, {700}},
    {"window_64", {2, 500, 500, 2, 1, 64}, BandKind::window, kBf16, {500}},
    {"window_128", {2, 300, 433, 2, 1, 128}, BandKind::window, kBf16, {433}},
    {"documents_64", {2, 400, 400, 4, 2, 64}, BandKind::documents, kBf16, {400}},
    {"documents_128", {2, 333, 333, 2, 1, 128}, BandKind::documents, kBf16, {333}},
    {"long_documents", {1, 900, 900, 1, 1, 128}, BandKind::long_documents, kBf16, {900}},
    {"compressed_64", {2, 600, 149, 4, 1, 64}, BandKind::compressed, kBf16, {149}},
    {"compressed_128", {1, 600, 149, 16, 1, 128}, BandKind::compressed, kBf16, {149}},
    {"empty_64", {2, 131, 140, 2, 1, 64}, BandKind::empty, kBf16, {140}},
    {"stairs_64", {2, 300, 460, 2, 1, 64}, BandKind::stairs, kBf16, {460}},
    {"stairs_128", {2, 300, 460, 2, 1, 128}, BandKind::stairs, kBf16, {460}},
    {"gaps_64", {2, 300, 900, 2, 1, 64}, BandKind::gaps, kBf16, {900}},
    {"gaps_128", {1, 300, 900, 2, 1, 128}, BandKind::gaps, kBf16, {900}},
    {"causal_hops_64", {2, 260, 260, 4, 1, 64}, BandKind::causal, kBf16, {100, 130, 260}},
    {"causal_hops_128", {1, 390, 390, 2, 1, 128}, BandKind::causal, kBf16, {128, 256, 390}},
    {"window_hops", {1, 390, 390, 2, 1, 128}, BandKind::window, kBf16, {1, 300, 390}},
    {"documents_hops", {2, 390, 390, 2, 1, 64}, BandKind::documents, kBf16, {128, 200, 390}},
    {"empty_hops", {1, 140, 260, 2, 1, 128}, BandKind::empty, kBf16, {100, 260}},
    {"stairs_hops", {2, 300, 460, 2, 1, 128}, BandKind::stairs, kBf16, {31, 132, 460}},
    {"gaps_hops", {1, 300, 900, 2, 1, 64}, BandKind::gaps, kBf16, {200, 513, 900}},
    {"sharp_64", {1, 300, 300, 2, 1, 64}, BandKind::causal, kBf16, {300}, 0, 40},
    {"sharp_128", {1, 300, 300, 2, 1, 128}, BandKind::causal, kBf16, {130, 300}, 0, 40},
    {"flat_128", {1, 300, 300, 2, 1, 128}, BandKind::full, kBf16, {300}, 0, 1e-3},
    {"many_tiles", {3, 260, 260, 32, 4, 64}, BandKind::causal, kBf16, {260}},  // more than the GPU has processors
    {"misaligned_128", {1, 150, 150, 2, 1, 128}, BandKind::causal, kBf16, {150}, 1},
};

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

INSTANTIATE_TEST_SUITE_P(Tiles, BandTensorCores, ::testing::ValuesIn(kTiles),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace annulus::testing
