#include "data/documents.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "data/files.h"
#include "data/fingerprint.h"

namespace annulus::data {
namespace {

using testing::expect_error;
using testing::TempFolder;
using testing::token_file;
using testing::token_file_u16;
using testing::token_file_u32;
using Tokens = std::vector<std::int32_t>;

Documents open(const std::vector<std::string>& paths, const std::string& tokenizer = "bytes",
               std::int64_t vocab_size = 257) {
  return Documents(paths, *make_tokenizer(tokenizer), vocab_size);
}

// x of all positions and the last target: the document as it is framed.
Tokens framed(const Documents& documents, std::int64_t document, const Documents::Framing& framing) {
  const auto n = static_cast<std::size_t>(documents.num_positions(document, framing));
  Tokens tokens(n, -9), targets(n, -9);
  documents.read(document, framing, 0, tokens, targets);
  if (n > 0) tokens.push_back(targets.back());
  return tokens;
}

TEST(Tokenizer, BytesAndBack) {
  const auto tokenizer = make_tokenizer("bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  const std::string text("h\0\xff\u00e9", 5);
  const Tokens tokens = tokenizer->encode(text);
  EXPECT_EQ(tokens, (Tokens{'h', 0, 255, 0xc3, 0xa9}));
  EXPECT_EQ(tokenizer->decode(tokens), text);
  EXPECT_EQ(tokenizer->decode(Tokens{'a', 256, 'b', 300}), "ab\xEF\xBF\xBD");
}

TEST(Tokenizer, NoneAndUnknown) {
  const auto none = make_tokenizer("none");
  EXPECT_EQ(none->end_of_document(), std::nullopt);
  expect_error<DataError>([&] { (void)none->encode("a"); }, {"\"none\"", "encode"});
  expect_error<DataError>([&] { (void)none->decode(Tokens{1}); }, {"\"none\"", "decode"});
  expect_error<ConfigError>([] { (void)make_tokenizer("gpt2"); }, {"\"gpt2\"", "\"bytes\"", "\"none\""});
}

TEST(Documents, ReadsEveryFormat) {
  const TempFolder folder;
  const auto documents =
      open({folder.write("a.txt", std::string("a\0\r\n\xff", 5)),
            folder.write("b.jsonl", "{\"text\":\"x\\ny\"}\n{\"tokens\":[3,256]}"),
            folder.write("c.bin", token_file_u16({1, 2, 3})), folder.write("d.bin", token_file_u32({4, 5}))});
  ASSERT_EQ(documents.size(), 5);
  EXPECT_EQ(framed(documents, 0, {}), (Tokens{'a', 0, '\r', '\n', 255}));
  EXPECT_EQ(framed(documents, 1, {}), (Tokens{'x', '\n', 'y'}));
  EXPECT_EQ(framed(documents, 2, {}), (Tokens{3, 256}));
  EXPECT_EQ(framed(documents, 3, {}), (Tokens{1, 2, 3}));
  EXPECT_EQ(framed(documents, 4, {}), (Tokens{4, 5}));
  EXPECT_TRUE(documents.is_text(0) && documents.is_text(1) && !documents.is_text(2) && !documents.is_text(3));
  EXPECT_EQ(documents.name(0), folder / "a.txt");
  EXPECT_EQ(documents.name(2), folder / "b.jsonl:2");
}

TEST(Documents, FramesADocument) {
  const TempFolder folder;
  const auto documents =
      open({folder.write("a.jsonl", "{\"tokens\":[7,8,9],\"mask\":[1,0,1]}\n{\"tokens\":[]}\n{\"tokens\":[5]}")});
  const Documents::Framing none, before{true, false, 256}, both{true, true, 256};
  EXPECT_EQ(framed(documents, 0, none).size(), 3u);
  EXPECT_EQ(framed(documents, 1, none), Tokens{});
  EXPECT_EQ(framed(documents, 1, before), Tokens{});
  EXPECT_EQ(framed(documents, 1, both), (Tokens{256, 256}));
  EXPECT_EQ(framed(documents, 2, none), Tokens{});
  EXPECT_EQ(framed(documents, 2, both), (Tokens{256, 5, 256}));
  EXPECT_EQ(documents.num_targets(0, none), 1);    // token 2; token 0 has no position before it
  EXPECT_EQ(documents.num_targets(0, before), 2);  // tokens 0 and 2
  EXPECT_EQ(documents.num_targets(2, both), 2);
  Tokens tokens(4), targets(4);
  documents.read(0, both, 0, tokens, targets);
  EXPECT_EQ(tokens, (Tokens{256, 7, 8, 9}));
  EXPECT_EQ(targets, (Tokens{7, -1, 9, -1}));
  documents.read(0, both, 2, std::span(tokens).first(2), std::span(targets).first(2));
  EXPECT_EQ(tokens, (Tokens{8, 9, 8, 9}));
  EXPECT_EQ(targets, (Tokens{9, -1, 9, -1}));
}

TEST(Documents, FoldersAreSortedAndNotSearchedInside) {
  const TempFolder folder;
  folder.write("b.txt", "b");
  folder.write("a.jsonl", "{\"text\":\"a\"}");
  folder.write("B.txt", "B");
  folder.write("README.md", "no");
  folder.write(".hidden.txt", "no");
  folder.write("inner/c.txt", "no");
  std::filesystem::create_directory(folder / "folder.txt");
  const auto documents = open({folder.path()});
  ASSERT_EQ(documents.size(), 3);
  EXPECT_EQ(framed(documents, 0, {true, false, 256}), (Tokens{256, 'B'}));
  EXPECT_EQ(framed(documents, 1, {true, false, 256}), (Tokens{256, 'a'}));
  EXPECT_EQ(framed(documents, 2, {true, false, 256}), (Tokens{256, 'b'}));
}

TEST(Documents, MapsLargeFilesAndKeepsSmallOnes) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 70000; ++i) text.push_back(static_cast<char>(i * 7));
  for (const std::size_t size : {65535, 65536, 65537, 70000}) {
    const auto documents = open({folder.write("a.txt", text.substr(0, size))});
    const Tokens all = framed(documents, 0, {});
    EXPECT_EQ(std::string(all.begin(), all.end()), text.substr(0, size));
  }
}

TEST(Documents, PositionsBeyondFourGigabytes) {
  const TempFolder folder;
  const std::string path = folder.write("a.txt", "start");
  constexpr std::int64_t kSize = std::int64_t{5} << 30;  // sparse: takes no room
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(kSize));
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(kSize - 3).write("end", 3);
  const auto documents = open({path});
  EXPECT_EQ(documents.num_tokens(0), kSize);
  Tokens tokens(4), targets(4);
  documents.read(0, {true, true, 256}, kSize - 3, tokens, targets);
  EXPECT_EQ(tokens, (Tokens{0, 'e', 'n', 'd'}));
  EXPECT_EQ(targets, (Tokens{'e', 'n', 'd', 256}));
}

