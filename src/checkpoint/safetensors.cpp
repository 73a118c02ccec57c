#include "checkpoint/safetensors.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "checkpoint/convert_type.h"
#include "checkpoint/piece.h"
#include "checkpoint/strict_json.h"
#include "parallel/heartbeat.h"

namespace annulus::checkpoint {
namespace {

using nlohmann::json;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;
constexpr const char* kMetadata = "__metadata__";

struct Type {
  DType dtype;
  const char* name;
};
constexpr std::array<Type, 4> kTypes{
    {{DType::f64, "F64"}, {DType::f32, "F32"}, {DType::f16, "F16"}, {DType::bf16, "BF16"}}};

const char* type_name(DType dtype) {
  for (const Type& type : kTypes) {
    if (type.dtype == dtype) return type.name;
  }
  ANNULUS_CHECK(false, "{} is no type of safetensors files", name_of(dtype));
}

std::int64_t bytes_of(const SafetensorsEntry& e) {
  return e.shape.numel() * static_cast<std::int64_t>(size_of(e.dtype));
}

std::optional<std::int64_t> natural_number(const json& value) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
    return std::nullopt;
  }
  return value.get<std::int64_t>();
}

Shape parse_shape(const json& dims, DType dtype, const std::string& where) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(dtype));
  if (!dims.is_array() || dims.size() > static_cast<std::size_t>(Shape::kMaxRank)) {
    throw CheckpointError(fmt::format("{}: \"shape\" is not a list of at most {} dimensions", where, Shape::kMaxRank));
  }
  std::array<std::int64_t, Shape::kMaxRank> size{};
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const auto d = natural_number(dims[i]);
    if (!d) throw CheckpointError(fmt::format("{}: \"shape\" holds {}, not a size", where, dims[i].dump()));
    size[i] = *d;
    if (__builtin_mul_overflow(bytes, *d, &bytes)) {
      throw CheckpointError(fmt::format("{}: \"shape\" {} has more bytes than 64 bits count", where, dims.dump()));
    }
  }
  switch (dims.size()) {
    case 0:
      return {};
    case 1:
      return {size[0]};
    case 2:
      return {size[0], size[1]};
    case 3:
      return {size[0], size[1], size[2]};
    case 4:
      return {size[0], size[1], size[2], size[3]};
    default:
      return {size[0], size[1], size[2], size[3], size[4]};
  }
}

DType parse_type(const json& value, const std::string& where) {
  for (const Type& type : kTypes) {
    if (value == type.name) return type.dtype;
  }
  throw CheckpointError(fmt::format("{}: \"dtype\" is {}; read are F64, F32, F16 and BF16", where, value.dump()));
}

SafetensorsEntry parse_entry(const std::string& name, const json& value, std::int64_t data_bytes,
                             const std::string& file) {
  const std::string where = fmt::format("{}: tensor {}", file, quote_name(name));
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    throw CheckpointError(fmt::format("{}: wanted \"dtype\", \"shape\" and \"data_offsets\", no more", where));
  }
  SafetensorsEntry entry{name, parse_type(value["dtype"], where), {}, 0};
  entry.shape = parse_shape(value["shape"], entry.dtype, where);
  const json& offsets = value["data_offsets"];
  const bool pair = offsets.is_array() && offsets.size() == 2;
  const auto begin = pair ? natural_number(offsets[0]) : std::nullopt;
  const auto end = pair ? natural_number(offsets[1]) : std::nullopt;
  if (!begin || !end || *begin > *end || *end > data_bytes) {
    throw CheckpointError(
        fmt::format("{}: \"data_offsets\" {} do not lie in the {} bytes of values", where, offsets.dump(), data_bytes));
  }
  entry.begin = *begin;
  if (*end - *begin != bytes_of(entry)) {
    throw CheckpointError(fmt::format("{}: shape {} of {} takes {} bytes, its \"data_offsets\" span {}", where,
                                      entry.shape.str(), type_name(entry.dtype), bytes_of(entry), *end - *begin));
  }
  return entry;
}

// Before it is opened, which would follow links and wait at pipes.
const std::string& regular_file(const std::string& path) {
  if (!exists(path)) throw CheckpointError(fmt::format("{}: is not there", path));
  (void)file_size(path);
  return path;
}

void check_metadata(const json& value, const std::string& where) {
  const bool texts =
      value.is_object() && std::all_of(value.begin(), value.end(), [](const json& v) { return v.is_string(); });
  if (!texts) throw CheckpointError(fmt::format("{}: \"{}\" does not hold texts only", where, kMetadata));
}

}  // namespace

std::int64_t parse_safetensors_length(std::string_view first, std::int64_t file_bytes, const std::string& where) {
  if (file_bytes < kLengthBytes || static_cast<std::int64_t>(first.size()) < kLengthBytes) {
    throw CheckpointError(fmt::format("{}: {} bytes; a safetensors file starts with the 8 bytes of its header's length",
                                      where, file_bytes));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, first.data(), sizeof(length));
  if (length > static_cast<std::uint64_t>(kMaxHeader)) {
    throw CheckpointError(
        fmt::format("{}: a header of {} bytes; at most {} are read (no safetensors file?)", where, length, kMaxHeader));
  }
  const auto n = static_cast<std::int64_t>(length);
  if (n > file_bytes - kLengthBytes) {
    throw CheckpointError(fmt::format("{}: the header takes {} bytes, the file has {} behind its length: cut short?",
                                      where, n, file_bytes - kLengthBytes));
  }
  return n;
}

