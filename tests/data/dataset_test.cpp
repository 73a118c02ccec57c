#include "data/dataset.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "data/corpus.h"
#include "data/files.h"

namespace annulus::data {
namespace {

using testing::Corpus;
using testing::expect_error;
using testing::PlainDocument;
using testing::TempFolder;
using Tokens = std::vector<std::int32_t>;
constexpr std::int32_t kEnd = 256;

struct Sample {
  Tokens tokens, targets, start;
};

Sample read_sample(const TrainingData& data, std::int64_t index, std::size_t length, int source = 0) {
  Sample sample{Tokens(length, -7), Tokens(length, -7), Tokens(length, -7)};  // poison: read() writes everything
  data.read({source, 0, index}, sample.tokens, sample.targets, sample.start);
  return sample;
}

DataConfig config_of(const std::vector<SourceConfig>& sources, const std::string& tokenizer = "bytes") {
  DataConfig config;
  config.sources = sources;
  config.tokenizer = tokenizer;
  return config;
}

TEST(TrainingData, PacksASmallExample) {
  const TempFolder folder;
  folder.write("a.txt", "abcdef");                                                // positions: E a b c | d e f
  folder.write("b.jsonl", "{\"text\":\"\"}\n{\"tokens\":[9,8],\"mask\":[0,1]}");  // E; E 9
  const TrainingData data(config_of({{folder.path()}}), 257, 4, 0);
  ASSERT_EQ(data.num_samples(0), 3);
  EXPECT_EQ(data.num_tokens(), 7 + 1 + 1);
  const Sample full = read_sample(data, 0, 4), shared = read_sample(data, 1, 4), last = read_sample(data, 2, 4);
  EXPECT_EQ(full.tokens, (Tokens{kEnd, 'a', 'b', 'c'}));
  EXPECT_EQ(full.targets, (Tokens{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(full.start, (Tokens{0, 0, 0, 0}));
  EXPECT_EQ(shared.tokens, (Tokens{'d', 'e', 'f', kEnd}));
  EXPECT_EQ(shared.targets, (Tokens{'e', 'f', kEnd, kEnd}));
  EXPECT_EQ(shared.start, (Tokens{0, 0, 0, 3}));
  EXPECT_EQ(last.tokens, (Tokens{kEnd, 9, 0, 0}));
  EXPECT_EQ(last.targets, (Tokens{-1, 8, -1, -1}));
  EXPECT_EQ(last.start, (Tokens{0, 0, 2, 2}));
}

TEST(TrainingData, TokensWithoutATokenizerGetNoEndOfDocument) {
  const TempFolder folder;
  const auto path = folder.write("a.bin", testing::token_file_u16({50000, 2, 3, 4, 5}));
  const TrainingData data(config_of({{path}}, "none"), 50257, 3, 0);
  ASSERT_EQ(data.num_samples(0), 2);
  EXPECT_EQ(data.num_tokens(), 4);
  EXPECT_EQ(read_sample(data, 0, 3).tokens, (Tokens{50000, 2, 3}));
  EXPECT_EQ(read_sample(data, 0, 3).targets, (Tokens{2, 3, 4}));
  EXPECT_EQ(read_sample(data, 1, 3).tokens, (Tokens{4, 0, 0}));
  EXPECT_EQ(read_sample(data, 1, 3).targets, (Tokens{5, -1, -1}));
  EXPECT_EQ(read_sample(data, 1, 3).start, (Tokens{0, 1, 1}));
}

// The pieces of a document, by the definition: (tokens, targets) of each.
using Piece = std::pair<Tokens, Tokens>;
std::vector<Piece> cut(const PlainDocument& document, bool has_end, std::size_t size) {
  Tokens x = document.tokens, is_target(x.size(), 1);
  if (document.mask) is_target.assign(document.mask->begin(), document.mask->end());
  if (has_end) {
    x.insert(x.begin(), kEnd);
    is_target.insert(is_target.begin(), 0);
    if (!document.mask) x.push_back(kEnd), is_target.push_back(1);
  }
  std::vector<Piece> pieces;
  for (std::size_t p = 0; p + 1 < x.size(); ++p) {
    if (p % size == 0) pieces.emplace_back();
    pieces.back().first.push_back(x[p]);
    pieces.back().second.push_back(is_target[p + 1] ? x[p + 1] : -1);
  }
  return pieces;
}

// The documents of a sample, by document_start.
std::vector<Piece> split(const Sample& sample) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < sample.tokens.size(); ++i) {
    if (sample.start[i] == static_cast<std::int32_t>(i)) pieces.emplace_back();
    EXPECT_EQ(sample.start[i], static_cast<std::int32_t>(i - (pieces.empty() ? 0 : pieces.back().first.size())));
    if (pieces.empty()) return {};
    pieces.back().first.push_back(sample.tokens[i]);
    pieces.back().second.push_back(sample.targets[i]);
  }
  return pieces;
}

void expect_every_piece_once(const Corpus& corpus, const TrainingData& data, bool has_end, std::size_t size) {
  std::map<Piece, int> missing;
  std::int64_t targets = 0, positions = 0;
  for (const auto& document : corpus.documents) {
    for (const auto& piece : cut(document, has_end, size)) {
      ++missing[piece];
      positions += std::ssize(piece.first);
      for (const std::int32_t target : piece.second) targets += target >= 0;
    }
  }
  EXPECT_EQ(data.num_tokens(), targets);
  for (std::int64_t i = 0; i < data.num_samples(0); ++i) {
    const auto pieces = split(read_sample(data, i, size));
    ASSERT_FALSE(pieces.empty());
    for (std::size_t k = 0; k < pieces.size(); ++k) {
      const auto found = missing.find(pieces[k]);
      if (found != missing.end() && found->second > 0) {
        --found->second;
        positions -= std::ssize(pieces[k].first);
        continue;
      }
      const std::size_t n = pieces[k].first.size();  // else it is the empty tail
      ASSERT_TRUE(k > 0 && k + 1 == pieces.size()) << "a piece that no document has, in sample " << i;
      ASSERT_EQ(pieces[k].first, Tokens(n, 0));
      ASSERT_EQ(pieces[k].second, Tokens(n, -1));
    }
  }
  EXPECT_EQ(positions, 0);
  for (const auto& [piece, count] : missing)
    ASSERT_EQ(count, 0) << "a piece of " << piece.first.size() << " is missing";
}

TEST(TrainingData, EveryTargetOnceAndNoPieceCrosses) {
  std::mt19937 rng(1);
  for (int repeat = 0; repeat < 24 && !HasFailure(); ++repeat) {
    const TempFolder folder;
    const bool text = repeat % 2;
    const auto corpus = testing::random_corpus(folder, "c", rng, text, text ? 257 : 70000, repeat < 20 ? 40 : 6000);
    for (const std::size_t size : {repeat < 20 ? 1 : 50, 2, 7, 16, 64, 4096}) {
      const TrainingData data(config_of({{folder / "c"}}, text ? "bytes" : "none"), text ? 257 : 70000,
                              static_cast<std::int64_t>(size), 0);
      expect_every_piece_once(corpus, data, text, size);
    }
  }
}

TEST(TrainingData, EqualDocumentsAreAllKept) {
  const TempFolder folder;
  Corpus corpus;
  for (const char* name : {"a.txt", "b.txt", "c.txt"}) {
    folder.write(name, "same");
    corpus.documents.push_back({{'s', 'a', 'm', 'e'}, true, {}});
  }
  const TrainingData data(config_of({{folder.path()}}), 257, 16, 0);
  EXPECT_EQ(data.num_samples(0), 1);
  expect_every_piece_once(corpus, data, true, 16);
}

// ---- order

std::string many_lines(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) lines += "{\"tokens\":[1,2,3,4]}\n";
  return lines;
}

class TrainingOrder : public ::testing::Test {
 protected:
  // Sources with the given numbers of samples per epoch (S = 5: a document of 4 tokens and an end fills one).
  TrainingData open(const std::vector<int>& samples, const std::vector<double>& weights, std::uint64_t seed = 3) {
    std::vector<SourceConfig> sources;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      sources.push_back({folder_.write("s" + std::to_string(i) + ".jsonl", many_lines(samples[i])), weights[i]});
    }
    return TrainingData(config_of(sources), 257, 5, seed);
  }
  static std::vector<std::int64_t> start(const TrainingData& data) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(data.num_sources()), 0);
  }
  TempFolder folder_;
};

