#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <tuple>

#include "checkpoint/convert_type.h"
#include "checkpoint/folder.h"
#include "checkpoint/hash.h"
#include "checkpoint/hdf5.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "parallel/heartbeat.h"

namespace annulus::checkpoint {
namespace {

constexpr std::int64_t kMaxManifest = std::int64_t{1} << 28;
constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;

// A flat range of the piece's own values, as at most three rectangles read one after another.
void read_flat(const hdf5::Dataset& dataset, const Piece& piece, std::int64_t begin, std::int64_t count, char* out) {
  for (const Rect& block : cut(begin, count, piece.rect.cols)) {
    dataset.read(block, out);
    out += block.numel() * static_cast<std::int64_t>(size_of(piece.dtype));
  }
}

}  // namespace

struct Checkpoint::Impl {
  struct Tensor {
    std::size_t first, last;  // its pieces
  };
  std::string path;
  Manifest manifest;
  std::vector<TensorInfo> tensors;
  std::vector<Tensor> ranges;  // beside tensors

  std::mutex mutex;
  std::map<std::string, hdf5::File> open_files;

  const hdf5::File& file(const std::string& name) {
    const std::lock_guard lock(mutex);
    auto it = open_files.find(name);
    if (it == open_files.end()) {
      for (const ShardFile& f : manifest.files) {
        if (f.name == name) check_size(f);  // says more than HDF5 does
      }
      it = open_files.emplace(name, hdf5::File::open(path + "/" + name)).first;
    }
    return it->second;
  }
  void check_size(const ShardFile& f) const {
    const std::string full = path + "/" + f.name;
    if (!exists(full))
      throw CheckpointError(fmt::format("{}: missing; the manifest lists it with {} bytes", full, f.bytes));
    if (const auto found = file_size(full); found != f.bytes) {
      throw CheckpointError(fmt::format("{}: wanted {} bytes, found {}", full, f.bytes, found));
    }
  }
  void check_structure(const ShardFile& f) {
    std::vector<std::string> wanted;
    for (const Piece& p : manifest.pieces) {
      if (p.file == f.name) wanted.push_back(p.dataset());
    }
    auto found = file(f.name).dataset_names(static_cast<std::int64_t>(wanted.size()));
    std::sort(wanted.begin(), wanted.end());
    std::sort(found.begin(), found.end());
    const auto [w, h] = std::mismatch(wanted.begin(), wanted.end(), found.begin(), found.end());
    if (w != wanted.end() || h != found.end()) {
      throw CheckpointError(fmt::format("{}/{}: wanted dataset {}, found {}", path, f.name,
                                        w != wanted.end() ? *w : "no other", h != found.end() ? *h : "no more"));
    }
  }
  void check_hash(const Piece& p, std::vector<char>& block) {
    const auto dataset = file(p.file).open_piece(p);
    const auto element = static_cast<std::int64_t>(size_of(p.dtype));
    // Whole rows where several fit a block, so that a read meets few chunks.
    const std::int64_t rows = std::max<std::int64_t>(1, kBlockBytes / (p.rect.cols * element));
    const std::int64_t step = p.rect.cols * element <= kBlockBytes ? rows * p.rect.cols : kBlockBytes / element;
    block.resize(static_cast<std::size_t>(std::min(step, p.rect.numel()) * element));
    Hasher hasher;
    for (std::int64_t at = 0; at < p.rect.numel(); at += step) {
      const std::int64_t count = std::min(step, p.rect.numel() - at);
      read_flat(dataset, p, at, count, block.data());
      hasher.add(block.data(), static_cast<std::size_t>(count * element));
    }
    if (const std::string found = hasher.digest(); found != p.hash) {
      throw CheckpointError(
          fmt::format("{}/{}: tensor {}/{}, elements {} to {}: wanted XXH3-128 {}, found {}: the values are damaged",
                      path, p.file, p.group, p.tensor, p.begin(), p.end(), p.hash, found));
    }
  }
};

std::string read_manifest(const std::string& path) {
  const std::string name = path + "/" + kManifestName;
  if (!exists(name))
    throw CheckpointError(
        fmt::format("{}: no {}: not a checkpoint, or one that was not finished", path, kManifestName));
  return read_file(name, kMaxManifest);
}

Checkpoint Checkpoint::from_manifest(const std::string& path, const std::string& text) {
  Checkpoint out;
  out.impl_ = std::make_shared<Impl>();
  Impl& c = *out.impl_;
  c.path = path;
  c.manifest = parse_manifest(text, path + "/" + kManifestName);
  const auto& pieces = c.manifest.pieces;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (c.tensors.empty() || c.tensors.back().group != pieces[i].group || c.tensors.back().tensor != pieces[i].tensor) {
      c.tensors.push_back({pieces[i].group, pieces[i].tensor, pieces[i].dtype, pieces[i].global_shape});
      c.ranges.push_back({i, i});
    }
    c.ranges.back().last = i + 1;
  }
  return out;
}

