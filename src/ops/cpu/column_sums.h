// Column sums over the rows of a matrix in one pass and in a fixed order: rows are cut into blocks that depend on their
// number alone; each block adds its rows into its own line of a workspace, then every column adds its lines in order.
#pragma once

#include "ops/cpu/parallel.h"

namespace annulus::ops::cpu {

struct RowBlocks {
  static constexpr std::int64_t kMinRows = 16, kMaxBlocks = 128;

  explicit RowBlocks(std::int64_t num_rows)
      : rows(num_rows), rows_per_block(std::max(kMinRows, (num_rows + kMaxBlocks - 1) / kMaxBlocks)) {}

  std::int64_t count() const { return (rows + rows_per_block - 1) / rows_per_block; }
  std::int64_t begin(std::int64_t block) const { return block * rows_per_block; }
  std::int64_t end(std::int64_t block) const { return std::min(rows, (block + 1) * rows_per_block); }

  std::int64_t rows, rows_per_block;
};

inline std::int64_t column_sums_bytes(std::int64_t rows, std::int64_t columns, DType stat) {
  return RowBlocks(rows).count() * columns * static_cast<std::int64_t>(size_of(stat));
}

// out[columns] += the sum of what add_row(r, line) adds into line[columns]; partials holds column_sums_bytes().
template <class T, class AddRow>
void add_column_sums(std::int64_t num_rows, std::int64_t columns, T* partials, T* out, const AddRow& add_row) {
  const RowBlocks blocks(num_rows);
  for_rows(blocks.count(), blocks.rows_per_block * columns, [&](std::int64_t b) {
    T* line = partials + b * columns;
    std::fill(line, line + columns, T(0));
    for (std::int64_t r = blocks.begin(b); r < blocks.end(b); ++r) add_row(r, line);
  });
  constexpr std::int64_t kColumns = 64;
  for_rows((columns + kColumns - 1) / kColumns, kColumns * blocks.count(), [&](std::int64_t part) {
    const std::int64_t begin = part * kColumns, end = std::min(columns, begin + kColumns);
    T sums[kColumns] = {};
    for (std::int64_t b = 0; b < blocks.count(); ++b) {
      const T* line = partials + b * columns;
#pragma omp simd
      for (std::int64_t j = begin; j < end; ++j) sums[j - begin] += line[j];
    }
    for (std::int64_t j = begin; j < end; ++j) out[j] += sums[j - begin];
  });
}

}  // namespace annulus::ops::cpu
