#include "data/documents.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>

#include "core/error.h"

namespace annulus::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little endian and are read in place");

constexpr std::int64_t kHeaderBytes = 256 * 4;
constexpr std::uint32_t kMagicU16 = 20240520, kVersionU16 = 1;  // llm.c dev/data/data_common.py
constexpr std::uint32_t kMagicU32 = 20240801, kVersionU32 = 7;

template <class Token>
Token load_token(const char* tokens, std::int64_t index) {
  Token token;
  std::memcpy(&token, tokens + index * static_cast<std::int64_t>(sizeof(Token)), sizeof(Token));
  return token;
}

// First index with an id >= limit, or count. Whole blocks are only reduced, which runs at the memory's speed.
template <class Token>
std::int64_t find_id_at_least(const char* tokens, std::int64_t count, std::int64_t limit) {
  if (limit > std::numeric_limits<Token>::max()) return count;
  constexpr std::int64_t kBlock = 4096;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(begin + kBlock, count);
    Token largest = 0;
    for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, load_token<Token>(tokens, i));
    if (largest < limit) continue;
    for (std::int64_t i = begin; i < end; ++i) {
      if (load_token<Token>(tokens, i) >= limit) return i;
    }
  }
  return count;
}

template <class Token>
void widen(const char* tokens, std::int64_t begin, std::span<std::int32_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::int32_t>(load_token<Token>(tokens, begin + static_cast<std::int64_t>(i)));
  }
}

}  // namespace

void require_vocabulary(const Tokenizer& tokenizer, std::int64_t vocab_size) {
  if (vocab_size < tokenizer.vocab_size()) {
    throw ConfigError(
        fmt::format("model.vocab_size = {} is too small for data.tokenizer = \"{}\", which needs {}: set "
                    "model.vocab_size = {} or more",
                    vocab_size, tokenizer.name(), tokenizer.vocab_size(), tokenizer.vocab_size()));
  }
}

Documents::Documents(const std::vector<std::string>& paths, const Tokenizer& tokenizer, std::int64_t vocab_size)
    : tokenizer_(tokenizer), vocab_size_(vocab_size) {
  ANNULUS_CHECK(vocab_size >= 1 && vocab_size <= std::numeric_limits<std::int32_t>::max(), "vocabulary of {}",
                vocab_size);
  for (const auto& path : paths) {
    for (const auto& file : data_files(path)) add_file(file);
  }
}

// ---- opening

void Documents::add_file(const std::string& path) {
  files_.emplace_back(path);
  const auto file = static_cast<std::int32_t>(files_.size() - 1);
  if (path.ends_with(".jsonl")) {
    add_json_lines();
  } else if (path.ends_with(".bin")) {
    add_token_file();
  } else {
    require_text_tokenizer(path);
    documents_.push_back({Kind::bytes, file, -1, 0, {0, std::ssize(files_.back().bytes())}});
  }
}

void Documents::require_text_tokenizer(const std::string& where) const {
  if (!tokenizer_.tokens_are_bytes()) {
    throw DataError(
        fmt::format("{}: text, but data.tokenizer = \"{}\" reads only tokens: set data.tokenizer = \"bytes\", or "
                    "tokenise the text into .bin or {{\"tokens\": [...]}}",
                    where, tokenizer_.name()));
  }
  require_vocabulary(tokenizer_, vocab_size_);
}

