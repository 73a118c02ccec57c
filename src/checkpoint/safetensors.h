// The safetensors format (github.com/huggingface/safetensors): 8 bytes little-endian N, N bytes of JSON
// {name: {dtype, shape, data_offsets}}, then the values. The reader trusts nothing: the header's length against the
// file, valid JSON without duplicate names, offsets contiguous from the first to the last byte, and every shape times
// its type's size equal to its bytes, all without overflow. Types are F64, F32, F16 and BF16. Anything else is a
// CheckpointError that names file and tensor. Not collective.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/store.h"

namespace annulus::checkpoint {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::int64_t begin = 0;  // its first byte, behind the header
};

// The header's two parts, for a file of `file_bytes` (from its first 8 bytes: N), and for values of `data_bytes`: the
// entries as they lie. Pure functions, also fuzzed.
std::int64_t parse_safetensors_length(std::string_view first, std::int64_t file_bytes, const std::string& where);
std::vector<SafetensorsEntry> parse_safetensors_header(std::string_view header, std::int64_t data_bytes,
                                                       const std::string& where);

// tensor -> file of a model.safetensors.index.json, by tensor: plain names of .safetensors files. A pure function, also
// fuzzed.
std::vector<std::pair<std::string, std::string>> parse_safetensors_index(const std::string& text,
                                                                         const std::string& where);

// A file opened to read, its header checked.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  // Reads the flat range [begin, begin + out.numel()) of an entry into host memory, converting where types differ.
  void read(const SafetensorsEntry& entry, std::int64_t begin, const TensorView& out) const;

 private:
  std::string path_;
  Descriptor file_;
  std::int64_t data_begin_ = 0;
  std::vector<SafetensorsEntry> entries_;
};

// Writes whole tensors (begin 0) as one file and syncs it; larger types first, then by name, as the format's own
// library does. Returns the file's bytes.
std::int64_t write_safetensors(const std::string& path, std::vector<const Slice*> tensors);

}  // namespace annulus::checkpoint
