// Passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300, section 4.2), as bytes: a number is told once in long
// filler and asked for at the end. Only attention that reaches back to where it was told answers.
//
//   filler … The pass key is 48213. Remember it. 48213 is the pass key. filler … What is the pass key? The pass key is
//   48213
//
// The filler is the same four sentences over and over, cut anywhere, as in the paper; the digits at the end are the
// targets, and to guess one is right once in ten. Ids are bytes, as tokenizer "bytes" has them. Document i depends on
// (seed, i, the options that shape a document) alone, on every machine.
#pragma once

#include "data/masked_document.h"

namespace annulus::data {

struct PasskeyOptions {
  std::int64_t documents = 200;
  std::int64_t length = 2048;  // tokens of a document, the answer included; at most 2^20
  std::int64_t digits = 5;     // of the key; the first is not 0
  double depth = -1;           // where it is told: 0 the start of the filler, 1 its end; -1: anywhere, evenly
  std::int64_t seed = 0;

  // ConfigError with the option, its value, what was expected and what fits.
  void validate() const;
};

MaskedDocument passkey_document(const PasskeyOptions& options, std::int64_t index);  // validated options; index from 0

}  // namespace annulus::data
