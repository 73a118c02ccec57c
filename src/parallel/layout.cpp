#include "parallel/layout.h"

#include <algorithm>

#include "core/error.h"

namespace annulus::parallel {

SequenceLayout::SequenceLayout(LayoutKind kind, std::int64_t tokens, int ranks, std::int64_t chunk_multiple,
                               std::int64_t min_chunk)
    : kind_(kind), tokens_(tokens), ranks_(ranks) {
  ANNULUS_CHECK(ranks >= 1 && chunk_multiple >= 1, "a layout needs ranks and a multiple, got {} and {}", ranks,
                chunk_multiple);
  if (ranks == 1) {
    if (tokens < 1) throw ConfigError(fmt::format("the sequence length is {}; it must be at least 1", tokens));
    chunk_ = tokens;
    return;
  }
  const std::int64_t chunks = 2 * static_cast<std::int64_t>(ranks);
  const std::int64_t unit = chunks * chunk_multiple;
  const std::int64_t least = std::max<std::int64_t>(1, (min_chunk + chunk_multiple - 1) / chunk_multiple) * unit;
  chunk_ = tokens / chunks;
  if (tokens >= least && tokens % unit == 0) return;
  const std::int64_t below = tokens / unit * unit, above = std::max(least, below + unit);
  std::string why = fmt::format("a multiple of {}", unit);
  if (least > unit) why += fmt::format(" and at least {}", least);
  throw ConfigError(fmt::format(
      "a sequence of {} tokens does not fit {} sequence ranks: it is cut into {} equal chunks{}{}, so its length must "
      "be {}. "
      "Lengths that fit: {}{}",
      tokens, ranks, chunks, chunk_multiple > 1 ? fmt::format(" of a multiple of {} tokens", chunk_multiple) : "",
      min_chunk > 1 ? fmt::format(" of at least {} tokens", min_chunk) : "", why,
      below >= least ? fmt::format("{} and ", below) : "", above));
}

std::array<std::int64_t, 2> SequenceLayout::chunk_begin(int rank) const {
  ANNULUS_CHECK(rank >= 0 && rank < ranks_, "rank {} of {}", rank, ranks_);
  if (ranks_ == 1) return {0, -1};
  if (kind_ == LayoutKind::zigzag) return {rank * chunk_, (2 * ranks_ - 1 - rank) * chunk_};
  return {2 * rank * chunk_, (2 * rank + 1) * chunk_};
}

std::int64_t SequenceLayout::global_index(int rank, std::int64_t row) const {
  ANNULUS_CHECK(row >= 0 && row < local_tokens(), "row {} of {}", row, local_tokens());
  const auto begin = chunk_begin(rank);
  return row < chunk_ ? begin[0] + row : begin[1] + row - chunk_;
}

std::int64_t SequenceLayout::rows_before(int rank, std::int64_t token) const {
  std::int64_t rows = 0;
  for (const std::int64_t begin : chunk_begin(rank)) {
    if (begin >= 0) rows += std::clamp<std::int64_t>(token - begin, 0, chunk_);
  }
  return rows;
}

}  // namespace annulus::parallel
