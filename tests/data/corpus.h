// Random corpora of every kind of file, and beside each what its documents are, written down without the readers.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "data/files.h"

namespace annulus::data::testing {

struct PlainDocument {
  std::vector<std::int32_t> tokens;
  bool is_text = false;
  std::optional<std::vector<int>> mask;
};

struct Corpus {
  std::vector<PlainDocument> documents;  // in the order of the files' names, then of lines
};

// Files f00, f01 … in folder/name. `text`: also .txt files and {"text"} lines; all ids < vocab_size.
inline Corpus random_corpus(const TempFolder& folder, const std::string& name, std::mt19937& rng, bool text,
                            std::int32_t vocab_size, std::size_t longest) {
  Corpus corpus;
  const auto random_tokens = [&](std::int32_t limit, std::size_t shortest) {
    std::vector<std::int32_t> tokens(shortest + rng() % (longest - shortest + 1));
    for (auto& token : tokens) token = static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(limit));
    return tokens;
  };
  const auto integer_list = [](const auto& integers) {
    std::string list = "[";
    for (const auto integer : integers) list.append(list.size() > 1 ? "," : "").append(std::to_string(integer));
    return list.append("]");
  };
  for (int file = 0; file < 6; ++file) {
    const std::string stem = name + "/f0" + std::to_string(file);
    const unsigned kind = file == 0 ? 2 : rng() % (text ? 4 : 3);
    if (kind == 0) {
      const auto tokens = random_tokens(std::min(vocab_size, 65536), 1);
      folder.write(stem + ".bin", token_file_u16(std::vector<std::uint16_t>(tokens.begin(), tokens.end())));
      corpus.documents.push_back({tokens, false, {}});
    } else if (kind == 1) {
      const auto tokens = random_tokens(vocab_size, 1);
      folder.write(stem + ".bin", token_file_u32(std::vector<std::uint32_t>(tokens.begin(), tokens.end())));
      corpus.documents.push_back({tokens, false, {}});
    } else if (kind == 3) {
      const auto bytes = random_tokens(256, 1);
      folder.write(stem + ".txt", std::string(bytes.begin(), bytes.end()));
      corpus.documents.push_back({bytes, true, {}});
    } else {
      std::string lines;
      for (int line = 0; line < 8; ++line) {
        PlainDocument document;
        document.is_text = text && rng() % 2;
        document.tokens = random_tokens(document.is_text ? 128 : vocab_size, 0);
        std::string content = "\"tokens\":" + integer_list(document.tokens);
        if (document.is_text) {
          content = "\"text\":\"";
          for (const std::int32_t c : document.tokens) {
            char escape[8];
            std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
            content += c < 32 || c == '"' || c == '\\' ? std::string(escape) : std::string(1, static_cast<char>(c));
          }
          content += "\"";
        }
        if (rng() % 3 == 0) {
          document.mask.emplace();
          for (std::size_t i = 0; i < document.tokens.size(); ++i)
            document.mask->push_back(static_cast<int>(rng() % 2));
          content += ",\"mask\":" + integer_list(*document.mask);
        }
        lines += "{" + content + "}\n";
        corpus.documents.push_back(std::move(document));
      }
      folder.write(stem + ".jsonl", lines);
    }
  }
  return corpus;
}

}  // namespace annulus::data::testing
