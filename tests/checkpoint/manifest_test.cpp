// Manifests that lie, are damaged, or come from elsewhere: every one is a CheckpointError that says what and where.
#include <nlohmann/json.hpp>

#include "checkpoint/hash.h"
#include "fixture.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;
using nlohmann::json;

class ManifestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    save_as(2, folder_, small_model(), 3);
    text_ = slurp(folder_ + "/manifest.json");
  }
  // Opens the checkpoint with the edited manifest, whose checksum is right again.
  template <class Edit>
  std::string error_with(const Edit& edit) {
    json m = json::parse(text_);
    edit(m);
    m.erase("checksum");
    const std::string body = m.dump();
    m["checksum"] = hash_of(body.data(), body.size());
    return error_of_text(m.dump(1));
  }
  std::string error_of_text(const std::string& text) {
    spit(folder_ + "/manifest.json", text);
    return checkpoint_error([&] { Checkpoint::open(folder_); });
  }

  TempFolder run_;
  std::string folder_ = run_ / "step-00000003", text_;
};

TEST_F(ManifestTest, EditingItWithTheRightChecksumIsPossible) {
  EXPECT_EQ(error_with([](json&) {}), "");
  EXPECT_EQ(error_with([](json& m) { m["note"] = "unknown fields are for later versions"; }), "");
}

TEST_F(ManifestTest, OtherVersionsAndFormats) {
  expect_parts(error_with([](json& m) { m["version"] = 2; }),
               {folder_ + "/manifest.json", "version is 2", "reads version 1"});
  expect_parts(error_with([](json& m) { m["format"] = "keras"; }), {"\"keras\"", "annulus-checkpoint"});
}

TEST_F(ManifestTest, DamagedText) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, text_.size() / 2, text_.size() - 3}) {
    expect_parts(error_of_text(text_.substr(0, size)), {folder_ + "/manifest.json", "not JSON"});
  }
  std::string flipped = text_;
  const auto at = flipped.find("\"tokens_seen\": 12288");
  ASSERT_NE(at, flipped.npos);
  flipped[at + 16] ^= 1;
  expect_parts(error_of_text(flipped), {"checksum", "damaged or edited"});
  EXPECT_EQ(error_of_text(text_), "");
  expect_parts(error_of_text(std::string(100000, '[')), {"nested"});
  expect_parts(error_of_text("[]"), {"not an object"});
}