void Documents::add_json_lines() {
  const auto file = static_cast<std::int32_t>(files_.size() - 1);
  const MappedFile& source = files_.back();
  const auto json = static_cast<std::int32_t>(json_.size());
  const std::int64_t documents_before = size();
  JsonLines& lines = json_.emplace_back(source.bytes(), source.path(), vocab_size_);
  bool text_seen = false;
  for (JsonDocument line; lines.next(line);) {
    const bool is_text = line.text.offset >= 0;
    if (is_text && !text_seen) require_text_tokenizer(fmt::format("{}:{}", source.path(), line.line));
    text_seen = text_seen || is_text;
    const JsonValue& content = is_text ? line.text : line.tokens;
    const Kind kind = !is_text ? Kind::json_tokens : content.marks < 0 ? Kind::bytes : Kind::json_text;
    documents_.push_back({kind, file, json, line.line, content});
    if (line.mask.offset < 0) continue;
    documents_.back().mask = std::ssize(masks_);
    std::array<std::int32_t, 1> first{};
    if (line.mask.count > 0) lines.read_integers(line.mask, 0, first);
    masks_.push_back({line.mask, line.num_targets, first[0] != 0});
  }
  if (size() == documents_before) {
    throw DataError(
        fmt::format("{}: no document in it, only blank lines: remove it, or put a document into it", source.path()));
  }
}

void Documents::add_token_file() {
  const MappedFile& source = files_.back();
  const std::string& path = source.path();
  const std::int64_t size = std::ssize(source.bytes());
  if (size < kHeaderBytes) {
    throw DataError(
        fmt::format("{}: {} bytes, but llm.c's token file starts with a header of {}: it is cut short, or of "
                    "another format",
                    path, size, kHeaderBytes));
  }
  std::array<std::uint32_t, 3> header;
  std::memcpy(header.data(), source.bytes().data(), sizeof(header));
  const auto [magic, version, count] = header;
  const bool is_u16 = magic == kMagicU16;
  if (!is_u16 && magic != kMagicU32) {
    throw DataError(
        fmt::format("{}: magic number {} at byte 0: expected llm.c's {} (uint16 tokens) or {} (uint32 tokens); "
                    "tokens without a header and other formats are not read: write llm.c's",
                    path, magic, kMagicU16, kMagicU32));
  }
  if (version != (is_u16 ? kVersionU16 : kVersionU32)) {
    throw DataError(fmt::format("{}: version {} at byte 4: expected {} with magic number {}", path, version,
                                is_u16 ? kVersionU16 : kVersionU32, magic));
  }
  const std::int64_t width = is_u16 ? 2 : 4, expected = kHeaderBytes + width * std::int64_t{count};
  if (size != expected) {
    throw DataError(
        fmt::format("{}: the header announces {} tokens, so {} + {} * {} = {} bytes, but the file has {}{}: it is "
                    "{}; write it anew",
                    path, count, kHeaderBytes, width, count, expected, size,
                    (size - kHeaderBytes) % width == 0 ? "" : ", which ends inside a token",
                    size < expected ? "cut short" : "too long, or its header is wrong"));
  }
  if (count == 0) throw DataError(fmt::format("{}: a token file without tokens: remove it", path));
  if (is_u16) {
    add_tokens<std::uint16_t>(Kind::u16);
  } else {
    add_tokens<std::uint32_t>(Kind::u32);
  }
}

template <class Token>
void Documents::add_tokens(Kind kind) {
  const MappedFile& source = files_.back();
  const char* tokens = source.bytes().data() + kHeaderBytes;
  const std::int64_t count = (std::ssize(source.bytes()) - kHeaderBytes) / static_cast<std::int64_t>(sizeof(Token));
  const std::int64_t bad = find_id_at_least<Token>(tokens, count, vocab_size_);
  if (bad < count) {
    throw DataError(
        fmt::format("{}: token {} (byte {}) is {}, outside the vocabulary of {} (ids 0 to {}): set "
                    "model.vocab_size to the tokenizer's size, or tokenise anew",
                    source.path(), bad, kHeaderBytes + bad * static_cast<std::int64_t>(sizeof(Token)),
                    load_token<Token>(tokens, bad), vocab_size_, vocab_size_ - 1));
  }
  documents_.push_back({kind, static_cast<std::int32_t>(files_.size() - 1), -1, 0, {kHeaderBytes, count}});
}

// ---- reading

const Documents::Document& Documents::get(std::int64_t document) const {
  ANNULUS_CHECK(document >= 0 && document < size(), "document {} of {}", document, size());
  return documents_[static_cast<std::size_t>(document)];
}

