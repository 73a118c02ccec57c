// Training data: documents packed into samples of S tokens, in an order that no number of ranks can change.
//
// Documents are end-of-document token, tokens, end-of-document token where the tokenizer has one; a position's target is the
// next token of the document. A document with more than S positions is cut into pieces of S whose last target is the true
// next token; shorter pieces share samples. Every piece counts as a document of its own: attention and RoPE positions
// start anew with it. A sample's tail without a document holds token 0, target −1, one document.
// All paths, formats and token ids are checked when the data is opened: DataError with file, line or offset.
// Thread-safe after construction; not collective (every rank reads the same files; the trainer compares hashes).
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
  // Hash of the configuration and of every file's size and content digest: resume compares it.
  std::string fingerprint() const;

  // The next sample after `taken` (samples taken so far of every source), which it advances. The source with the largest
  // deficit against its weight is next; its n-th sample is element n mod num_samples of that epoch's keyed permutation.
  SampleRef next(std::vector<std::int64_t>& taken) const;

  // tokens, targets (−1: none), document_start (index of the first token of the token's document): all [S].
  void read(const SampleRef& ref, std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
            std::span<std::int32_t> document_start) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Documents to score (spec/cli.md, Scoring): windows of S tokens over each document that score every target once.
struct ScoringWindow {
  std::int64_t document = 0;
  std::int64_t begin = 0;         // position in the document of the window's first token
  std::int64_t length = 0;        // tokens, <= S
  std::int64_t score_from = 0;    // positions of the window from here on are scored
};

class ScoringData {
 public:
  ScoringData(const std::vector<std::string>& paths, const std::string& tokenizer, std::int64_t vocab_size,
              std::int64_t sequence_length, std::int64_t stride = 0);  // stride 0: the whole window
  ~ScoringData();

  const std::vector<ScoringWindow>& windows() const;
  std::int64_t num_documents() const;
  std::int64_t num_targets() const;
  std::int64_t num_bytes() const;  // UTF-8 bytes of all text documents; 0 if any document has no text
  // tokens [S] (padded with 0), targets [S] (−1 where not scored). The window is one document.
  void read(const ScoringWindow& window, std::span<std::int32_t> tokens, std::span<std::int32_t> targets) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus::data