TEST_F(ManifestTest, FieldsOfAnotherType) {
  struct Case {
    std::string pointer;
    json value;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases{
      {"/step", -1, {"\"step\"", "integer"}},
      {"/step", 1.5, {"\"step\"", "integer"}},
      {"/step", "1", {"\"step\"", "integer"}},
      {"/tokens_seen", 18446744073709551615u, {"\"tokens_seen\"", "2^63"}},
      {"/seed", -1, {"\"seed\"", "unsigned"}},
      {"/config", 1, {"\"config\"", "string"}},
      {"/data", 1, {"data", "not an object"}},
      {"/data/position/0", "x", {"\"position\"", "integer"}},
      {"/slices", json::object(), {"\"slices\"", "array"}},
      {"/slices/0", 7, {"slices[0]", "not an object"}},
      {"/slices/0/dtype", "float16", {"slices[0]", "float16", "bfloat16"}},
      {"/slices/0/xxh3_128", "00", {"xxh3_128", "32 hexadecimal"}},
      {"/slices/0/xxh3_128", std::string(32, 'G'), {"xxh3_128", "32 hexadecimal"}},
      {"/slices/0/group", "../model", {"slices[0]", "group"}},
      {"/slices/0/tensor", "a/../../b", {"slices[0]", "tensor"}},
      {"/slices/0/file", "../shard-00000.h5", {"plain file name"}},
      {"/slices/0/file", "/etc/passwd", {"plain file name"}},
      {"/slices/0/file", "..", {"plain file name"}},
      {"/slices/0/file", "shard-00009.h5", {"shard-00009.h5", "not among its files"}},
      {"/slices/0/file", "checkpoint.h5", {"checkpoint.h5", "not among its files"}},
      {"/files/0/name", "../../x", {"files[0]", "plain file name"}},
      {"/files/0/name", "a/b", {"files[0]", "plain file name"}},
      {"/files/0/bytes", -5, {"\"bytes\"", "integer"}},
      {"/files/0/name", "shard-00001.h5", {"shard-00001.h5", "twice"}},
      {"/slices/0/global_shape", json::array({37, 11, 1}), {"one or two dimensions"}},
      {"/slices/0/global_shape", json::array(), {"one or two dimensions"}},
      {"/slices/0/global_shape", json::array({0, 11}), {"impossible global_shape"}},
      {"/slices/0/global_shape",
       json::array({std::int64_t{1} << 40, std::int64_t{1} << 40}),
       {"impossible global_shape"}},
      {"/slices/0/offset", json::array({-1, 0}), {"\"offset\"", "integer"}},
      {"/slices/0/offset", json::array({1}), {"one or two dimensions"}},
      {"/slices/0/shape", json::array({std::int64_t{1} << 62, std::int64_t{1} << 62}), {"not inside"}},
      {"/slices/0/shape", json::array({0, 11}), {"not inside"}},
      {"/slices/0/offset", json::array({36, 10}), {"model/model.embed_tokens.weight", "not inside"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.pointer + " = " + c.value.dump());
    const std::string error = error_with([&](json& m) { m[json::json_pointer(c.pointer)] = c.value; });
    expect_parts(error, c.parts);
    EXPECT_NE(error.find(folder_ + "/manifest.json"), error.npos) << error;
  }
  for (const char* key : {"format", "version", "step", "seed", "config", "data", "files", "slices"}) {
    expect_parts(error_with([&](json& m) { m.erase(key); }), {fmt::format("no \"{}\"", key)});
  }
  for (const char* key : {"group", "tensor", "dtype", "global_shape", "offset", "shape", "file", "xxh3_128"}) {
    expect_parts(error_with([&](json& m) { m["slices"][0].erase(key); }), {"slices[0]", fmt::format("no \"{}\"", key)});
  }
}

TEST_F(ManifestTest, PiecesMustTile) {
  // slices[0] is the first of model/model.embed_tokens.weight [37, 11], 280 values on each rank: 25 rows, 5 and 6
  // values, 11 rows.
  expect_parts(error_with([](json& m) { m["slices"].erase(0); }),
               {"model/model.embed_tokens.weight", "0 to 275", "missing"});
  expect_parts(error_with([](json& m) { m["slices"][0]["shape"] = {24, 11}; }), {"264 to 275", "missing"});
  expect_parts(error_with([](json& m) { m["slices"].push_back(m["slices"][0]); }), {"0 to 275", "twice"});
  expect_parts(error_with([](json& m) { m["slices"][0]["shape"] = {26, 11}; }), {"275 to 286", "twice"});
  expect_parts(error_with([](json& m) { m["slices"][0]["shape"] = {25, 10}; }), {"not a contiguous range"});
  expect_parts(error_with([](json& m) { m["slices"][0]["global_shape"] = {38, 11}; }), {"[38, 11]", "[37, 11]"});
  expect_parts(error_with([](json& m) { m["slices"][0]["dtype"] = "float32"; }), {"float32", "bfloat16"});
}

TEST_F(ManifestTest, ShapesMustFitTheFiles) {
  // All pieces of a tensor, consistently: 2^50 values in a file of some kilobytes.
  const std::string error = error_with([](json& m) {
    json& s = m["slices"];
    for (auto it = s.begin(); it != s.end();) it = (*it)["tensor"] == "model.norm.weight" ? s.erase(it) : it + 1;
    s.push_back({{"group", "model"},
                 {"tensor", "bomb"},
                 {"dtype", "float32"},
                 {"global_shape", {1 << 25, 1 << 25}},
                 {"offset", {0, 0}},
                 {"shape", {1 << 25, 1 << 25}},
                 {"file", "shard-00000.h5"},
                 {"xxh3_128", std::string(32, '0')}});
  });
  expect_parts(error, {"model/bomb", "shard-00000.h5", "too small"});
}

TEST_F(ManifestTest, TextThatIsNotUtf8IsStoredReadably) {
  Manifest m = parse_manifest(text_, "test");
  m.meta.config = "path = \"\xff\xfe\"";
  const Manifest back = parse_manifest(to_text(m), "test");
  EXPECT_EQ(back.meta.config, "path = \"\xef\xbf\xbd\xef\xbf\xbd\"");
}

}  // namespace
}  // namespace annulus::checkpoint