TEST_F(TrainingOrder, EverySampleOncePerEpochInAnotherOrderEachTime) {
  const auto data = open({37}, {1});
  ASSERT_EQ(data.num_samples(0), 37);
  auto taken = start(data);
  std::vector<std::vector<std::int64_t>> epochs;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    auto& order = epochs.emplace_back();
    for (int i = 0; i < 37; ++i) {
      const SampleRef ref = data.next(taken);
      EXPECT_EQ(ref.epoch, epoch);
      order.push_back(ref.index);
    }
    EXPECT_EQ(taken[0], 37 * (epoch + 1));
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    std::vector<std::int64_t> all(37);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sorted, all);
    EXPECT_NE(order, all);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  const auto other = open({37}, {1}, 4);
  auto taken_other = start(other);
  std::vector<std::int64_t> order;
  for (int i = 0; i < 37; ++i) order.push_back(other.next(taken_other).index);
  EXPECT_NE(order, epochs[0]) << "the seed does nothing";
}

TEST_F(TrainingOrder, SourcesOfEqualContentAreShuffledApart) {
  const auto data = open({50, 50}, {1, 1});
  auto taken = start(data);
  std::vector<std::vector<std::int64_t>> order(2);
  for (int i = 0; i < 100; ++i) {
    const SampleRef ref = data.next(taken);
    EXPECT_EQ(ref.source, i % 2);  // ties go to the lower source
    order[static_cast<std::size_t>(ref.source)].push_back(ref.index);
  }
  EXPECT_NE(order[0], order[1]);
}

