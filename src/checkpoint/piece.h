// Pieces: what a shard holds. A flat range of a matrix is at most three rectangles (the end of a row, whole rows, the
// start of a row); each is one dataset and one line of the manifest, and is again a flat range of the tensor.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace annulus::checkpoint {

struct Rect {  // of a vector: row, rows with col = 0, cols = 1
  std::int64_t row = 0, col = 0, rows = 0, cols = 1;
  std::int64_t numel() const { return rows * cols; }
  bool operator==(const Rect&) const = default;
};

// The flat range [begin, begin + count) of a row-major array with `cols` columns, in ascending order.
std::vector<Rect> cut(std::int64_t begin, std::int64_t count, std::int64_t cols);

// Rows and columns of a chunk of a [rows, cols] dataset: the whole of it up to 4 MiB, else between 1 and 4 MiB. The
// chunks of a dataset are as equal as can be, since the last one takes the place of a whole one in the file.
std::array<std::int64_t, 2> chunk_of(std::int64_t rows, std::int64_t cols, std::int64_t element_bytes);

inline std::int64_t columns_of(const Shape& shape) { return shape.rank() == 2 ? shape[1] : 1; }

struct Piece {
  std::string group, tensor;
  DType dtype = DType::f32;
  Shape global_shape;  // rank 1 or 2
  Rect rect;
  std::string file;  // "shard-00000.h5"
  std::string hash;  // XXH3-128 of the values, row-major, little-endian: 32 hexadecimal digits

  std::int64_t begin() const { return rect.row * columns_of(global_shape) + rect.col; }
  std::int64_t end() const { return begin() + rect.numel(); }
  std::int64_t bytes() const { return rect.numel() * static_cast<std::int64_t>(size_of(dtype)); }
  Shape shape() const { return global_shape.rank() == 2 ? Shape{rect.rows, rect.cols} : Shape{rect.rows}; }
  std::string dataset() const { return "/" + group + "/" + tensor + "@" + std::to_string(begin()); }
};

struct ShardFile {
  std::string name;
  std::int64_t bytes = 0;
};

struct ShardReport {  // what a rank wrote; no file where it had no slices
  std::vector<ShardFile> files;
  std::vector<Piece> pieces;
};

bool is_storable(DType dtype);               // f32, f64, bf16
bool is_tensor_name(std::string_view name);  // letters, digits, . _ -; not . or ..; at most 255
bool is_group_name(std::string_view name);   // the same, without dots, in at most three parts split by /
inline bool is_plain_file_name(std::string_view name) { return is_tensor_name(name); }

// Pieces by group, tensor and begin.
void sort_pieces(std::vector<Piece>& pieces);
// Checks sorted pieces: one shape and type per tensor, rectangles inside it that are flat ranges, no gap, no overlap.
// CheckpointError that starts with `where`.
void check_tiling(const std::vector<Piece>& sorted, const std::string& where);

}  // namespace annulus::checkpoint
