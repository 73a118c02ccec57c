#include "data/tokenizer.h"

#include "core/error.h"

namespace annulus::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr std::int32_t kEndOfDocument = 256;

  const std::string& name() const override { return name_; }
  std::int64_t vocab_size() const override { return kEndOfDocument + 1; }
  std::optional<std::int32_t> end_of_document() const override { return kEndOfDocument; }
  bool tokens_are_bytes() const override { return true; }

  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> tokens;
    tokens.reserve(text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }

  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const std::int32_t token : tokens) {
      if (token >= 0 && token < kEndOfDocument) {
        text.push_back(static_cast<char>(token));
      } else if (token != kEndOfDocument) {
        text += "\xEF\xBF\xBD";
      }
    }
    return text;
  }

 private:
  const std::string name_ = "bytes";
};

class NoTokenizer final : public Tokenizer {
 public:
  const std::string& name() const override { return name_; }
  std::int64_t vocab_size() const override { return 0; }
  std::optional<std::int32_t> end_of_document() const override { return std::nullopt; }
  bool tokens_are_bytes() const override { return false; }
  std::vector<std::int32_t> encode(std::string_view) const override { fail("encode"); }
  std::string decode(std::span<const std::int32_t>) const override { fail("decode"); }

 private:
  [[noreturn]] static void fail(const char* what) {
    throw DataError(fmt::format(
        "data.tokenizer = \"none\" cannot {} text: give token ids, or set data.tokenizer = \"bytes\"", what));
  }
  const std::string name_ = "none";
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (name == "none") return std::make_unique<NoTokenizer>();
  throw ConfigError(
      fmt::format("data.tokenizer = \"{}\" is unknown: expected \"bytes\" (text as UTF-8 bytes) or \"none\" "
                  "(tokens come ready, from .bin files or {{\"tokens\": [...]}})",
                  name));
}

}  // namespace annulus::data
