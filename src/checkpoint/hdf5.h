// The little of HDF5 that the store uses. HDF5's header stays in hdf5.cpp; every call there is made under one lock,
// with HDF5's own printing and its plugins off, and a failure is a CheckpointError with the file, the call and HDF5's
// innermost reason. Memory type and file type are always the same: HDF5 converts nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/piece.h"

namespace annulus::checkpoint::hdf5 {

class Id {  // owns an HDF5 identifier
 public:
  using Closer = int (*)(std::int64_t);
  Id() = default;
  Id(std::int64_t id, Closer close) : id_(id), close_(close) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Id();
  std::int64_t get() const { return id_; }
  std::int64_t release() { return std::exchange(id_, -1); }

 private:
  std::int64_t id_ = -1;
  Closer close_ = nullptr;
};

class Dataset {  // checked when opened
 public:
  void read(const Rect& block, void* out) const;

 private:
  friend class File;
  Id id_;
  DType dtype_ = DType::f32;
  int rank_ = 1;
  std::string name_;  // file and dataset, for messages
};

class File {
 public:
  static File create(const std::string& path);
  static File open(const std::string& path);  // to read
  File(File&&) noexcept = default;
  File& operator=(File&&) = delete;
  ~File();  // a file being written that was not closed is abandoned

  // Flushes and closes; not yet fsync.
  void close();

  // A dataset for one piece, written in blocks of whole chunk rows (<= 4 MiB); calls `between` before each but the
  // first.
  void write_piece(const Piece& piece, const void* data, const std::function<void()>& between);
  // The whole tensor of these pieces (sorted) as a virtual dataset /group/tensor over files of the same folder.
  void write_virtual(const std::vector<Piece>& pieces, std::size_t first, std::size_t last);
  void write_attribute(const char* name, const std::string& text);

  // Full names of all datasets. Refuses what is not a group or a dataset behind a hard link, and more than `limit` of
  // them.
  std::vector<std::string> dataset_names(std::int64_t limit) const;
  // Refuses soft and external links on the way, virtual and external storage, filters, another type or shape than the
  // piece's, and storage smaller than its values.
  Dataset open_piece(const Piece& piece) const;

 private:
  File(Id id, std::string path, bool writing) : id_(std::move(id)), path_(std::move(path)), writing_(writing) {}
  void abandon() noexcept;
  int descriptor() const;
  void reserve(std::int64_t bytes);  // room on disk for what is not yet written, and this much more

  Id id_;
  std::string path_;
  bool writing_;
  std::int64_t reserved_ = 0;
};

}  // namespace annulus::checkpoint::hdf5
