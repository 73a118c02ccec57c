#include "data/passkey.h"

#include <fmt/format.h>

#include <cmath>

#include "core/config_check.h"

namespace annulus::data {
namespace {

constexpr std::int64_t kMaxLength = std::int64_t{1} << 20;
constexpr std::string_view kFiller =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";
constexpr std::string_view kQuestion = "What is the pass key? The pass key is ";

std::string told(const std::string& key) {
  return fmt::format("The pass key is {}. Remember it. {} is the pass key. ", key, key);
}

std::int64_t fixed_tokens(std::int64_t digits) {
  return std::ssize(told(std::string(static_cast<std::size_t>(digits), '0'))) + std::ssize(kQuestion) + digits;
}

}  // namespace

void PasskeyOptions::validate() const {
  check_range("--documents", documents, 1, INT32_MAX);
  check_range("--length", length, 1, kMaxLength);
  check_range("--digits", digits, 1, 1000);
  check_range("--seed", seed, 0);
  if (depth != -1 && !(depth >= 0 && depth <= 1)) {
    fail_key("--depth", fmt::format("{}", depth), "a share of the filler from 0 to 1, or -1 for anywhere");
  }
  if (const std::int64_t needed = fixed_tokens(digits); length < needed) {
    fail_key("--length", fmt::format("{}", length),
             fmt::format("at least {} bytes for a key of {} digits, told, asked for and answered", needed, digits));
  }
}

MaskedDocument passkey_document(const PasskeyOptions& o, std::int64_t index) {
  DocumentDraws draws("passkey", o.seed, index);
  std::string key;
  for (std::int64_t i = 0; i < o.digits; ++i) {
    key += static_cast<char>(i == 0 ? '1' + draws.below(9) : '0' + draws.below(10));
  }
  const std::int64_t filler = o.length - fixed_tokens(o.digits);
  const std::int64_t before =
      o.depth < 0 ? draws.below(filler + 1) : std::llround(o.depth * static_cast<double>(filler));

  MaskedDocument out;
  const auto add = [&](std::string_view text, bool target = false) {
    for (const char c : text) out.add(static_cast<unsigned char>(c), target);
  };
  const auto add_filler = [&](std::int64_t from, std::int64_t count) {
    for (std::int64_t i = from; i < from + count; ++i) {
      out.add(static_cast<unsigned char>(kFiller[static_cast<std::size_t>(i) % kFiller.size()]));
    }
  };
  add_filler(0, before);
  add(told(key));
  add_filler(before, filler - before);
  add(kQuestion);
  add(key, true);
  return out;
}

}  // namespace annulus::data