Checkpoint Checkpoint::open(const std::string& path) {
  std::string folder = path;
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  Checkpoint out = from_manifest(folder, read_manifest(folder));
  for (const ShardFile& f : out.impl_->manifest.files) out.impl_->check_size(f);
  return out;
}

const std::string& Checkpoint::path() const { return impl_->path; }
const Meta& Checkpoint::meta() const { return impl_->manifest.meta; }
const std::vector<TensorInfo>& Checkpoint::tensors() const { return impl_->tensors; }

void Checkpoint::verify(int part, int parts) const {
  ANNULUS_CHECK(parts > 0 && part >= 0 && part < parts, "no part {} of {}", part, parts);
  Impl& c = *impl_;
  for (std::size_t i = 0; i < c.manifest.files.size(); ++i) {
    const ShardFile& f = c.manifest.files[i];
    if (static_cast<int>(i % static_cast<std::size_t>(parts)) != part) continue;
    c.check_size(f);
    if (f.name != kVirtualName) c.check_structure(f);
  }
  // A piece is hashed by whom its middle byte falls to.
  const double share = static_cast<double>(bytes()) / parts;
  std::int64_t before = 0;
  std::vector<char> block;
  for (const Piece& p : c.manifest.pieces) {
    parallel::Heartbeat::touch();
    const double middle = static_cast<double>(before) + static_cast<double>(p.bytes()) / 2;
    before += p.bytes();
    if (std::min(parts - 1, static_cast<int>(middle / share)) == part) c.check_hash(p, block);
  }
}

void Checkpoint::read(std::string_view group, std::string_view tensor, std::int64_t begin, TensorView out) const {
  Impl& c = *impl_;
  const TensorInfo* info = find(group, tensor);
  if (!info) throw CheckpointError(fmt::format("{}: tensor {}/{} is wanted, not found", path(), group, tensor));
  const auto [first, last] = c.ranges[static_cast<std::size_t>(info - c.tensors.data())];
  const std::int64_t end = begin + out.numel();
  ANNULUS_CHECK(begin >= 0 && end <= info->shape.numel(), "{}/{} has no elements {} to {}", group, tensor, begin, end);
  ANNULUS_CHECK(out.device == DeviceKind::cpu && is_storable(out.dtype),
                "checkpoints are read into f32, f64 or bf16 on the host");
  std::vector<char> block;
  auto* to = static_cast<char*>(out.data);
  for (std::size_t i = first; i < last; ++i) {
    const Piece& p = c.manifest.pieces[i];
    const std::int64_t from = std::max(begin, p.begin()), until = std::min(end, p.end());
    if (from >= until) continue;
    parallel::Heartbeat::touch();
    const auto dataset = c.file(p.file).open_piece(p);
    if (p.dtype == out.dtype) {
      read_flat(dataset, p, from - p.begin(), until - from, to);
      to += (until - from) * static_cast<std::int64_t>(size_of(out.dtype));
      continue;
    }
    const auto element = static_cast<std::int64_t>(size_of(p.dtype)), step = kBlockBytes / element;
    block.resize(static_cast<std::size_t>(std::min(step, until - from) * element));
    for (std::int64_t at = from; at < until; at += step) {
      const std::int64_t count = std::min(step, until - at);
      read_flat(dataset, p, at - p.begin(), count, block.data());
      convert_type(p.dtype, block.data(), out.dtype, to, count);
      to += count * static_cast<std::int64_t>(size_of(out.dtype));
    }
  }
}

}  // namespace annulus::checkpoint