TEST_F(TrainingOrder, WeightsAreHonouredToWithinOneSample) {
  std::mt19937 rng(5);
  std::vector<std::vector<double>> cases = {
      {1, 1, 1}, {0.7, 0.2, 0.1}, {1, 1e-3}, {2, 100, 1, 10, 1, 1, 100, 2, 10, 1, 100, 1}};
  for (int i = 0; i < 20; ++i) {
    auto& weights = cases.emplace_back(2 + rng() % 8);
    for (auto& weight : weights) weight = std::exp(static_cast<double>(rng() % 1000) / 150.0);
  }
  for (const auto& weights : cases) {
    const auto data = open(std::vector<int>(weights.size(), 3), weights);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    auto taken = start(data);
    for (int t = 1; t <= 3000; ++t) {
      data.next(taken);
      for (std::size_t i = 0; i < weights.size(); ++i) {
        ASSERT_LT(std::abs(static_cast<double>(taken[i]) - weights[i] / sum * t), 1.0)
            << "source " << i << " after " << t;
      }
    }
  }
}

TEST_F(TrainingOrder, TakenIsTheWholePosition) {
  const auto data = open({7, 3, 11}, {0.5, 0.2, 0.3}), reopened = open({7, 3, 11}, {0.5, 0.2, 0.3});
  std::vector<std::vector<std::int64_t>> positions;
  std::vector<SampleRef> stream;
  auto taken = start(data);
  for (int i = 0; i < 100; ++i) {
    positions.push_back(taken);
    stream.push_back(data.next(taken));
  }
  for (std::size_t resume = 0; resume < 100; resume += 13) {
    auto position = positions[resume];
    for (std::size_t i = resume; i < 100; ++i) {
      const SampleRef ref = reopened.next(position);
      ASSERT_TRUE(ref.source == stream[i].source && ref.epoch == stream[i].epoch && ref.index == stream[i].index) << i;
    }
  }
}

