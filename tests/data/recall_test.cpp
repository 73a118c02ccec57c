// Recall documents: what they hold, that limits are limits, and that only the seed and the number choose one.
#include "data/recall.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "data/dataset.h"
#include "data/files.h"

namespace annulus::data {
namespace {

using testing::expect_error;
using testing::TempFolder;

struct Query {
  std::int32_t key = 0;
  std::int64_t position = 0;  // of the key
};

// What a document says, read from left to right without knowledge of how it was made; checks all that recall.h says.
struct Parsed {
  std::map<std::int32_t, std::int32_t> pairs;
  std::vector<std::int64_t> pair_positions;
  std::vector<Query> queries;
  std::int64_t filler = 0;

  Parsed(const RecallOptions& o, const MaskedDocument& document) { read(o, document); }
  void read(const RecallOptions& o, const MaskedDocument& document) {
    const auto& [tokens, mask] = document;
    EXPECT_EQ(std::ssize(tokens), o.length);
    EXPECT_EQ(mask.size(), tokens.size());
    const std::int64_t first_value = o.filler_ids + o.num_keys();
    for (std::size_t p = 0; p < tokens.size(); ++p) {
      ASSERT_GE(tokens[p], 0);
      ASSERT_LT(tokens[p], first_value + o.num_keys());
      if (tokens[p] < o.filler_ids) {
        EXPECT_EQ(mask[p], 0) << p;
        ++filler;
        continue;
      }
      ASSERT_LT(tokens[p], first_value) << "a value without a key at " << p;
      ASSERT_LT(p + 1, tokens.size());
      const std::int32_t key = tokens[p], value = tokens[p + 1];
      ASSERT_GE(value, first_value) << "no value behind the key at " << p;
      EXPECT_EQ(mask[p], 0) << p;
      if (const auto pair = pairs.find(key); pair == pairs.end()) {
        EXPECT_TRUE(queries.empty()) << "a pair behind a query at " << p;
        EXPECT_EQ(mask[p + 1], 0) << p;
        pairs[key] = value;
        pair_positions.push_back(static_cast<std::int64_t>(p));
      } else {
        EXPECT_EQ(value, pair->second) << "a second value for the key at " << p;
        EXPECT_EQ(mask[p + 1], 1) << p;
        queries.push_back({key, static_cast<std::int64_t>(p)});
      }
      ++p;
    }
  }
};

void expect_right(const RecallOptions& o) {
  o.validate();
  for (std::int64_t i = 0; i < o.documents; ++i) {
    SCOPED_TRACE(i);
    const Parsed parsed(o, recall_document(o, i));
    ASSERT_EQ(std::ssize(parsed.pairs), o.pairs);
    std::set<std::int32_t> values, asked;
    for (const auto& [key, value] : parsed.pairs) values.insert(value);
    EXPECT_EQ(std::ssize(values), o.pairs);
    for (const auto& query : parsed.queries) asked.insert(query.key);
    EXPECT_EQ(std::ssize(asked), o.num_queries()) << "a key is asked twice, or not at all";
    ASSERT_EQ(std::ssize(parsed.queries), o.num_queries());
    EXPECT_LE(parsed.pair_positions.back() + 2, o.span());
    EXPECT_GE(parsed.queries.front().position - (o.span() - 1), o.gap_min);
    EXPECT_EQ(parsed.filler, o.length - 2 * o.pairs - 2 * o.num_queries());
  }
}

TEST(Recall, DocumentsAreWhatTheHeaderSays) {
  expect_right({.documents = 50});
  expect_right({.documents = 50, .length = 300, .pairs = 5, .queries = 2, .pair_span = 64, .gap_min = 100});
  expect_right({.documents = 50, .length = 200, .pairs = 7, .pair_span = 31, .vocab = 60, .filler_ids = 33, .seed = 9});
  expect_right({.documents = 50, .length = 32, .pairs = 8, .vocab = 17});  // no filler, every key and value used
  expect_right({.documents = 50, .length = 41, .gap_min = 10});            // exactly fits
  expect_right({.documents = 3, .length = 4, .pairs = 1, .vocab = 3});     // the smallest
}

TEST(Recall, EveryPlaceKeyValueAndOrderOccurs) {
  const RecallOptions o{.documents = 2000,
                        .length = 20,
                        .pairs = 3,
                        .queries = 2,
                        .pair_span = 9,
                        .gap_min = 3,
                        .vocab = 16,
                        .filler_ids = 4,
                        .seed = 3};
  std::set<std::int32_t> keys, values, filler, asked_first;
  std::map<std::int64_t, int> first_pair, first_query;
  std::map<std::size_t, int> asked;  // which pair the first query asks for
  for (std::int64_t i = 0; i < o.documents; ++i) {
    const auto document = recall_document(o, i);
    const Parsed parsed(o, document);
    for (const auto& [key, value] : parsed.pairs) {
      keys.insert(key);
      values.insert(value);
    }
    for (const auto token : document.tokens) {
      if (token < o.filler_ids) filler.insert(token);
    }
    ++first_pair[parsed.pair_positions.front()];
    ++first_query[parsed.queries.front().position];
    for (std::size_t n = 0; n < 3; ++n) {
      const auto at = static_cast<std::size_t>(parsed.pair_positions[n]);
      asked[n] += document.tokens[at] == parsed.queries.front().key;
    }
  }
  EXPECT_EQ(keys, (std::set<std::int32_t>{4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(values, (std::set<std::int32_t>{10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(filler, (std::set<std::int32_t>{0, 1, 2, 3}));
  // 3 pairs and 3 filler tokens have 20 orders: the first pair is first in 10, second in 6, then 3 and 1. 2 queries and
  // 5 filler tokens have 21: the first query stands at 11 in 6, then 5, 4, 3, 2, 1. Within 5 standard deviations.
  const auto near = [&](int count, double share) {
    const double n = static_cast<double>(o.documents);
    EXPECT_NEAR(count, n * share, 5 * std::sqrt(n * share * (1 - share)));
  };
  const double pair_ways[] = {10, 6, 3, 1}, query_ways[] = {6, 5, 4, 3, 2, 1};
  EXPECT_EQ(first_pair.size(), 4u);
  for (int p = 0; p < 4; ++p) near(first_pair[p], pair_ways[p] / 20);
  EXPECT_EQ(first_query.size(), 6u);
  for (int p = 0; p < 6; ++p) near(first_query[11 + p], query_ways[p] / 21);
  for (std::size_t n = 0; n < 3; ++n) near(asked[n], 1.0 / 3);
}

TEST(Recall, SeedAndNumberChooseADocument) {
  const RecallOptions one{.documents = 10, .seed = 1}, more{.documents = 1000, .seed = 1}, other{.seed = 2};
  std::set<std::string> different;
  for (std::int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(to_json_line(recall_document(one, i)), to_json_line(recall_document(more, i)));
    different.insert(to_json_line(recall_document(one, i)));
    different.insert(to_json_line(recall_document(other, i)));
  }
  EXPECT_EQ(different.size(), 200u);
  // On every machine: these bytes are what experiments with this seed refer to.
  EXPECT_EQ(to_json_line(recall_document({.length = 12, .pairs = 2, .gap_min = 2, .vocab = 20, .filler_ids = 3}, 7)),
            "{\"tokens\":[9,17,5,15,1,2,9,17,2,0,5,15],\"mask\":[0,0,0,0,0,0,0,1,0,0,0,1]}\n");
}

// As training and scoring read it: answers are the only targets, and what precedes an answer is its key.
TEST(Recall, ReadersSeeTheAnswersAsTargets) {
  const RecallOptions o{.length = 64, .gap_min = 16, .seed = 5};
  const TempFolder folder;
  std::string lines;
  for (std::int64_t i = 0; i < 6; ++i) lines += to_json_line(recall_document(o, i));
  const std::string path = folder.write("r.jsonl", lines);
  const ScoringData scoring({path}, "none", o.vocab, o.length);
  EXPECT_EQ(scoring.num_documents(), 6);
  EXPECT_EQ(scoring.num_targets(), 6 * o.num_queries());
  DataConfig config;
  config.sources = {{.path = path}};
  config.tokenizer = "none";
  const TrainingData training(config, o.vocab, o.length, 0);
  EXPECT_EQ(training.num_samples(0), 6);
  EXPECT_EQ(training.num_tokens(), 6 * o.num_queries());
  std::vector<std::int32_t> tokens(64), targets(64);
  for (const auto& window : scoring.windows()) {
    scoring.read(window, tokens, targets);
    const auto document = recall_document(o, window.document);
    for (std::size_t p = 0; p + 1 < 64; ++p) {
      EXPECT_EQ(tokens[p], document.tokens[p]);
      EXPECT_EQ(targets[p], document.mask[p + 1] ? document.tokens[p + 1] : -1) << p;
    }
  }
}

TEST(Recall, OptionsThatDoNotFitAreRefused) {
  const auto refused = [](const RecallOptions& o, const std::vector<std::string>& parts) {
    SCOPED_TRACE(parts[0]);
    expect_error<ConfigError>([&] { o.validate(); }, parts);
  };
  refused({.documents = 0}, {"--documents = 0: expected an integer from 1"});
  refused({.length = 0}, {"--length = 0: expected an integer from 1"});
  refused({.pairs = 0}, {"--pairs = 0: expected an integer from 1"});
  refused({.queries = 9}, {"--queries = 9: expected an integer from 0 to 8"});
  refused({.queries = -1}, {"--queries = -1: expected an integer from 0 to 8"});
  refused({.pair_span = 15}, {"--pair-span = 15: expected an integer from 16"});
  refused({.gap_min = 0}, {"--gap-min = 0: expected an integer from 1"});
  refused({.vocab = 2}, {"--vocab = 2: expected an integer from 3"});
  refused({.filler_ids = 255}, {"--filler-ids = 255: expected an integer from 1 to 254"});
  refused({.seed = -1}, {"--seed = -1: expected an integer >= 0"});
  refused({.vocab = 16}, {"--pairs = 8: expected at most 7", "--vocab 17 or more would fit"});
  refused({.length = 31},
          {"--length = 31: expected at least 16 tokens for the pairs + 0", "= 32", "--length 32 would fit"});
  refused({.length = 100, .gap_min = 90}, {"16 tokens for the pairs + 89", "= 121", "--length 121 or --gap-min 69"});
  RecallOptions({.vocab = 17}).validate();
  RecallOptions({.length = 100, .gap_min = 69}).validate();
  RecallOptions({.length = 121, .gap_min = 90}).validate();
}

}  // namespace
}  // namespace annulus::data
