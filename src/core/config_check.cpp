#include "core/config_check.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "core/error.h"

namespace annulus {

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

std::string nearest_word(std::string_view word, std::span<const std::string> candidates) {
  constexpr std::size_t kLongestWord = 64;  // anything longer is no slip of the keyboard
  if (word.size() > kLongestWord) return "";
  const int limit = std::clamp(static_cast<int>(word.size()) / 3, 1, 3);
  std::string best;
  int best_distance = limit + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> candidates) {
  const std::string nearest = nearest_word(word, candidates);
  return nearest.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", nearest);
}

std::string quoted_list(std::span<const std::string> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    text += fmt::format("{}\"{}\"", i == 0 ? "" : i + 1 == words.size() ? " or " : ", ", words[i]);
  }
  return text;
}

void fail_key(std::string_view key, std::string_view value, std::string_view expected, std::string_view advice) {
  throw ConfigError(fmt::format("{} = {}: expected {}{}{}", key, value, expected, advice.empty() ? "" : "; ", advice));
}

void check_choice(std::string_view key, std::string_view value, std::span<const std::string> choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  fail_key(key, fmt::format("\"{}\"", value), quoted_list(choices) + did_you_mean(value, choices));
}

void check_range(std::string_view key, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  fail_key(
      key, fmt::format("{}", value),
      high == INT64_MAX ? fmt::format("an integer >= {}", low) : fmt::format("an integer from {} to {}", low, high));
}

void check_range(std::string_view key, double value, double low, Low kind, double high) {
  const bool above = kind == Low::open ? value > low : value >= low;  // false for NaN
  if (above && value <= high) return;
  const std::string range = fmt::format("a finite number {} {}", kind == Low::open ? ">" : ">=", low);
  fail_key(key, fmt::format("{}", value), high >= 1e300 ? range : fmt::format("{} and <= {}", range, high));
}

}  // namespace annulus
