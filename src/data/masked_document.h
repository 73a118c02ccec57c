// Documents made for experiments: tokens, of which some are targets, and the random draws they are made with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/rng.h"

namespace annulus::data {

struct MaskedDocument {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> mask;  // 1: the token is a target

  void add(std::int32_t token, bool target = false) {
    tokens.push_back(token);
    mask.push_back(target);
  }
};

std::string to_json_line(const MaskedDocument& document);  // as data/json_lines.h reads it, with the newline

// The draws of one document, in turn; they depend on the arguments alone, on every machine.
class DocumentDraws {
 public:
  DocumentDraws(std::string_view kind, std::int64_t seed, std::int64_t document)
      : rng_(static_cast<std::uint64_t>(seed), kind), next_(static_cast<std::uint64_t>(document) << 32) {}
  // [0, n), even to within n/2^32.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>((rng_.bits(next_++) >> 32) * static_cast<std::uint64_t>(n) >> 32);
  }

 private:
  CounterRng rng_;
  std::uint64_t next_;
};

}  // namespace annulus::data