std::vector<SafetensorsEntry> parse_safetensors_header(std::string_view header, std::int64_t data_bytes,
                                                       const std::string& where) {
  const std::string_view text = header.substr(0, header.find_last_not_of(' ') + 1);
  if (text.empty() || text.front() != '{' || text.back() != '}') {
    throw CheckpointError(fmt::format("{}: the header is not a JSON object with only spaces behind it", where));
  }
  const json object = parse_strict_json(text, 3, where + ": header");
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, value] : object.items()) {
    if (name == kMetadata) {
      check_metadata(value, where);
    } else {
      entries.push_back(parse_entry(name, value, data_bytes, where));
    }
  }
  // Tensors without values may share an offset; by size, then name, so that the order is one.
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tuple(a.begin, bytes_of(a), a.name) < std::tuple(b.begin, bytes_of(b), b.name);
  });
  std::int64_t end = 0;
  for (const SafetensorsEntry& e : entries) {
    if (e.begin != end) {
      throw CheckpointError(fmt::format("{}: tensor {} starts at byte {} of the values, where {} was wanted: {}", where,
                                        quote_name(e.name), e.begin, end, e.begin < end ? "an overlap" : "a gap"));
    }
    end += bytes_of(e);
  }
  if (end != data_bytes) {
    throw CheckpointError(
        fmt::format("{}: the tensors take {} bytes, the file has {} of values", where, end, data_bytes));
  }
  return entries;
}

std::vector<std::pair<std::string, std::string>> parse_safetensors_index(const std::string& text,
                                                                         const std::string& where) {
  const json object = parse_strict_json(text, 6, where);
  if (!object.is_object() || !object.contains("weight_map") || !object["weight_map"].is_object()) {
    throw CheckpointError(fmt::format("{}: wanted an object with an object \"weight_map\"", where));
  }
  std::vector<std::pair<std::string, std::string>> out;
  for (const auto& [tensor, file] : object["weight_map"].items()) {  // sorted by name
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (!is_plain_file_name(name) || !name.ends_with(".safetensors")) {
      throw CheckpointError(
          fmt::format("{}: tensor {} is in {}; wanted the plain name of a .safetensors file of this folder", where,
                      quote_name(tensor), file.is_string() ? quote_name(name) : "something that is no name"));
    }
    out.emplace_back(tensor, name);
  }
  return out;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(regular_file(path)), file_(path_, O_RDONLY | O_NOFOLLOW) {
  const std::int64_t size = file_size(path);
  std::string text(static_cast<std::size_t>(std::min(size, kLengthBytes)), '\0');
  file_.read_at(0, text.data(), text.size());
  const std::int64_t length = parse_safetensors_length(text, size, path);
  text.resize(static_cast<std::size_t>(length));
  file_.read_at(kLengthBytes, text.data(), text.size());
  data_begin_ = kLengthBytes + length;
  entries_ = parse_safetensors_header(text, size - data_begin_, path);
}

void SafetensorsFile::read(const SafetensorsEntry& entry, std::int64_t begin, const TensorView& out) const {
  ANNULUS_CHECK(begin >= 0 && out.numel() <= entry.shape.numel() - begin, "{}: {} has no elements {}+{}", path_,
                entry.name, begin, out.numel());
  ANNULUS_CHECK(out.device == DeviceKind::cpu, "files are read into host memory");
  const auto element = static_cast<std::int64_t>(size_of(entry.dtype)), step = kBlockBytes / element;
  std::vector<char> block;
  auto* to = static_cast<char*>(out.data);
  for (std::int64_t at = 0; at < out.numel(); at += step) {
    parallel::Heartbeat::touch();
    const std::int64_t count = std::min(step, out.numel() - at);
    const auto bytes = static_cast<std::size_t>(count * element);
    const std::int64_t offset = data_begin_ + entry.begin + (begin + at) * element;
    if (entry.dtype == out.dtype) {
      file_.read_at(offset, to, bytes);
    } else {
      block.resize(bytes);
      file_.read_at(offset, block.data(), bytes);
      convert_type(entry.dtype, block.data(), out.dtype, to, count);
    }
    to += count * static_cast<std::int64_t>(size_of(out.dtype));
  }
}

std::int64_t write_safetensors(const std::string& path, std::vector<const Slice*> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const Slice* a, const Slice* b) {
    const std::size_t size_a = size_of(a->data.dtype), size_b = size_of(b->data.dtype);
    return size_a != size_b ? size_a > size_b : a->tensor < b->tensor;
  });
  nlohmann::ordered_json header;
  header[kMetadata] = {{"format", "pt"}};  // older versions of transformers refuse files without it
  std::int64_t end = 0;
  for (const Slice* t : tensors) {
    ANNULUS_CHECK(t->begin == 0 && t->data.numel() == t->global_shape.numel(), "{} is not whole", t->tensor);
    std::vector<std::int64_t> dims;
    for (int i = 0; i < t->global_shape.rank(); ++i) dims.push_back(t->global_shape[i]);
    header[t->tensor] = {
        {"dtype", type_name(t->data.dtype)}, {"shape", dims}, {"data_offsets", {end, end + t->data.bytes()}}};
    end += t->data.bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  ANNULUS_CHECK(static_cast<std::int64_t>(text.size()) <= kMaxHeader, "{}: the header is too long", path);
  const std::uint64_t length = text.size();

  Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
  file.write({reinterpret_cast<const char*>(&length), sizeof(length)});
  file.write(text);
  std::vector<char> filled;
  for (const Slice* t : tensors) {
    const auto bytes = static_cast<std::size_t>(t->data.bytes());
    const auto* data = static_cast<const char*>(t->data.data);
    if (t->fill) {
      filled.resize(bytes);
      t->fill({filled.data(), t->data.dtype, DeviceKind::cpu, t->data.shape});
      data = filled.data();
    }
    file.write({data, bytes});
  }
  file.sync();
  file.close();
  return kLengthBytes + static_cast<std::int64_t>(length) + end;
}

}  // namespace annulus::checkpoint
