// SequenceLayout: which tokens of a sequence each rank owns (spec/sequence_parallel.md). S tokens are cut into 2P equal
// chunks of S/(2P) when P > 1; rank r holds two of them, in ascending order of their first token:
//   zigzag     chunks r and 2P − 1 − r      contiguous   chunks 2r and 2r + 1
// P = 1 takes any S as one chunk. Pure arithmetic; not collective. A length that does not fit is a ConfigError that
// names the nearest lengths that do.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace annulus::parallel {

enum class LayoutKind { zigzag, contiguous };

class SequenceLayout {
 public:
  // Where layers are sparse, a chunk is a multiple of their selection block and at least as long as their halo; both
  // are asked for only when P > 1.
  SequenceLayout(LayoutKind kind, std::int64_t tokens, int ranks, std::int64_t chunk_multiple = 1,
                 std::int64_t min_chunk = 1);

  LayoutKind kind() const { return kind_; }
  std::int64_t tokens() const { return tokens_; }                 // S
  int ranks() const { return ranks_; }                            // P
  std::int64_t local_tokens() const { return tokens_ / ranks_; }  // T
  std::int64_t chunk() const { return chunk_; }                   // tokens per chunk
  std::array<std::int64_t, 2> chunk_begin(int rank) const;        // first tokens, ascending; [1] is −1 when P = 1
  std::int64_t global_index(int rank, std::int64_t row) const;    // token of a local row
  std::int64_t rows_before(int rank, std::int64_t token) const;   // local rows of `rank` that hold tokens < token

  // Copies the rank's tokens out of one sequence, and back into it (the exact inverse over all ranks).
  template <class T>
  void shard(int rank, std::span<const T> sequence, std::span<T> local) const {
    for (std::int64_t row = 0; row < local_tokens(); ++row) {
      local[static_cast<std::size_t>(row)] = sequence[static_cast<std::size_t>(global_index(rank, row))];
    }
  }
  template <class T>
  void unshard(int rank, std::span<const T> local, std::span<T> sequence) const {
    for (std::int64_t row = 0; row < local_tokens(); ++row) {
      sequence[static_cast<std::size_t>(global_index(rank, row))] = local[static_cast<std::size_t>(row)];
    }
  }

 private:
  LayoutKind kind_;
  std::int64_t tokens_;
  int ranks_;
  std::int64_t chunk_;
};

}  // namespace annulus::parallel
