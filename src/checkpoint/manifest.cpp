#include "checkpoint/manifest.h"

#include <ctime>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/hash.h"
#include "core/version.h"

namespace annulus::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "annulus-checkpoint";
constexpr const char* kChecksum = "checksum";
constexpr int kMaxDepth = 6;

// A field of an object, with the place in the file for messages.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) fail("is not an object");
  }

  const json& field(const char* key) const {
    const auto it = object_.find(key);
    if (it == object_.end()) fail(fmt::format("has no \"{}\"", key));
    return *it;
  }
  std::string text(const char* key) const {
    const json& value = field(key);
    if (!value.is_string()) fail(fmt::format("\"{}\" is not a string", key));
    return value.get<std::string>();
  }
  std::int64_t number(const char* key) const { return number(field(key), key); }
  std::uint64_t unsigned_number(const char* key) const {
    const json& value = field(key);
    if (!value.is_number_unsigned()) fail(fmt::format("\"{}\" is not an unsigned integer", key));
    return value.get<std::uint64_t>();
  }
  const json& array(const char* key) const {
    const json& value = field(key);
    if (!value.is_array()) fail(fmt::format("\"{}\" is not an array", key));
    return value;
  }
  std::vector<std::int64_t> numbers(const char* key) const {
    std::vector<std::int64_t> out;
    for (const json& value : array(key)) out.push_back(number(value, key));
    return out;
  }
  [[noreturn]] void fail(const std::string& what) const { throw CheckpointError(fmt::format("{} {}", where_, what)); }

 private:
  std::int64_t number(const json& value, const char* key) const {
    const bool fits =
        value.is_number_integer() &&
        (!value.is_number_unsigned() ||
         value.get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits || value.get<std::int64_t>() < 0) fail(fmt::format("\"{}\" is not an integer from 0 to 2^63 - 1", key));
    return value.get<std::int64_t>();
  }
  const json& object_;
  std::string where_;
};

std::optional<DType> dtype_named(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    if (name == name_of(dtype)) return dtype;
  }
  return std::nullopt;
}

