#include "data/json_lines.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace annulus::data {
namespace {

unsigned char byte(char c) { return static_cast<unsigned char>(c); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// What a byte means inside a string: ordinary, the start of something, or forbidden.
enum class StringByte : std::uint8_t { ordinary, quote, escape, control, multi };
constexpr std::array<StringByte, 256> kStringBytes = [] {
  std::array<StringByte, 256> table{};
  for (std::size_t i = 0; i < 256; ++i) {
    table[i] = i < 0x20 ? StringByte::control : i >= 0x80 ? StringByte::multi : StringByte::ordinary;
  }
  table['"'] = StringByte::quote;
  table['\\'] = StringByte::escape;
  return table;
}();

int encode_utf8(std::uint32_t code, char (&out)[4]) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    out[0] = static_cast<char>(code);
    return 1;
  }
  if (code < 0x800) {
    out[0] = static_cast<char>(0xc0 | code >> 6);
    out[1] = tail(0);
    return 2;
  }
  if (code < 0x10000) {
    out[0] = static_cast<char>(0xe0 | code >> 12);
    out[1] = tail(6);
    out[2] = tail(0);
    return 3;
  }
  out[0] = static_cast<char>(0xf0 | code >> 18);
  out[1] = tail(12);
  out[2] = tail(6);
  out[3] = tail(0);
  return 4;
}

}  // namespace

JsonLines::JsonLines(std::string_view bytes, std::string path, std::int64_t vocab_size)
    : bytes_(bytes), path_(std::move(path)), vocab_size_(vocab_size) {
  if (bytes_.starts_with("\xEF\xBB\xBF")) at_ = 3;
}

bool JsonLines::next(JsonDocument& document) {
  while (at_ < bytes_.size()) {
    ++line_;
    begin_ = at_;
    end_ = std::min(bytes_.find('\n', at_), bytes_.size());
    skip_space();
    const bool blank = at_ == end_;
    if (!blank) {
      document = {};
      document.line = line_;
      scan_object(document);
    }
    at_ = end_ + 1;
    if (!blank) return true;
  }
  return false;
}

// ---- errors

void JsonLines::fail(const std::string& what) const { throw DataError(fmt::format("{}:{}: {}", path_, line_, what)); }

void JsonLines::fail_syntax(const std::string& expected) const {
  std::string found = "the end of the line";
  if (at_ < end_) {
    const unsigned char c = byte(bytes_[at_]);
    found = c > 0x20 && c < 0x7f ? fmt::format("'{}'", bytes_[at_]) : fmt::format("byte 0x{:02x}", c);
  }
  fail(fmt::format(
      "invalid JSON at column {}: expected {}, found {}; a line is one document such as {{\"text\": \"...\"}} "
      "or {{\"tokens\": [1, 2]}}",
      at_ - begin_ + 1, expected, found));
}

// ---- scanning: once, checks everything

void JsonLines::skip_space() {
  while (at_ < end_ && (bytes_[at_] == ' ' || bytes_[at_] == '\t' || bytes_[at_] == '\r')) ++at_;
}

void JsonLines::expect(char c, const char* where) {
  skip_space();
  if (peek() != c) fail_syntax(fmt::format("'{}' {}", c, where));
  ++at_;
  skip_space();
}

void JsonLines::scan_object(JsonDocument& document) {
  expect('{', "at the start of a document");
  if (peek() != '}') {
    scan_member(document);
    while (skip_space(), peek() == ',') {
      ++at_;
      skip_space();
      scan_member(document);
    }
  }
  expect('}', "or ',' after a value");
  if (at_ != end_) fail_syntax("nothing after the document");
  if ((document.text.offset < 0) == (document.tokens.offset < 0)) {
    fail(document.text.offset < 0 ? "the document has neither \"text\" nor \"tokens\": give one of them"
                                  : "the document has both \"text\" and \"tokens\": give one of them");
  }
  const JsonValue& content = document.text.offset < 0 ? document.tokens : document.text;
  if (document.mask.offset >= 0 && document.mask.count != content.count) {
    fail(fmt::format("\"mask\" has {} entries, but the document has {} tokens{}: give one 0 or 1 per token",
                     document.mask.count, content.count, document.text.offset < 0 ? "" : " (bytes)"));
  }
}

