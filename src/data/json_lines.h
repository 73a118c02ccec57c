// Documents in a mapped .jsonl file: one JSON object (RFC 8259) a line, with "text" or "tokens" and optionally "mask".
//
// The scanner checks every line once and remembers where values lie; tokens are decoded from the file each time they
// are read. Memory is thus 8 bytes per 1,024 elements, however large the file, and a read in the middle of a long value
// costs at most 1,024 elements more than it returns. This is why it is not a JSON library's parser (tests compare it
// with one). Blank lines, CRLF, a byte order mark and a missing last newline are fine. Everything else that is not such
// a document is a DataError with file and line: syntax, invalid UTF-8 or surrogates, unknown or repeated keys, both or
// neither of "text" and "tokens", token ids outside [0, vocab_size), a mask that is not as long as the tokens or not of
// 0 and 1.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::data {

// A string (elements: UTF-8 bytes) or a list of integers in the file.
struct JsonValue {
  std::int64_t offset = -1;  // byte of the first element in the file; −1: the key is absent
  std::int64_t count = 0;    // elements
  std::int64_t marks = -1;   // where its marks start; −1: a string without escapes, which lies in the file as it is
};

struct JsonDocument {
  std::int64_t line = 0;  // from 1
  JsonValue text, tokens, mask;
  std::int64_t num_targets = 0;  // ones in the mask
};

class JsonLines {
 public:
  // `bytes` outlive the object.
  JsonLines(std::string_view bytes, std::string path, std::int64_t vocab_size);

  bool next(JsonDocument& document);  // false at the end of the file

  // Elements [begin, begin + out.size()) of a value that next() gave: bytes of a string, integers of a list.
  void read_string(const JsonValue& value, std::int64_t begin, std::span<std::int32_t> out) const;
  void read_integers(const JsonValue& value, std::int64_t begin, std::span<std::int32_t> out) const;

 private:
  static constexpr std::int64_t kElementsPerMark = 1024;

  void scan_object(JsonDocument& document);
  void scan_member(JsonDocument& document);
  void scan_string(JsonValue& value);
  template <class Check>
  void scan_list(JsonValue& value, const Check& check);
  void scan_mask(JsonDocument& document);
  std::int64_t scan_integer(const char* what);
  void scan_utf8();
  int decode_escape(std::size_t& at, char (&out)[4]) const;
  std::uint32_t decode_hex4(std::size_t at) const;
  void add_mark(std::int64_t offset, std::int64_t skip) { marks_.push_back(offset << 2 | skip); }

  void skip_space();
  char peek() const { return at_ < end_ ? bytes_[at_] : '\n'; }  // '\n' at the end of the line
  void expect(char c, const char* where);
  [[noreturn]] void fail_syntax(const std::string& expected) const;
  [[noreturn]] void fail(const std::string& what) const;

  std::string_view bytes_;
  std::string path_;
  std::int64_t vocab_size_;
  std::size_t at_ = 0, begin_ = 0, end_ = 0;  // cursor, and the line that holds it
  std::int64_t line_ = 0;
  // Mark m of a value: element kElementsPerMark · m starts at byte (mark >> 2), behind (mark & 3) bytes of the same
  // escape.
  std::vector<std::int64_t> marks_;
};

}  // namespace annulus::data