TEST(Documents, ErrorsOfFilesAndFolders) {
  const TempFolder folder;
  const auto fails = [&](const std::string& path, const std::vector<std::string>& parts) {
    expect_error<DataError>([&] { open({path}); }, parts);
  };
  fails(folder / "no.txt", {folder / "no.txt", "no such file or folder"});
  fails(folder.path(), {folder.path(), "no .txt, .jsonl or .bin file directly in this folder"});
  fails(folder.write("a.csv", "x"), {"a.csv", ".txt, .jsonl or .bin"});
  for (const char* name : {"e.txt", "e.jsonl", "e.bin"}) fails(folder.write(name, ""), {name, "empty file"});
  ASSERT_EQ(::mkfifo((folder / "pipe.txt").c_str(), 0600), 0);
  fails(folder / "pipe.txt", {"pipe.txt", "not a regular file"});  // and does not wait for a writer
  fails(folder.write("blank.jsonl", "\n \r\n"), {"blank.jsonl", "no document"});
  fails(folder.write("bad.jsonl", "{\"text\":\"a\"}\n{\"text\":"), {"bad.jsonl:2: ", "invalid JSON"});
  fails(folder.write("id.jsonl", "{\"tokens\":[257]}"), {"id.jsonl:1: ", "token 0 is 257", "vocabulary of 257"});
}

