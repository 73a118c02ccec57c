// Training data: documents packed into samples of S tokens, in an order that no number of ranks can change. And
// documents to score.
//
// A training document is end-of-document token, tokens, end-of-document token where the tokenizer has one; a position's
// target is the next token of the document. n tokens make n + 1 positions, n − 1 without end-of-document tokens. A
// document with more than S positions is cut into pieces of S whose last target is the true next token; shorter pieces
// share samples (data/packing.h). Every piece counts as a document of its own: attention and RoPE positions start anew
// with it. A sample's tail without a document holds token 0, target −1, one document. A document with a mask has a
// target where the mask has 1 for it (a first token that nothing precedes is never one), and no end-of-document token
// behind it, which would be no target: n or n − 1 positions. All paths, formats and token ids are checked when the data
// is opened: DataError with file, line or offset; ConfigError for what the configuration says. Thread-safe after
// construction; not collective (every rank reads the same files; the trainer compares hashes).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/config.h"

namespace annulus::data {

struct SampleRef {
  std::int32_t source = 0;
  std::int64_t epoch = 0;
  std::int64_t index = 0;  // in the source, before shuffling: 0 … num_samples − 1
};

class TrainingData {
 public:
  TrainingData(const DataConfig& config, std::int64_t vocab_size, std::int64_t sequence_length, std::uint64_t seed);
  ~TrainingData();

  int num_sources() const;
  std::int64_t num_samples(int source) const;  // per epoch
  std::int64_t num_tokens() const;             // targets per epoch, all sources
  // XXH3-128 of the tokenizer, S, the weights and every file's size and content (data/fingerprint.h), in hex; not of
  // paths nor of the seed, which is the run's. Resume compares it. The first call reads all files.
  std::string fingerprint() const;

  // The next sample after `taken` (samples taken so far of every source, the whole position of a run), which it
  // advances. After any number of samples every source has had its weight's share of them to within one sample
  // (Tijdeman, "The chairman assignment problem", 1980; taking the largest deficit can be off by more). Ties go to the
  // lower source. A source's n-th sample is element n mod num_samples of that epoch's keyed permutation.
  SampleRef next(std::vector<std::int64_t>& taken) const;

  // tokens, targets (−1: none), document_start (index of the first token of the token's document): all [S].
  void read(const SampleRef& ref, std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
            std::span<std::int32_t> document_start) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Documents to score (spec/cli.md, Scoring): windows of S positions over each document that score every target once.
// A {"tokens"} or .bin document is scored as it stands, its first token no target. A text document is preceded by the
// end-of-document token, and each of its tokens is a target. A mask restricts the targets.
// Row r of a window reads token begin + r of the document and scores token begin + r + 1, which is also the number of
// tokens that precede that target in the document (the end-of-document token before a text included).
struct ScoringWindow {
  std::int64_t document = 0;
  std::int64_t begin = 0;       // position in the document of the window's first token
  std::int64_t length = 0;      // positions, 1 … S
  std::int64_t score_from = 0;  // rows of the window from here on are scored: earlier windows scored the others
};

class ScoringData {
 public:
  // stride: 1 … S, how far a window lies behind the one before; 0: the whole window.
  ScoringData(const std::vector<std::string>& paths, const std::string& tokenizer, std::int64_t vocab_size,
              std::int64_t sequence_length, std::int64_t stride = 0);
  ~ScoringData();

  const std::vector<ScoringWindow>& windows() const;  // by document, then begin
  std::int64_t num_documents() const;
  std::string document_name(std::int64_t document) const;  // "path", or "path:line"
  std::int64_t num_targets() const;
  // UTF-8 bytes of the targets: of all text documents where none has a mask; 0 if any document has no text.
  std::int64_t num_bytes() const;
  // tokens [S] (padded with 0), targets [S] (−1 where not scored). The window is one document.
  void read(const ScoringWindow& window, std::span<std::int32_t> tokens, std::span<std::int32_t> targets) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus::data
