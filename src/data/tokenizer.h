// Tokenizer: text to token ids and back. "bytes": the UTF-8 bytes are the ids 0 … 255, end of document is 256, no file
// is needed, any bytes at all are text. "none": tokens come ready, there is no text and no end of document.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual const std::string& name() const = 0;
  virtual std::int64_t vocab_size() const = 0;  // ids are below this; 0: no ids of its own, fits every model
  virtual std::optional<std::int32_t> end_of_document() const = 0;
  // A document's tokens are its bytes: readers then serve text where it lies in the file, without encode().
  virtual bool tokens_are_bytes() const = 0;

  // DataError for "none". decode() leaves out the end of document and writes U+FFFD for an id that stands for no text
  // (a model's vocabulary may be larger than the tokenizer's).
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  virtual std::string decode(std::span<const std::int32_t> tokens) const = 0;
};

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);  // ConfigError for an unknown name

}  // namespace annulus::data
