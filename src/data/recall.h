// Multi-query associative recall (MQAR; Arora et al., "Zoology", arXiv 2312.04927, section 3): documents that state
// pairs of a key and a value first and ask for some of the keys later. Only what the document said answers a query, so
// accuracy on the answers tells whether a model's attention reaches back over `gap_min` tokens.
//
//   k₀ v₀ … kₙ₋₁ vₙ₋₁  filler … filler  k v  filler …  k v  filler …     n pairs; behind: queries with their answers
//
// Keys are distinct within a document, and so are values: to name any value that was stated is right once in n. A key
// is asked at most once, since an answer is in the document and would answer the next query. Of all ways to place the
// pairs in the first `pair_span` tokens, and the queries behind, every one is as likely (Zoology states the pairs
// without a break, and draws the queries' distances from a power law). The mask has 1 for answers.
//
// Ids: [0, filler_ids) filler, then the keys, then as many values (one id is left over where their number is odd).
// Document i depends on (seed, i, the options that shape a document) alone, on every machine.
#pragma once

#include "data/masked_document.h"

namespace annulus::data {

struct RecallOptions {
  std::int64_t documents = 20000;
  std::int64_t length = 128;    // tokens of a document; 1 … 2^20
  std::int64_t pairs = 8;       // n
  std::int64_t queries = 0;     // keys asked, at most n; 0: all
  std::int64_t pair_span = 0;   // the pairs lie in the first so many tokens, filler between them; 0: 2n, no filler
  std::int64_t gap_min = 1;     // a query lies at least so many tokens behind the last of these
  std::int64_t vocab = 256;     // ids in all
  std::int64_t filler_ids = 1;  // ids that mean nothing, drawn evenly; at least 1
  std::int64_t seed = 0;

  std::int64_t num_queries() const { return queries == 0 ? pairs : queries; }
  std::int64_t span() const { return pair_span == 0 ? 2 * pairs : pair_span; }
  std::int64_t num_keys() const { return (vocab - filler_ids) / 2; }  // and values
  // ConfigError with the option, its value, what was expected and what fits.
  void validate() const;
};

MaskedDocument recall_document(const RecallOptions& options, std::int64_t index);  // validated options; index from 0

}  // namespace annulus::data
