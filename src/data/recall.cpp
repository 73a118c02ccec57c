#include "data/recall.h"

#include <fmt/format.h>

#include <iterator>
#include <numeric>

#include "core/config_check.h"

namespace annulus::data {
namespace {

constexpr std::int64_t kMaxLength = std::int64_t{1} << 20, kMaxVocab = std::int64_t{1} << 24;

// `count` different numbers of [0, n) in random order (Fisher and Yates).
std::vector<std::int64_t> distinct(DocumentDraws& draws, std::int64_t n, std::int64_t count) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  for (std::int64_t i = 0; i < count; ++i) {
    std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(i + draws.below(n - i))]);
  }
  all.resize(static_cast<std::size_t>(count));
  return all;
}

}  // namespace

void RecallOptions::validate() const {
  check_range("--documents", documents, 1, INT32_MAX);
  check_range("--length", length, 1, kMaxLength);
  check_range("--pairs", pairs, 1, kMaxLength);
  check_range("--gap-min", gap_min, 1, kMaxLength);
  check_range("--vocab", vocab, 3, kMaxVocab);
  check_range("--filler-ids", filler_ids, 1, vocab - 2);
  check_range("--seed", seed, 0);
  check_range("--queries", queries, 0, pairs);
  if (pair_span != 0) check_range("--pair-span", pair_span, 2 * pairs, kMaxLength);
  if (pairs > num_keys()) {
    fail_key("--pairs", fmt::format("{}", pairs),
             fmt::format("at most {}, the number of keys that --vocab {} has beside its filler", num_keys(), vocab),
             fmt::format("--vocab {} or more would fit", 2 * pairs + filler_ids));
  }
  const std::int64_t needed = span() + gap_min - 1 + 2 * num_queries();
  if (length >= needed) return;
  const std::int64_t shorter = gap_min - (needed - length);
  fail_key("--length", fmt::format("{}", length),
           fmt::format("at least {} tokens for the pairs + {} of --gap-min {} + {} for the queries = {}", span(),
                       gap_min - 1, gap_min, 2 * num_queries(), needed),
           needed > kMaxLength ? std::string("shorten --gap-min or --pair-span, or state fewer --pairs")
           : shorter >= 1      ? fmt::format("--length {} or --gap-min {} would fit", needed, shorter)
                               : fmt::format("--length {} would fit", needed));
}

MaskedDocument recall_document(const RecallOptions& o, std::int64_t index) {
  DocumentDraws draws("recall", o.seed, index);
  const auto keys = distinct(draws, o.num_keys(), o.pairs), values = distinct(draws, o.num_keys(), o.pairs);
  const auto asked = distinct(draws, o.pairs, o.num_queries());
  const auto key = [&](std::int64_t i) {
    return static_cast<std::int32_t>(o.filler_ids + keys[static_cast<std::size_t>(i)]);
  };
  const auto value = [&](std::int64_t i) {
    return static_cast<std::int32_t>(o.filler_ids + o.num_keys() + values[static_cast<std::size_t>(i)]);
  };

  MaskedDocument out;
  const auto add_filler = [&] { out.add(static_cast<std::int32_t>(draws.below(o.filler_ids))); };
  // `count` pairs of tokens among filler, `size` tokens in all: each next one is a pair as often as pairs are among
  // what is left, which makes every order equally likely.
  const auto scatter = [&](std::int64_t size, std::int64_t count, auto add_pair) {
    for (std::int64_t left = count, filler = size - 2 * count; left + filler > 0;) {
      if (draws.below(left + filler) < left) {
        add_pair(count - left--);
      } else {
        add_filler();
        --filler;
      }
    }
  };
  scatter(o.span(), o.pairs, [&](std::int64_t i) {
    out.add(key(i));
    out.add(value(i));
  });
  for (std::int64_t i = 1; i < o.gap_min; ++i) add_filler();
  scatter(o.length - std::ssize(out.tokens), o.num_queries(), [&](std::int64_t i) {
    const std::int64_t pair = asked[static_cast<std::size_t>(i)];
    out.add(key(pair));
    out.add(value(pair), true);
  });
  return out;
}

}  // namespace annulus::data
