#include <gtest/gtest.h>

#include <set>

#include "data/corpus.h"
#include "data/dataset.h"
#include "data/files.h"

namespace annulus::data {
namespace {

using testing::expect_error;
using testing::TempFolder;
using Tokens = std::vector<std::int32_t>;

struct Window {
  Tokens tokens, targets;
  bool operator==(const Window&) const = default;
};

std::vector<Window> read_all(const ScoringData& data, std::size_t length) {
  std::vector<Window> windows;
  for (const auto& window : data.windows()) {
    windows.push_back({Tokens(length, -7), Tokens(length, -7)});
    data.read(window, windows.back().tokens, windows.back().targets);
  }
  return windows;
}

TEST(ScoringData, SmallExamples) {
  const TempFolder folder;
  const auto text = folder.write("a.txt", "abcde"), tokens = folder.write("t.jsonl", "{\"tokens\":[5,6,7,8]}"),
             mask = folder.write("m.jsonl", "{\"text\":\"xyz\",\"mask\":[1,0,1]}\n{\"tokens\":[1,2],\"mask\":[1,1]}");
  const ScoringData whole({text}, "bytes", 257, 3);
  EXPECT_EQ(whole.num_targets(), 5);
  EXPECT_EQ(whole.num_bytes(), 5);
  EXPECT_EQ(read_all(whole, 3),
            (std::vector<Window>{{{256, 'a', 'b'}, {'a', 'b', 'c'}}, {{'c', 'd', 0}, {'d', 'e', -1}}}));
  const ScoringData by_one({text}, "bytes", 257, 3, 1);
  EXPECT_EQ(by_one.num_targets(), 5);
  EXPECT_EQ(read_all(by_one, 3), (std::vector<Window>{{{256, 'a', 'b'}, {'a', 'b', 'c'}},
                                                      {{'a', 'b', 'c'}, {-1, -1, 'd'}},
                                                      {{'b', 'c', 'd'}, {-1, -1, 'e'}}}));
  const ScoringData ready({tokens}, "bytes", 9, 8);
  EXPECT_EQ(ready.num_targets(), 3);
  EXPECT_EQ(ready.num_bytes(), 0);
  EXPECT_EQ(read_all(ready, 8), (std::vector<Window>{{{5, 6, 7, 0, 0, 0, 0, 0}, {6, 7, 8, -1, -1, -1, -1, -1}}}));
  const ScoringData masked({mask}, "bytes", 257, 4);
  EXPECT_EQ(masked.num_targets(), 3);
  EXPECT_EQ(masked.num_bytes(), 0);
  EXPECT_EQ(read_all(masked, 4),
            (std::vector<Window>{{{256, 'x', 'y', 0}, {'x', -1, 'z', -1}}, {{1, 0, 0, 0}, {2, -1, -1, -1}}}));
  EXPECT_EQ(masked.document_name(1), mask + ":2");
  const auto masked_text = folder.write("mt.jsonl", "{\"text\":\"xyz\",\"mask\":[1,0,1]}");
  EXPECT_EQ(ScoringData({masked_text}, "bytes", 257, 4).num_bytes(), 2);
  EXPECT_EQ(ScoringData({text, tokens}, "bytes", 257, 4).num_bytes(), 0);
  EXPECT_EQ(ScoringData({text, folder.write("u.jsonl", "{\"text\":\"\\u20ac\"}")}, "bytes", 257, 4).num_bytes(), 8);
}

// Every target once, with the right context, in windows as the header describes them.
void expect_all_scored_once(const testing::Corpus& corpus, const ScoringData& data, bool has_end, std::int64_t size,
                            std::int64_t stride) {
  ASSERT_EQ(data.num_documents(), std::ssize(corpus.documents));
  const auto windows = read_all(data, static_cast<std::size_t>(size));
  std::set<std::pair<std::int64_t, std::int64_t>> scored;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const ScoringWindow& window = data.windows()[w];
    const auto& document = corpus.documents[static_cast<std::size_t>(window.document)];
    const bool framed = has_end && document.is_text;
    Tokens x = document.tokens;
    if (framed) x.insert(x.begin(), 256);
    ASSERT_TRUE(window.length >= 1 && window.length <= size && window.begin % stride == 0);
    ASSERT_TRUE(window.score_from >= 0 && window.score_from < window.length);
    ASSERT_EQ(window.score_from, window.begin == 0 ? 0 : size - stride);  // context: all but a stride
    for (std::int64_t row = 0; row < size; ++row) {
      const std::int32_t token = windows[w].tokens[static_cast<std::size_t>(row)];
      const std::int32_t target = windows[w].targets[static_cast<std::size_t>(row)];
      const auto position = static_cast<std::size_t>(window.begin + row);
      if (row >= window.length) {
        ASSERT_TRUE(token == 0 && target == -1);
        continue;
      }
      ASSERT_EQ(token, x.at(position));
      const bool wanted = row >= window.score_from && (!document.mask || (*document.mask)[position + 1 - framed]);
      ASSERT_EQ(target, wanted ? x.at(position + 1) : -1);
      ASSERT_TRUE(!wanted || scored.emplace(window.document, window.begin + row + 1).second);
    }
  }
  std::size_t expected = 0;
  for (const auto& document : corpus.documents) {
    for (std::size_t i = has_end && document.is_text ? 0 : 1; i < document.tokens.size(); ++i) {
      expected += !document.mask || (*document.mask)[i];
    }
  }
  EXPECT_EQ(scored.size(), expected);
  EXPECT_EQ(data.num_targets(), static_cast<std::int64_t>(expected));
}

TEST(ScoringData, EveryTargetOnceForEveryStride) {
  std::mt19937 rng(3);
  for (int repeat = 0; repeat < 8 && !HasFailure(); ++repeat) {
    const TempFolder folder;
    const bool text = repeat % 2;
    const auto corpus = testing::random_corpus(folder, "c", rng, text, text ? 257 : 70000, 90);
    for (const std::int64_t size : {1, 2, 7, 16, 100}) {
      for (const std::int64_t stride : std::set<std::int64_t>{size, std::max<std::int64_t>(1, size / 2), 1}) {
        const ScoringData data({folder / "c"}, text ? "bytes" : "none", text ? 257 : 70000, size,
                               stride == size ? 0 : stride);
        expect_all_scored_once(corpus, data, text, size, stride);
      }
    }
  }
}

TEST(ScoringData, Errors) {
  const TempFolder folder;
  const auto path = folder.write("a.txt", "a");
  expect_error<ConfigError>([&] { ScoringData({path}, "bytes", 257, 8, 9); }, {"stride 9", "1 to 8"});
  expect_error<ConfigError>([&] { ScoringData({path}, "bytes", 257, 8, -1); }, {"stride -1"});
  expect_error<ConfigError>([&] { ScoringData({path}, "bytes", 257, 0); }, {"sequence length 0"});
  expect_error<ConfigError>([&] { ScoringData({}, "bytes", 257, 8); }, {"no data to score"});
  expect_error<ConfigError>([&] { ScoringData({path}, "bytes", 200, 8); }, {"model.vocab_size = 200", "257"});
  expect_error<DataError>([&] { ScoringData({folder / "no.txt"}, "bytes", 257, 8); }, {"no.txt", "no such file"});
  const auto lonely = folder.write("l.jsonl", "{\"tokens\":[5]}");
  expect_error<DataError>([&] { ScoringData({lonely}, "bytes", 257, 8); }, {lonely, "no target"});
}

}  // namespace
}  // namespace annulus::data
