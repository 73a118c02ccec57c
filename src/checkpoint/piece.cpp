#include "checkpoint/piece.h"

#include <algorithm>
#include <tuple>

namespace annulus::checkpoint {
namespace {

constexpr std::int64_t kMaxChunk = std::int64_t{4} << 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_name_part(std::string_view name, bool dots) {
  if (name.empty() || name.size() > 255 || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [dots](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           (dots && c == '.');
  });
}

void check_rectangle(const Piece& p, const std::string& where) {
  const std::int64_t rows = p.global_shape[0], cols = columns_of(p.global_shape);
  const Rect& r = p.rect;
  const bool inside = r.row >= 0 && r.col >= 0 && r.rows > 0 && r.cols > 0 && r.rows <= rows && r.cols <= cols &&
                      r.row <= rows - r.rows && r.col <= cols - r.cols;
  if (!inside || (r.rows > 1 && r.cols != cols)) {
    throw CheckpointError(
        fmt::format("{}: tensor {}/{} of shape {}: the slice at [{}, {}] of {} by {} elements in {} is {}", where,
                    p.group, p.tensor, p.global_shape.str(), r.row, r.col, r.rows, r.cols, p.file,
                    inside ? "not a contiguous range" : "not inside the tensor"));
  }
}

}  // namespace

std::vector<Rect> cut(std::int64_t begin, std::int64_t count, std::int64_t cols) {
  std::vector<Rect> out;
  const std::int64_t end = begin + count;
  while (begin < end) {
    const std::int64_t row = begin / cols, col = begin % cols;
    const std::int64_t whole = col == 0 ? (end - begin) / cols : 0;
    const Rect rect = whole > 0 ? Rect{row, 0, whole, cols} : Rect{row, col, 1, std::min(cols - col, end - begin)};
    out.push_back(rect);
    begin += rect.numel();
  }
  return out;
}

std::array<std::int64_t, 2> chunk_of(std::int64_t rows, std::int64_t cols, std::int64_t element_bytes) {
  const std::int64_t row_bytes = cols * element_bytes;
  if (row_bytes > kMaxChunk) return {1, ceil_div(cols, ceil_div(row_bytes, kMaxChunk))};
  const std::int64_t num_chunks = std::max<std::int64_t>(1, ceil_div(rows * row_bytes, kMaxChunk));
  return {std::min(ceil_div(rows, num_chunks), kMaxChunk / row_bytes), cols};
}

bool is_storable(DType dtype) { return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16; }

bool is_tensor_name(std::string_view name) { return is_name_part(name, true); }

bool is_group_name(std::string_view name) {
  for (int parts = 1; parts <= 3; ++parts) {
    const auto slash = name.find('/');
    if (!is_name_part(name.substr(0, slash), false)) return false;
    if (slash == name.npos) return true;
    name = name.substr(slash + 1);
  }
  return false;
}

void sort_pieces(std::vector<Piece>& pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::tuple(std::string_view(a.group), std::string_view(a.tensor), a.begin()) <
           std::tuple(std::string_view(b.group), std::string_view(b.tensor), b.begin());
  });
}

void check_tiling(const std::vector<Piece>& sorted, const std::string& where) {
  for (const Piece& p : sorted) check_rectangle(p, where);
  for (std::size_t i = 0; i < sorted.size();) {
    const Piece& first = sorted[i];
    const auto name = [&] { return fmt::format("{}: tensor {}/{}", where, first.group, first.tensor); };
    const std::int64_t total = first.global_shape.numel();
    std::int64_t covered = 0;
    for (; i < sorted.size() && sorted[i].group == first.group && sorted[i].tensor == first.tensor; ++i) {
      const Piece& p = sorted[i];
      if (p.dtype != first.dtype || p.global_shape != first.global_shape) {
        throw CheckpointError(fmt::format("{}: {} {} in {}, but {} {} in {}", name(), name_of(first.dtype),
                                          first.global_shape.str(), first.file, name_of(p.dtype), p.global_shape.str(),
                                          p.file));
      }
      if (p.begin() != covered) {
        throw CheckpointError(fmt::format("{}: elements {} to {} are {} (at the slice in {})", name(),
                                          std::min(covered, p.begin()), std::max(covered, p.begin()),
                                          p.begin() < covered ? "there twice" : "missing", p.file));
      }
      covered = p.end();
    }
    if (covered != total)
      throw CheckpointError(fmt::format("{}: elements {} to {} are missing", name(), covered, total));
  }
}

}  // namespace annulus::checkpoint