TEST(Documents, ErrorsOfTokenFiles) {
  const TempFolder folder;
  const auto fails = [&](const std::string& content, const std::vector<std::string>& parts,
                         std::int64_t vocab_size = 257) {
    expect_error<DataError>([&] { open({folder.write("t.bin", content)}, "none", vocab_size); }, parts);
  };
  const std::vector<std::uint16_t> tokens = {1, 2, 3};
  fails("short", {"t.bin", "5 bytes", "header of 1024"});
  fails(std::string(1023, '\0'), {"1023 bytes"});
  fails(token_file(20240522, 1, tokens), {"t.bin", "magic number 20240522", "20240520", "20240801"});
  fails(token_file(20240520, 7, tokens), {"version 7", "expected 1"});
  fails(token_file(20240801, 1, tokens), {"version 1", "expected 7"});
  fails(token_file(20240520, 1, tokens, 4), {"announces 4 tokens", "1032 bytes", "has 1030", "cut short"});
  fails(token_file(20240520, 1, tokens, 2), {"announces 2 tokens", "has 1030", "too long"});
  fails(token_file_u16(tokens) + "x", {"has 1031", "ends inside a token"});
  fails(token_file(20240801, 7, tokens, 1), {"has 1030", "ends inside a token"});
  fails(token_file(20240520, 1, tokens, 0xffffffff), {"announces 4294967295 tokens", "cut short"});
  fails(token_file_u16({}), {"without tokens"});
  fails(token_file_u16({5, 257, 300}), {"token 1 (byte 1026) is 257", "vocabulary of 257", "0 to 256"});
  fails(token_file_u32({5, 256, 0xffffffff}), {"token 2 (byte 1032) is 4294967295", "vocabulary of 257"});
  std::vector<std::uint16_t> many(10000, 9);
  many[8191] = 65535;
  fails(token_file_u16(many), {"token 8191 (byte 17406) is 65535", "vocabulary of 65535"}, 65535);
  open({folder.write("t.bin", token_file_u16(many))}, "none", 65536);  // fits
}

TEST(Documents, TextNeedsATokenizerAndItsVocabulary) {
  const TempFolder folder;
  const std::string text = folder.write("a.txt", "a"),
                    line = folder.write("b.jsonl", "{\"tokens\":[1]}\n{\"text\":\"a\"}"),
                    tokens = folder.write("c.jsonl", "{\"tokens\":[1]}");
  expect_error<DataError>([&] { open({text}, "none"); }, {"a.txt", "\"none\"", "data.tokenizer = \"bytes\""});
  expect_error<DataError>([&] { open({line}, "none"); }, {"b.jsonl:2: ", "\"none\""});
  expect_error<ConfigError>([&] { open({text}, "bytes", 256); }, {"model.vocab_size = 256", "needs 257"});
  expect_error<ConfigError>([&] { open({line}, "bytes", 256); }, {"model.vocab_size = 256", "needs 257"});
  EXPECT_EQ(open({tokens}, "bytes", 2).size(), 1);  // tokens do not need the tokenizer
}

TEST(Fingerprint, SeesContentSizeAndBothEndsOfHugeFiles) {
  const auto hex = [](std::string_view bytes) {
    Fingerprint hash;
    hash.add_file(bytes);
    return hash.hex();
  };
  EXPECT_EQ(hex("abc"), hex("abc"));
  EXPECT_EQ(hex("abc").size(), 32u);
  EXPECT_NE(hex("abc"), hex("abd"));
  Fingerprint joined, split;
  joined.add("ab"), joined.add("c"), split.add("a"), split.add("bc");
  EXPECT_NE(joined.hex(), split.hex());

  const TempFolder folder;
  const std::string path = folder.write("huge.txt", "");
  constexpr std::int64_t kSize = (std::int64_t{400} << 20) + 5;
  std::vector<std::string> seen;
  for (const std::int64_t change : {std::int64_t{-1}, std::int64_t{0}, kSize - 1, std::int64_t{64} << 20}) {
    std::filesystem::resize_file(path, 0);
    std::filesystem::resize_file(path, kSize);
    if (change >= 0) std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(change).put('x');
    seen.push_back(hex(MappedFile(path).bytes()));
    for (std::size_t i = 0; i + 1 < seen.size(); ++i) EXPECT_NE(seen[i], seen.back()) << "change at " << change;
  }
}

}  // namespace
}  // namespace annulus::data
