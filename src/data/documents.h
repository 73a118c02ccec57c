// Documents: random access to the tokens of every document in some files and folders (data/mapped_file.h lists them).
//
//   .txt    one document: the file's bytes, served from the map (needs a tokenizer whose tokens are bytes)
//   .jsonl  one document a line (data/json_lines.h)
//   .bin    one document: llm.c's token file, 256 int32 of header (magic, version, count, zeros) and the tokens, little
//           endian; magic 20240520 version 1 is uint16, magic 20240801 version 7 is uint32
//
// All token ids are checked when the files are opened. Nothing is copied: memory is some 100 bytes a document.
// Thread-safe after construction, not collective. Errors are DataErrors with file, and line or token; ConfigError where
// the vocabulary cannot hold the tokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/json_lines.h"
#include "data/mapped_file.h"
#include "data/tokenizer.h"

namespace annulus::data {

class Documents {
 public:
  Documents(const std::vector<std::string>& paths, const Tokenizer& tokenizer, std::int64_t vocab_size);

  std::int64_t size() const { return static_cast<std::int64_t>(documents_.size()); }
  std::int64_t num_tokens(std::int64_t document) const { return get(document).content.count; }
  bool is_text(std::int64_t document) const;  // then its tokens are its UTF-8 bytes
  bool has_mask(std::int64_t document) const { return get(document).mask >= 0; }
  std::string name(std::int64_t document) const;  // "path", "path:line"
  const std::vector<MappedFile>& files() const { return files_; }

  // A document as a sequence x = [before] tokens [after]. Position p reads x[p]; its target is x[p + 1].
  struct Framing {
    bool before = false, after = false;  // the end-of-document token; `id` is set if one of them is
    std::int32_t id = -1;
  };
  std::int64_t num_positions(std::int64_t document, const Framing& framing) const;
  // Positions with a target: all, or with a mask those whose target is a token that the mask has 1 for.
  std::int64_t num_targets(std::int64_t document, const Framing& framing) const;
  // Positions [begin, begin + tokens.size()): x[p], and x[p + 1] or −1 where the mask excludes it. Equal lengths.
  void read(std::int64_t document, const Framing& framing, std::int64_t begin, std::span<std::int32_t> tokens,
            std::span<std::int32_t> targets) const;

 private:
  enum class Kind : std::uint8_t { bytes, json_text, json_tokens, u16, u32 };
  struct Document {
    Kind kind;
    std::int32_t file;  // in files_
    std::int32_t json;  // in json_, −1
    std::int64_t line = 0;
    JsonValue content;       // offset and count for every kind
    std::int64_t mask = -1;  // in masks_
  };
  struct Mask {
    JsonValue value;
    std::int64_t num_targets;
    bool first;  // the first token is one
  };

  const Document& get(std::int64_t document) const;
  void add_file(const std::string& path);
  void add_json_lines();
  void add_token_file();
  template <class Token>
  void add_tokens(Kind kind);
  void require_text_tokenizer(const std::string& where) const;
  void read_tokens(const Document& document, std::int64_t begin, std::span<std::int32_t> out) const;
  void apply_mask(const Document& document, std::int64_t first_token, std::span<std::int32_t> targets) const;

  const Tokenizer& tokenizer_;  // used while opening only
  std::int64_t vocab_size_;
  std::vector<MappedFile> files_;
  std::vector<JsonLines> json_;
  std::vector<Document> documents_;
  std::vector<Mask> masks_;
};

// ConfigError unless every id of the tokenizer, the end of document too, is below vocab_size.
void require_vocabulary(const Tokenizer& tokenizer, std::int64_t vocab_size);

}  // namespace annulus::data