bool Documents::is_text(std::int64_t document) const {
  return get(document).kind == Kind::bytes || get(document).kind == Kind::json_text;
}

std::string Documents::name(std::int64_t document) const {
  const Document& d = get(document);
  const std::string& path = files_[static_cast<std::size_t>(d.file)].path();
  return d.json < 0 ? path : fmt::format("{}:{}", path, d.line);
}

std::int64_t Documents::num_positions(std::int64_t document, const Framing& framing) const {
  return std::max<std::int64_t>(0, num_tokens(document) + framing.before + framing.after - 1);
}

std::int64_t Documents::num_targets(std::int64_t document, const Framing& framing) const {
  const Document& d = get(document);
  if (d.mask < 0) return num_positions(document, framing);
  const Mask& mask = masks_[static_cast<std::size_t>(d.mask)];
  return mask.num_targets - (mask.first && !framing.before);
}

void Documents::read(std::int64_t document, const Framing& framing, std::int64_t begin, std::span<std::int32_t> tokens,
                     std::span<std::int32_t> targets) const {
  const Document& d = get(document);
  const std::int64_t length = std::ssize(tokens), n = d.content.count;
  ANNULUS_CHECK(tokens.size() == targets.size() && begin >= 0 && begin + length <= num_positions(document, framing),
                "positions {} + {} ({} targets) of {}", begin, length, targets.size(),
                num_positions(document, framing));
  if (length == 0) return;
  // Token i of the document is x[i + before]: x[begin + 1 …] first, as targets, then x[begin] and a shift.
  const std::int64_t first = begin + 1 - framing.before, last = std::min(first + length, n);
  read_tokens(d, first, targets.first(static_cast<std::size_t>(last - first)));
  if (last < first + length) targets.back() = framing.id;
  if (first == 0) {
    tokens[0] = framing.id;
  } else {
    read_tokens(d, first - 1, tokens.first(1));
  }
  std::copy(targets.begin(), targets.end() - 1, tokens.begin() + 1);
  if (d.mask >= 0) apply_mask(d, first, targets);
}

void Documents::read_tokens(const Document& d, std::int64_t begin, std::span<std::int32_t> out) const {
  const char* bytes = files_[static_cast<std::size_t>(d.file)].bytes().data() + d.content.offset;
  switch (d.kind) {
    case Kind::bytes:
      return widen<unsigned char>(bytes, begin, out);
    case Kind::u16:
      return widen<std::uint16_t>(bytes, begin, out);
    case Kind::u32:
      return widen<std::uint32_t>(bytes, begin, out);
    case Kind::json_text:
      return json_[static_cast<std::size_t>(d.json)].read_string(d.content, begin, out);
    case Kind::json_tokens:
      return json_[static_cast<std::size_t>(d.json)].read_integers(d.content, begin, out);
  }
}

void Documents::apply_mask(const Document& d, std::int64_t first_token, std::span<std::int32_t> targets) const {
  constexpr std::int64_t kBlock = 1024;
  const JsonLines& json = json_[static_cast<std::size_t>(d.json)];
  const Mask& mask = masks_[static_cast<std::size_t>(d.mask)];
  const std::int64_t last = std::min(first_token + std::ssize(targets), mask.value.count);
  std::array<std::int32_t, kBlock> ones;
  for (std::int64_t begin = first_token; begin < last; begin += kBlock) {
    const auto block = std::span(ones).first(static_cast<std::size_t>(std::min(kBlock, last - begin)));
    json.read_integers(mask.value, begin, block);
    const auto out = targets.subspan(static_cast<std::size_t>(begin - first_token));
    for (std::size_t i = 0; i < block.size(); ++i) {
      if (block[i] == 0) out[i] = -1;
    }
  }
  if (last < first_token + std::ssize(targets)) targets.back() = -1;  // the end of document after a masked one
}

}  // namespace annulus::data
