// Packing: which stretches of which documents share a sample of S positions.
//
// A document with L positions gives ⌊L/S⌋ full pieces, each a sample on its own, and one tail of L mod S positions.
// Tails share samples by best fit, longest first: a tail goes where it leaves the least room (at most 11/9 of the
// fewest samples possible, Johnson et al. 1974; on real texts less than 1% of the positions stay empty). Deterministic;
// N documents take O(N + S) memory and O(N log₆₄ S + S) time. Sample i is found by one binary search, or
// at once where it is packed. Every position is in exactly one sample.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace annulus::data {

struct Piece {
  std::int64_t document;
  std::int64_t begin;   // first position in the document
  std::int64_t length;  // positions, 1 … S
};

class Packing {
 public:
  // positions[d] >= 0 positions of document d; sequence_length S >= 1.
  Packing(std::span<const std::int64_t> positions, std::int64_t sequence_length);

  std::int64_t num_samples() const { return num_full_samples() + num_packed_samples(); }
  std::int64_t num_packed_samples() const { return static_cast<std::int64_t>(packed_begin_.size()) - 1; }
  std::vector<Piece> sample(std::int64_t index) const;  // in order; together at most S positions

 private:
  struct FullRun {  // the full pieces of one document
    std::int64_t document;
    std::int64_t first_sample;
  };
  struct Tail {
    std::int64_t document;
    std::int64_t positions;  // of the document; the tail is its last positions mod S
  };

  std::int64_t num_full_samples() const { return num_full_samples_; }
  void pack_tails(const std::vector<Tail>& tails);

  std::int64_t sequence_length_;
  std::int64_t num_full_samples_ = 0;
  std::vector<FullRun> full_;
  std::vector<Tail> packed_;                // tails in the order of their samples
  std::vector<std::int64_t> packed_begin_;  // packed sample j holds packed_[packed_begin_[j]] … [packed_begin_[j + 1]]
};

}  // namespace annulus::data