TEST_F(TrainingOrder,
       GoldenStream) {  // a change of the order breaks resuming old runs: raise the fingerprint's version
  const auto data = open({5, 4}, {3, 1}, 0);
  auto taken = start(data);
  std::string stream;
  for (int i = 0; i < 12; ++i) {
    const SampleRef ref = data.next(taken);
    stream += std::to_string(ref.source) + std::to_string(ref.epoch) + std::to_string(ref.index) + " ";
  }
  EXPECT_EQ(stream, "001 004 102 002 003 000 101 014 013 012 100 011 ");
}

// ---- fingerprint and errors

TEST(TrainingFingerprint, SeesWhatDecidesTheSamplesAndNothingElse) {
  const TempFolder folder;
  const auto a = folder.write("a.txt", "hello"), b = folder.write("b.txt", "world");
  folder.write("other/renamed.txt", "hello");
  const auto of = [](const DataConfig& config, std::int64_t length, std::int64_t vocab_size = 257,
                     std::uint64_t seed = 0) { return TrainingData(config, vocab_size, length, seed).fingerprint(); };
  const std::string base = of(config_of({{a, 1}, {b, 2}}), 8);
  EXPECT_EQ(base.size(), 32u);
  EXPECT_EQ(base, of(config_of({{a, 2}, {b, 4}}), 8));
  EXPECT_EQ(base, of(config_of({{folder / "other", 1}, {b, 2}}), 8, 300, 5));
  EXPECT_NE(base, of(config_of({{a, 1}, {b, 1}}), 8));
  EXPECT_NE(base, of(config_of({{b, 1}, {a, 2}}), 8));
  EXPECT_NE(base, of(config_of({{a, 1}, {b, 2}}), 9));
  EXPECT_NE(of(config_of({{folder.path()}}), 8), of(config_of({{a}}), 8));
  folder.write("a.txt", "hellO");
  EXPECT_NE(base, of(config_of({{a, 1}, {b, 2}}), 8));
  const auto tokens = folder.write("t.jsonl", "{\"tokens\":[1,2]}");
  EXPECT_NE(of(config_of({{tokens}}, "none"), 8), of(config_of({{tokens}}, "bytes"), 8));
}

TEST(TrainingData, ErrorsOfTheConfiguration) {
  const TempFolder folder;
  const auto path = folder.write("a.txt", "a");
  const auto fails = [&](const DataConfig& config, std::int64_t vocab_size, std::int64_t length,
                         const std::vector<std::string>& parts) {
    expect_error<ConfigError>([&] { TrainingData(config, vocab_size, length, 0); }, parts);
  };
  fails(config_of({}), 257, 8, {"data.sources is empty"});
  fails(config_of({{path, 1}, {path, 0}}), 257, 8, {"data.sources[1].weight = 0", path});
  fails(config_of({{path, -1}}), 257, 8, {"data.sources[0].weight = -1"});
  fails(config_of({{path, std::nan("")}}), 257, 8, {"data.sources[0].weight = nan"});
  fails(config_of({{path, HUGE_VAL}}), 257, 8, {"data.sources[0].weight = inf"});
  fails(config_of({{path}}), 256, 8, {"model.vocab_size = 256", "needs 257"});
  fails(config_of({{path}}), 257, 0, {"train.sequence_length = 0"});
  fails(config_of({{path}}, "words"), 257, 8, {"data.tokenizer = \"words\""});
  const auto lonely = folder.write("l.jsonl", "{\"tokens\":[5]}\n{\"tokens\":[1,2],\"mask\":[1,0]}");
  expect_error<DataError>([&] { TrainingData(config_of({{lonely}}, "none"), 257, 8, 0); }, {lonely, "no target"});
}

}  // namespace
}  // namespace annulus::data
