#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace annulus::data {
namespace {

// Best fit, longest first, by trying every sample. Which of several equal rooms is taken changes no room.
std::vector<std::int64_t> rooms_by_trying_all(std::vector<std::int64_t> lengths, std::int64_t size) {
  std::vector<std::int64_t> rooms;
  std::sort(lengths.rbegin(), lengths.rend());
  for (const std::int64_t length : lengths) {
    std::int64_t* best = nullptr;
    for (auto& room : rooms) {
      if (room >= length && (best == nullptr || room < *best)) best = &room;
    }
    if (best == nullptr) best = &rooms.emplace_back(size);
    *best -= length;
  }
  std::sort(rooms.begin(), rooms.end());
  return rooms;
}

// Every position of every document once, in pieces of at most S that end at multiples of S or the document's end.
void expect_partition(const Packing& packing, const std::vector<std::int64_t>& positions, std::int64_t size) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> pieces;
  for (std::int64_t i = 0; i < packing.num_samples(); ++i) {
    std::int64_t used = 0;
    for (const Piece& piece : packing.sample(i)) {
      ASSERT_TRUE(pieces.emplace(std::pair(piece.document, piece.begin), piece.length).second);
      used += piece.length;
    }
    ASSERT_GT(used, 0);
    ASSERT_LE(used, size);
  }
  std::size_t expected = 0;
  for (std::size_t d = 0; d < positions.size(); ++d) {
    for (std::int64_t begin = 0; begin < positions[d]; begin += size, ++expected) {
      const auto piece = pieces.find({static_cast<std::int64_t>(d), begin});
      ASSERT_NE(piece, pieces.end()) << "document " << d << " from " << begin;
      ASSERT_EQ(piece->second, std::min(size, positions[d] - begin));
    }
  }
  ASSERT_EQ(pieces.size(), expected);
}

TEST(Packing, SmallExample) {
  // S = 10. Document 0: full pieces 0 and 10, tail 6. Tails longest first: 6 (0), 5 (1), 4 (2), 3 (3), 2 (4).
  const std::vector<std::int64_t> positions = {26, 5, 4, 3, 2, 0};
  const Packing packing(positions, 10);
  ASSERT_EQ(packing.num_samples(), 4);
  ASSERT_EQ(packing.num_packed_samples(), 2);
  const auto as_list = [&](std::int64_t i) {
    std::vector<std::vector<std::int64_t>> list;
    for (const Piece& piece : packing.sample(i)) list.push_back({piece.document, piece.begin, piece.length});
    return list;
  };
  using List = std::vector<std::vector<std::int64_t>>;
  EXPECT_EQ(as_list(0), (List{{0, 0, 10}}));
  EXPECT_EQ(as_list(1), (List{{0, 10, 10}}));
  EXPECT_EQ(as_list(2), (List{{0, 20, 6}, {2, 0, 4}}));
  EXPECT_EQ(as_list(3), (List{{1, 0, 5}, {3, 0, 3}, {4, 0, 2}}));
}

TEST(Packing, IsBestFitAndPartitionsEveryDocument) {
  std::mt19937 rng(1);
  for (const std::int64_t size : {1, 2, 3, 10, 63, 64, 65, 1000, 4097, 300000}) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      std::vector<std::int64_t> positions, tails;
      const std::int64_t longest = repeat % 2 ? size / 3 + 2 : 3 * size + 1;
      for (int d = 0; d < 400; ++d) {
        positions.push_back(static_cast<std::int64_t>(rng() % static_cast<std::uint32_t>(longest)));
        if (positions.back() % size) tails.push_back(positions.back() % size);
      }
      const Packing packing(positions, size);
      expect_partition(packing, positions, size);
      std::vector<std::int64_t> rooms;
      for (std::int64_t i = packing.num_samples() - packing.num_packed_samples(); i < packing.num_samples(); ++i) {
        rooms.push_back(size);
        for (const Piece& piece : packing.sample(i)) rooms.back() -= piece.length;
      }
      std::sort(rooms.begin(), rooms.end());
      ASSERT_EQ(rooms, rooms_by_trying_all(tails, size)) << "S " << size;
    }
  }
}

TEST(Packing, NothingToPack) {
  EXPECT_EQ(Packing(std::vector<std::int64_t>{}, 8).num_samples(), 0);
  EXPECT_EQ(Packing(std::vector<std::int64_t>{0, 0}, 8).num_samples(), 0);
  EXPECT_EQ(Packing(std::vector<std::int64_t>{16}, 8).num_packed_samples(), 0);
}

}  // namespace
}  // namespace annulus::data