void JsonLines::scan_member(JsonDocument& document) {
  if (peek() != '"') fail_syntax("'\"' at the start of a key");
  JsonValue key;
  const std::size_t begin = at_;
  scan_string(key);
  std::string name(bytes_.substr(begin + 1, at_ - begin - 2));
  if (key.marks >= 0) {  // has escapes
    std::vector<std::int32_t> decoded(static_cast<std::size_t>(key.count));
    read_string(key, 0, decoded);
    name.clear();
    for (const std::int32_t c : decoded) name.push_back(static_cast<char>(c));
    marks_.resize(static_cast<std::size_t>(key.marks));
  }
  expect(':', "after a key");
  JsonValue* value = name == "text"     ? &document.text
                     : name == "tokens" ? &document.tokens
                     : name == "mask"   ? &document.mask
                                        : nullptr;
  if (value == nullptr) {
    fail(fmt::format(
        "unknown key \"{}\": a document has \"text\" or \"tokens\", and may have \"mask\": remove the others", name));
  }
  if (value->offset >= 0) fail(fmt::format("key \"{}\" appears twice", name));
  if (name == "text") {
    if (peek() != '"') fail_syntax("a string as \"text\"");
    scan_string(*value);
  } else if (name == "mask") {
    scan_mask(document);
  } else {
    scan_list(*value, [&](std::int64_t index) {
      const std::int64_t token = scan_integer("a token id (an integer)");
      if (token < 0 || token >= vocab_size_) {
        fail(fmt::format(
            "token {} is {}, outside the vocabulary of {} (ids 0 to {}): set model.vocab_size to the tokenizer's "
            "size, or tokenise anew",
            index, token, vocab_size_, vocab_size_ - 1));
      }
    });
  }
}

void JsonLines::scan_mask(JsonDocument& document) {
  scan_list(document.mask, [&](std::int64_t index) {
    const std::int64_t entry = scan_integer("0 or 1 in \"mask\"");
    if (entry != 0 && entry != 1) fail(fmt::format("entry {} of \"mask\" is {}: expected 0 or 1", index, entry));
    document.num_targets += entry;
  });
}

template <class Check>
void JsonLines::scan_list(JsonValue& value, const Check& check) {
  expect('[', "at the start of a list of integers");
  value = {static_cast<std::int64_t>(at_), 0, std::ssize(marks_)};
  if (peek() != ']') {
    while (true) {
      if (value.count % kElementsPerMark == 0) add_mark(static_cast<std::int64_t>(at_), 0);
      check(value.count++);
      skip_space();
      if (peek() != ',') break;
      ++at_;
      skip_space();
    }
  }
  if (peek() != ']') fail_syntax("',' or ']' after an integer");
  ++at_;
}

// A JSON integer; one that int64 cannot hold stops at about 10^18, which no vocabulary reaches.
std::int64_t JsonLines::scan_integer(const char* what) {
  const bool negative = peek() == '-';
  if (negative) ++at_;
  if (!is_digit(peek())) fail_syntax(what);
  if (peek() == '0' && at_ + 1 < end_ && is_digit(bytes_[at_ + 1])) fail_syntax("a number without leading zeros");
  std::int64_t value = 0;
  for (; is_digit(peek()); ++at_) {
    if (value < 100'000'000'000'000'000) value = value * 10 + (bytes_[at_] - '0');
  }
  if (peek() == '.' || peek() == 'e' || peek() == 'E') fail_syntax(what);
  return negative ? -value : value;
}

void JsonLines::scan_string(JsonValue& value) {
  ++at_;  // the opening quote
  value = {static_cast<std::int64_t>(at_), 0, std::ssize(marks_)};
  bool has_escape = false;
  std::int64_t next_mark = 0;  // element that the next mark is for
  while (true) {
    const std::size_t run = at_;
    StringByte kind = StringByte::ordinary;
    while (at_ < end_ && (kind = kStringBytes[byte(bytes_[at_])]) == StringByte::ordinary) ++at_;
    if (at_ == end_) fail_syntax("'\"' at the end of a string");
    if (kind == StringByte::multi) scan_utf8();
    const std::int64_t length = static_cast<std::int64_t>(at_ - run);
    for (; next_mark < value.count + length; next_mark += kElementsPerMark) {
      add_mark(static_cast<std::int64_t>(run) + next_mark - value.count, 0);
    }
    value.count += length;
    if (kind == StringByte::multi) continue;
    if (kind == StringByte::quote) break;
    if (kind == StringByte::control) fail_syntax("an escape such as \\n or \\u0001 for a control character");
    has_escape = true;
    const std::size_t escape = at_;
    char decoded[4];
    const int bytes = decode_escape(at_, decoded);
    if (next_mark < value.count + bytes) {
      add_mark(static_cast<std::int64_t>(escape), next_mark - value.count);
      next_mark += kElementsPerMark;
    }
    value.count += bytes;
  }
  ++at_;  // the closing quote
  if (!has_escape) {
    marks_.resize(static_cast<std::size_t>(value.marks));
    value.marks = -1;
  }
}

// Passes one character of two to four bytes: shortest form, no surrogates, at most U+10FFFF (Unicode 15, table 3-7).
void JsonLines::scan_utf8() {
  const unsigned char lead = byte(bytes_[at_]);
  const int length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  bool valid = lead >= 0xc2 && lead <= 0xf4 && at_ + static_cast<std::size_t>(length) <= end_;
  if (valid) {
    const unsigned char second = byte(bytes_[at_ + 1]);
    valid = !(lead == 0xe0 && second < 0xa0) && !(lead == 0xed && second > 0x9f) && !(lead == 0xf0 && second < 0x90) &&
            !(lead == 0xf4 && second > 0x8f);
    for (int i = 1; i < length; ++i) valid = valid && (byte(bytes_[at_ + static_cast<std::size_t>(i)]) & 0xc0) == 0x80;
  }
  if (!valid) fail_syntax("UTF-8 text");
  at_ += static_cast<std::size_t>(length);
}

// ---- decoding: also of what was scanned before, possibly far from the scanner's line

std::uint32_t JsonLines::decode_hex4(std::size_t at) const {
  std::uint32_t code = 0;
  for (std::size_t i = at; i < at + 4; ++i) {
    const char c = i < bytes_.size() ? bytes_[i] : '\n';
    const int digit = is_digit(c)            ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) fail_syntax("four hexadecimal digits after \\u");
    code = code << 4 | static_cast<std::uint32_t>(digit);
  }
  return code;
}

