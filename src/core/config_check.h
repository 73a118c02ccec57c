// Words for configuration errors: every one names the key, its value, what was expected and what to do. Also the
// nearest known word to a misspelt one. Throws ConfigError; not collective.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace annulus {

// Edits that turn one word into the other: insert, delete, replace, swap of neighbours (optimal string alignment).
int edit_distance(std::string_view a, std::string_view b);

// The candidate with the fewest edits, "" if none is within a third of the word's length (at least 1; at most 3 edits).
// Ties go to the first.
std::string nearest_word(std::string_view word, std::span<const std::string> candidates);

// ` (did you mean "x"?)`, or "" if nothing is near.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

// "a", "b" or "c"
std::string quoted_list(std::span<const std::string> words);

// key = value: expected … ; …
[[noreturn]] void fail_key(std::string_view key, std::string_view value, std::string_view expected,
                           std::string_view advice = {});

// The value must be one of `choices`.
void check_choice(std::string_view key, std::string_view value, std::span<const std::string> choices);

// low <= value <= high.
void check_range(std::string_view key, std::int64_t value, std::int64_t low, std::int64_t high = INT64_MAX);
// `low_open`: low itself is refused. NaN and infinities always are.
enum class Low { closed, open };
void check_range(std::string_view key, double value, double low, Low kind, double high = 1e300);

}  // namespace annulus