json dims_of(const Shape& shape) {
  json dims = json::array();
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

json to_json(const Piece& p) {
  json offset = json::array({p.rect.row});
  if (p.global_shape.rank() == 2) offset.push_back(p.rect.col);
  return {{"group", p.group},
          {"tensor", p.tensor},
          {"dtype", name_of(p.dtype)},
          {"global_shape", dims_of(p.global_shape)},
          {"offset", offset},
          {"shape", dims_of(p.shape())},
          {"file", p.file},
          {"xxh3_128", p.hash}};
}

Piece piece_from(const json& value, const std::string& where) {
  const Reader in(value, where);
  Piece p{in.text("group"), in.text("tensor"), DType::f32, {}, {}, in.text("file"), in.text("xxh3_128")};
  if (!is_group_name(p.group)) in.fail("has a group that is no name");
  if (!is_tensor_name(p.tensor)) in.fail("has a tensor that is no name");
  if (!is_plain_file_name(p.file))
    in.fail(fmt::format("({}/{}) names a file that is not a plain file name", p.group, p.tensor));
  if (p.hash.size() != 32 || p.hash.find_first_not_of("0123456789abcdef") != p.hash.npos) {
    in.fail(fmt::format("({}/{}) has an xxh3_128 that is not 32 hexadecimal digits", p.group, p.tensor));
  }
  const std::string name = in.text("dtype");
  const auto dtype = dtype_named(name);
  if (!dtype)
    in.fail(fmt::format("({}/{}) has dtype \"{}\", not float32, float64 or bfloat16", p.group, p.tensor, name));
  p.dtype = *dtype;
  const auto global = in.numbers("global_shape"), offset = in.numbers("offset"), shape = in.numbers("shape");
  if (global.empty() || global.size() > 2 || offset.size() != global.size() || shape.size() != global.size()) {
    in.fail(fmt::format("({}/{}) does not have one or two dimensions in each of global_shape, offset and shape",
                        p.group, p.tensor));
  }
  const bool matrix = global.size() == 2;
  // Bytes must fit 63 bits before anything multiplies.
  std::int64_t bytes = static_cast<std::int64_t>(size_of(p.dtype));
  for (const std::int64_t d : global) {
    if (d == 0 || __builtin_mul_overflow(bytes, d, &bytes))
      in.fail(fmt::format("({}/{}) has an impossible global_shape", p.group, p.tensor));
  }
  p.global_shape = matrix ? Shape{global[0], global[1]} : Shape{global[0]};
  p.rect = {offset[0], matrix ? offset[1] : 0, shape[0], matrix ? shape[1] : 1};
  return p;
}

json files_to_json(const std::vector<ShardFile>& files) {
  json out = json::array();
  for (const ShardFile& f : files) out.push_back({{"name", f.name}, {"bytes", f.bytes}});
  return out;
}

std::vector<ShardFile> files_from(const json& values, const std::string& where) {
  std::vector<ShardFile> out;
  for (const json& value : values) {
    const Reader in(value, fmt::format("{}: files[{}]", where, out.size()));
    out.push_back({in.text("name"), in.number("bytes")});
    if (!is_plain_file_name(out.back().name)) in.fail("has a name that is not a plain file name");
  }
  return out;
}

std::vector<Piece> pieces_from(const json& values, const std::string& where) {
  std::vector<Piece> out;
  for (const json& value : values) out.push_back(piece_from(value, fmt::format("{}: slices[{}]", where, out.size())));
  return out;
}

std::string compact(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

// For people and their tools: a line for each field, and for each element of the long lists.
std::string readable(const json& object) {
  std::string out;
  for (const auto& [key, value] : object.items()) {
    out += (out.empty() ? "{\n  " : ",\n  ") + compact(key) + ": ";
    if (!value.is_array() || value.empty()) {
      out += compact(value);
      continue;
    }
    const char* separator = "[\n    ";
    for (const json& element : value) {
      out += separator + compact(element);
      separator = ",\n    ";
    }
    out += "\n  ]";
  }
  return out + "\n}\n";
}

json parse(const std::string& text, const std::string& where) {
  try {
    const auto limit_depth = [&](int depth, json::parse_event_t, json&) {
      if (depth > kMaxDepth) throw CheckpointError(fmt::format("{}: nested more than {} deep", where, kMaxDepth));
      return true;
    };
    return json::parse(text, limit_depth);
  } catch (const json::exception& e) {
    throw CheckpointError(fmt::format("{}: not JSON: {}", where, e.what()));
  }
}

// No file is smaller than the values the manifest says it holds: nothing is compressed, so a declared shape costs
// bytes.
void check_files(const Manifest& m, const std::string& where) {
  std::map<std::string_view, std::int64_t> room;
  for (const ShardFile& f : m.files) {
    if (!room.emplace(f.name, f.bytes).second)
      throw CheckpointError(fmt::format("{}: file {} is listed twice", where, f.name));
  }
  for (const Piece& p : m.pieces) {
    const auto it = room.find(p.file);
    if (it == room.end() || p.file == kVirtualName) {
      throw CheckpointError(
          fmt::format("{}: tensor {}/{} lies in {}, which is not among its files", where, p.group, p.tensor, p.file));
    }
    if ((it->second -= p.bytes()) < 0) {
      throw CheckpointError(fmt::format("{}: tensor {}/{}: {} is too small for the slices it is said to hold", where,
                                        p.group, p.tensor, p.file));
    }
  }
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

std::string to_text(const Manifest& m) {
  json slices = json::array();
  for (const Piece& p : m.pieces) slices.push_back(to_json(p));
  json out = {{"format", kFormat},
              {"version", kManifestVersion},
              {"written_by", std::string("annulus ") + kVersion},
              {"created", utc_now()},
              {"step", m.meta.step},
              {"tokens_seen", m.meta.tokens_seen},
              {"tokens_planned", m.meta.tokens_planned},
              {"seed", m.meta.seed},
              {"precision", m.meta.precision},
              {"ranks", m.meta.ranks},
              {"provenance", m.meta.provenance},
              {"config", m.meta.config},
              {"data", {{"fingerprint", m.meta.data_fingerprint}, {"position", m.meta.data_position}}},
              {"files", files_to_json(m.files)},
              {"slices", std::move(slices)}};
  const std::string body = compact(out);
  out[kChecksum] = hash_of(body.data(), body.size());
  return readable(out);
}

Manifest parse_manifest(const std::string& text, const std::string& where) {
  json root = parse(text, where);
  const Reader in(root, where + ":");
  if (in.text("format") != kFormat) in.fail(fmt::format("format is \"{}\", not \"{}\"", in.text("format"), kFormat));
  if (in.number("version") != kManifestVersion) {
    in.fail(fmt::format("version is {}; this program reads version {}", in.number("version"), kManifestVersion));
  }
  const std::string checksum = in.text(kChecksum);
  root.erase(kChecksum);
  const std::string body = compact(root);
  if (const std::string found = hash_of(body.data(), body.size()); found != checksum) {
    in.fail(fmt::format("checksum is {}, its text has {}: the manifest was damaged or edited", checksum, found));
  }
  Manifest m;
  m.meta = {in.number("step"),
            in.number("tokens_seen"),
            in.number("tokens_planned"),
            in.text("config"),
            {},
            {},
            in.unsigned_number("seed"),
            in.text("precision"),
            static_cast<int>(in.number("ranks")),
            in.text("provenance")};
  const Reader data(in.field("data"), where + ": data");
  m.meta.data_fingerprint = data.text("fingerprint");
  m.meta.data_position = data.numbers("position");
  m.files = files_from(in.array("files"), where);
  m.pieces = pieces_from(in.array("slices"), where);
  sort_pieces(m.pieces);
  check_tiling(m.pieces, where);
  check_files(m, where);
  return m;
}

std::string to_text(const ShardReport& report) {
  json slices = json::array();
  for (const Piece& p : report.pieces) slices.push_back(to_json(p));
  return compact({{"files", files_to_json(report.files)}, {"slices", std::move(slices)}});
}

ShardReport parse_report(const std::string& text) {
  const json root = parse(text, "a rank's report");
  const Reader in(root, "a rank's report");
  return {files_from(in.array("files"), "a rank's report"), pieces_from(in.array("slices"), "a rank's report")};
}

}  // namespace annulus::checkpoint
