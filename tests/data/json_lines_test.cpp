#include "data/json_lines.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "data/files.h"

namespace annulus::data {
namespace {

using testing::expect_error;

struct Line {
  std::int64_t line = 0;
  bool is_text = false;
  std::vector<std::int32_t> tokens;
  std::optional<std::vector<std::int32_t>> mask;
  std::int64_t num_targets = 0;
};

std::vector<std::int32_t> bytes_of(std::string_view text) {
  std::vector<std::int32_t> bytes;
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

std::vector<Line> read_lines(std::string_view bytes, std::int64_t vocab_size = 300) {
  JsonLines json(bytes, "f.jsonl", vocab_size);
  std::vector<Line> lines;
  std::vector<JsonDocument> documents;
  for (JsonDocument document; json.next(document);) documents.push_back(document);
  for (const auto& document : documents) {
    Line line{document.line, document.text.offset >= 0, {}, {}, document.num_targets};
    const JsonValue& content = line.is_text ? document.text : document.tokens;
    line.tokens.resize(static_cast<std::size_t>(content.count));
    if (line.is_text) {
      json.read_string(content, 0, line.tokens);
    } else {
      json.read_integers(content, 0, line.tokens);
    }
    if (document.mask.offset >= 0) {
      line.mask.emplace(static_cast<std::size_t>(document.mask.count));
      json.read_integers(document.mask, 0, *line.mask);
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

TEST(JsonLines, ReadsTextTokensAndMasks) {
  const auto lines = read_lines(
      "{\"text\": \"ab\"}\n"
      "{\"tokens\":[1,22,299]}\n"
      " { \"mask\" : [ 0 , 1 ] , \"tokens\" : [ 5 , 0 ] } \n"
      "{\"text\": \"\"}\n"
      "{\"tokens\": []}");
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_TRUE(lines[0].is_text);
  EXPECT_EQ(lines[0].tokens, bytes_of("ab"));
  EXPECT_FALSE(lines[0].mask.has_value());
  EXPECT_FALSE(lines[1].is_text);
  EXPECT_EQ(lines[1].tokens, (std::vector<std::int32_t>{1, 22, 299}));
  EXPECT_EQ(lines[2].tokens, (std::vector<std::int32_t>{5, 0}));
  EXPECT_EQ(lines[2].mask, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(lines[2].num_targets, 1);
  EXPECT_TRUE(lines[3].tokens.empty());
  EXPECT_TRUE(lines[4].tokens.empty());
}

TEST(JsonLines, PassesOverBlankLinesCarriageReturnsAndAByteOrderMark) {
  const auto lines = read_lines("\xEF\xBB\xBF{\"text\":\"a\"}\r\n\r\n  \t\n\n{\"tokens\":[7]}\r\n\n");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].line, 1);
  EXPECT_EQ(lines[0].tokens, bytes_of("a"));
  EXPECT_EQ(lines[1].line, 5);
  EXPECT_EQ(lines[1].tokens, (std::vector<std::int32_t>{7}));
}

TEST(JsonLines, DecodesEveryEscape) {
  const auto lines = read_lines(R"({"text": "\"\\\/\b\f\n\r\t\u0041\u00e9\u20AC\ud83d\ude00\u0000é€😀"})"
                                "\n"
                                R"({"te\u0078t": "k"})");
  ASSERT_EQ(lines.size(), 2u);
  using std::string_literals::operator""s;
  EXPECT_EQ(lines[0].tokens, bytes_of("\"\\/\b\f\n\r\tA\u00e9\u20ac\U0001F600\0\u00e9\u20ac\U0001F600"s));
  EXPECT_EQ(lines[1].tokens, bytes_of("k"));
}

TEST(JsonLines, ErrorsNameFileLineAndColumn) {
  const auto fails = [](const std::string& line, const std::vector<std::string>& parts) {
    expect_error<DataError>([&] { read_lines("{\"text\": \"fine\"}\n\n" + line); }, parts);
  };
  fails("{\"text\": \"a\"", {"f.jsonl:3: ", "column 13", "expected '}'", "found the end of the line"});
  fails("{\"text\": \"a\"\n}", {"f.jsonl:3: ", "expected '}'"});
  fails("[1, 2]", {"f.jsonl:3: ", "column 1", "expected '{'", "found '['"});
  fails("{\"text\" \"a\"}", {"column 9", "expected ':'", "found '\"'"});
  fails("{\"text\": \"a\",}", {"column 14", "at the start of a key", "found '}'"});
  fails("{\"text\": \"a\"} x", {"column 15", "nothing after the document"});
  fails("{\"text\": 5}", {"column 10", "a string as \"text\""});
  fails("{\"text\": \"a", {"at the end of a string"});
  fails("{\"text\": \"a\tb\"}", {"column 12", "escape", "found byte 0x09"});
  fails("{\"text\": \"\\x\"}", {"after '\\'"});
  fails("{\"text\": \"\\u12g4\"}", {"four hexadecimal digits"});
  fails("{\"text\": \"\\ud83d\"}", {"surrogates"});
  fails("{\"text\": \"\\ud83d\\u0041\"}", {"surrogates"});
  fails("{\"text\": \"\\ude00\"}", {"surrogates"});
  for (const char* bad : {"\xff", "\xc0\x80", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xf5\x80\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xc3", "\x80"}) {
    fails("{\"text\": \"" + std::string(bad) + "\"}", {"f.jsonl:3: ", "column 11", "UTF-8"});
  }
  fails("{\"text\": \"a\", \"meta\": {}}", {"f.jsonl:3: ", "unknown key \"meta\"", "\"mask\""});
  fails("{\"text\": \"a\", \"text\": \"b\"}", {"key \"text\" appears twice"});
  fails("{}", {"neither \"text\" nor \"tokens\""});
  fails("{\"mask\": [1]}", {"neither \"text\" nor \"tokens\""});
  fails("{\"text\": \"a\", \"tokens\": [1]}", {"both \"text\" and \"tokens\""});
  fails("{\"tokens\": [1, 300]}",
        {"f.jsonl:3: ", "token 1 is 300", "vocabulary of 300", "0 to 299", "model.vocab_size"});
  fails("{\"tokens\": [-1]}", {"token 0 is -1", "vocabulary of 300"});
  fails("{\"tokens\": [99999999999999999999999999]}", {"token 0 is ", "vocabulary of 300"});
  fails("{\"tokens\": [1.5]}", {"column 14", "a token id (an integer)", "found '.'"});
  fails("{\"tokens\": [1e1]}", {"a token id (an integer)"});
  fails("{\"tokens\": [01]}", {"leading zeros"});
  fails("{\"tokens\": [1 2]}", {"',' or ']'", "found '2'"});
  fails("{\"tokens\": [1,]}", {"a token id (an integer)", "found ']'"});
  fails("{\"tokens\": \"1\"}", {"list of integers"});
  fails("{\"tokens\": [1, 2], \"mask\": [1]}", {"\"mask\" has 1 entries", "2 tokens"});
  fails("{\"mask\": [1, 1, 1], \"text\": \"\u00e9\"}", {"\"mask\" has 3 entries", "2 tokens (bytes)"});
  fails("{\"tokens\": [1], \"mask\": [2]}", {"entry 0 of \"mask\" is 2"});
  fails("{\"tokens\": [1], \"mask\": [true]}", {"0 or 1 in \"mask\""});
}

// What the scanner should make of a line, by nlohmann's parser; nothing where it should refuse.
std::optional<Line> reference(const std::string& text, std::int64_t vocab_size) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded() || !json.is_object()) return std::nullopt;
  Line line{1, json.contains("text"), {}, {}, 0};
  if (json.contains("text") == json.contains("tokens")) return std::nullopt;
  for (const auto& [key, value] : json.items()) {
    if (key == "text") {
      if (!value.is_string()) return std::nullopt;
      line.tokens = bytes_of(value.get_ref<const std::string&>());
      continue;
    }
    if ((key != "tokens" && key != "mask") || !value.is_array()) return std::nullopt;
    std::vector<std::int32_t> integers;
    for (const auto& element : value) {
      if (!element.is_number_integer()) return std::nullopt;
      if (element.is_number_unsigned() && element.get<std::uint64_t>() > 1'000'000'000) return std::nullopt;
      const auto integer = element.get<std::int64_t>();
      if (integer < 0 || integer >= (key == "mask" ? 2 : vocab_size)) return std::nullopt;
      integers.push_back(static_cast<std::int32_t>(integer));
      if (key == "mask") line.num_targets += integer;
    }
    (key == "mask" ? line.mask.emplace() : line.tokens) = integers;
  }
  if (line.mask && line.mask->size() != line.tokens.size()) return std::nullopt;
  return line;
}

template <class T>
const T& pick(const std::vector<T>& from, std::mt19937& rng) {
  return from[rng() % from.size()];
}

// A valid line, sometimes long enough for several marks.
std::string random_line(std::mt19937& rng) {
  static const std::vector<std::string> characters = {
      "a",      "Z",      " ",          "\\n", "\\\"", "\\\\", "\\u0041", "\\u00E9",    "\\u20ac",     "\\ud83d\\ude00",
      "\u00e9", "\u20ac", "\U0001F600", "\\/", "{",    "]",    ",",       "plain text", "\\b\\f\\r\\t"};
  static const std::vector<std::string> spaces = {"", "", "", " ", "\t", "  "};
  const auto list = [&](std::size_t size, unsigned limit) {
    std::string text = "[";
    for (std::size_t i = 0; i < size; ++i) {
      if (i) text.append(pick(spaces, rng)).append(",");
      text.append(pick(spaces, rng)).append(std::to_string(rng() % limit));
    }
    return text.append(pick(spaces, rng)).append("]");
  };
  const std::size_t count = rng() % 50 == 0 ? rng() % 20000 : rng() % 8;
  std::string content, mask;
  std::size_t tokens = count;
  if (rng() % 2) {
    std::string text;
    const std::size_t kinds = rng() % 3 ? characters.size() : 3;  // now and then without escapes
    for (std::size_t i = 0; i < count; ++i) text += characters[rng() % kinds];
    content = "\"text\"" + pick(spaces, rng) + ":" + pick(spaces, rng) + "\"" + text + "\"";
    tokens = nlohmann::json::parse("\"" + text + "\"").get<std::string>().size();
  } else {
    content = "\"tokens\":" + list(count, 300);
  }
  if (rng() % 2) mask = "\"mask\":" + pick(spaces, rng) + list(tokens, 2);
  if (!mask.empty())
    content = rng() % 2 ? content + pick(spaces, rng) + "," + mask : mask + "," + pick(spaces, rng) + content;
  return "{" + pick(spaces, rng) + content + "}" + pick(spaces, rng);
}

void mutate(std::string& line, std::mt19937& rng) {
  static const std::string alphabet = "\"\\{}[],:-+.eu0159 tmask\x01\x7f\x80\xbf\xc3\xed\xf0\xff\r";
  for (unsigned edits = 1 + rng() % 2; edits > 0 && !line.empty(); --edits) {
    const std::size_t at = rng() % line.size();
    const char c = alphabet[rng() % alphabet.size()];
    switch (rng() % 3) {
      case 0:
        line[at] = c;
        break;
      case 1:
        line.erase(at, 1 + rng() % 3);
        break;
      default:
        line.insert(at, 1, c);
    }
  }
}

void expect_like_reference(const std::string& line) {
  const auto wanted = reference(line, 250);
  std::vector<Line> lines;
  std::string message;
  try {
    lines = read_lines(line, 250);
  } catch (const DataError& error) {
    message = error.what();
  }
  const bool blank = line.find_first_not_of(" \t\r") == std::string::npos;
  if (blank) {
    EXPECT_TRUE(lines.empty() && message.empty()) << message;
    return;
  }
  ASSERT_EQ(wanted.has_value(), !lines.empty()) << line << "\n" << message;
  if (!wanted) return;
  EXPECT_EQ(lines[0].is_text, wanted->is_text);
  EXPECT_EQ(lines[0].tokens, wanted->tokens) << line;
  EXPECT_EQ(lines[0].mask, wanted->mask);
  EXPECT_EQ(lines[0].num_targets, wanted->num_targets);
}

TEST(JsonLines, AgreesWithAJsonLibraryOnValidAndBrokenLines) {
  std::mt19937 rng(1);
  for (int i = 0; i < 20000 && !HasFailure(); ++i) {
    std::string line = random_line(rng);
    if (i % 3) mutate(line, rng);
    expect_like_reference(line);
  }
}

TEST(JsonLines, ReadsFromTheMiddleOfLongValues) {
  std::mt19937 rng(2);
  std::string text, line = "{\"tokens\": [";
  for (int i = 0; i < 30000; ++i) {
    text += std::vector<std::string>{"\\ud83d\\ude00", "x", "\\u20ac", "\u00e9"}[rng() % 4];
    line.append(i ? "," : "").append(std::to_string(rng() % 300));
  }
  const std::string file = line + "]}\n{\"text\": \"" + text + "\"}";
  const auto whole = read_lines(file);
  JsonLines json(file, "f", 300);
  JsonDocument tokens, string;
  ASSERT_TRUE(json.next(tokens) && json.next(string));
  for (int i = 0; i < 300; ++i) {
    const std::size_t length = rng() % 6000;
    std::vector<std::int32_t> out(length, -7);
    for (const auto& [value, all] :
         {std::pair(&string.text, &whole[1].tokens), std::pair(&tokens.tokens, &whole[0].tokens)}) {
      const std::size_t begin = rng() % (all->size() - length);
      if (value == &string.text) {
        json.read_string(*value, static_cast<std::int64_t>(begin), out);
      } else {
        json.read_integers(*value, static_cast<std::int64_t>(begin), out);
      }
      ASSERT_TRUE(std::equal(out.begin(), out.end(), all->begin() + static_cast<std::ptrdiff_t>(begin))) << begin;
    }
  }
}

}  // namespace
}  // namespace annulus::data