// The escape at `at`, which moves behind it (and behind both halves of a surrogate pair); returns its bytes of UTF-8.
int JsonLines::decode_escape(std::size_t& at, char (&out)[4]) const {
  constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
  const char name = at + 1 < bytes_.size() ? bytes_[at + 1] : '\n';
  if (name != 'u') {
    const std::size_t index = kNames.find(name);
    if (index == std::string_view::npos) fail_syntax("one of \" \\ / b f n r t u after '\\' in a string");
    out[0] = kValues[index];
    at += 2;
    return 1;
  }
  std::uint32_t code = decode_hex4(at + 2);
  std::size_t length = 6;
  if (code >= 0xd800 && code < 0xe000) {
    const bool paired = code < 0xdc00 && bytes_.substr(at + 6, 2) == "\\u";
    const std::uint32_t low = paired ? decode_hex4(at + 8) : 0;
    if (low < 0xdc00 || low >= 0xe000) fail_syntax("a pair of surrogates \\ud800-\\udbff \\udc00-\\udfff");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    length = 12;
  }
  at += length;
  return encode_utf8(code, out);
}

void JsonLines::read_string(const JsonValue& value, std::int64_t begin, std::span<std::int32_t> out) const {
  ANNULUS_CHECK(begin >= 0 && begin + std::ssize(out) <= value.count, "bytes {} + {} of a string of {}", begin,
                out.size(), value.count);
  if (out.empty()) return;
  if (value.marks < 0) {
    const char* text = bytes_.data() + value.offset + begin;
    std::transform(text, text + out.size(), out.begin(), byte);
    return;
  }
  const std::int64_t mark = marks_[static_cast<std::size_t>(value.marks + begin / kElementsPerMark)];
  std::int64_t skip = (mark & 3) + begin % kElementsPerMark;
  std::size_t at = static_cast<std::size_t>(mark >> 2);
  for (std::size_t i = 0; i < out.size();) {
    ANNULUS_CHECK(at < bytes_.size(), "{} changed while it was read", path_);
    if (bytes_[at] != '\\') {
      if (skip > 0) {
        --skip;
      } else {
        out[i++] = byte(bytes_[at]);
      }
      ++at;
      continue;
    }
    char decoded[4];
    const int bytes = decode_escape(at, decoded);
    for (int k = 0; k < bytes && i < out.size(); ++k) {
      if (skip > 0) {
        --skip;
      } else {
        out[i++] = byte(decoded[k]);
      }
    }
  }
}

void JsonLines::read_integers(const JsonValue& value, std::int64_t begin, std::span<std::int32_t> out) const {
  ANNULUS_CHECK(begin >= 0 && begin + std::ssize(out) <= value.count, "elements {} + {} of a list of {}", begin,
                out.size(), value.count);
  if (out.empty()) return;
  const std::int64_t mark = marks_[static_cast<std::size_t>(value.marks + begin / kElementsPerMark)];
  std::int64_t skip = begin % kElementsPerMark;
  std::size_t at = static_cast<std::size_t>(mark >> 2);
  for (std::size_t i = 0; i < out.size();) {
    while (at < bytes_.size() && !is_digit(bytes_[at])) ++at;
    ANNULUS_CHECK(at < bytes_.size(), "{} changed while it was read", path_);
    std::int32_t element = 0;
    for (; at < bytes_.size() && is_digit(bytes_[at]); ++at) element = element * 10 + (bytes_[at] - '0');
    if (skip > 0) {
      --skip;
    } else {
      out[i++] = element;
    }
  }
}

}  // namespace annulus::data
