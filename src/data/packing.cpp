#include "data/packing.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "core/error.h"

namespace annulus::data {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// A set of integers below `size` that finds the smallest element >= x: a tree of bitmaps with 64 children a node.
class IntegerSet {
 public:
  explicit IntegerSet(std::int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(at(size), 0);
    } while (size > 1);
  }

  void insert(std::int64_t x) {
    for (auto& level : levels_) {
      level[at(x / 64)] |= 1ull << (x % 64);
      x /= 64;
    }
  }

  void erase(std::int64_t x) {
    for (auto& level : levels_) {
      auto& word = level[at(x / 64)];
      word &= ~(1ull << (x % 64));
      if (word != 0) return;
      x /= 64;
    }
  }

  std::int64_t at_least(std::int64_t x) const {  // −1: none
    std::size_t level = 0;
    for (; level < levels_.size(); ++level, x = x / 64 + 1) {  // up, until a node has something at or behind x
      if (at(x / 64) >= levels_[level].size()) return -1;
      const std::uint64_t word = levels_[level][at(x / 64)] >> (x % 64) << (x % 64);
      if (word == 0) continue;
      x = x / 64 * 64 + std::countr_zero(word);
      break;
    }
    if (level == levels_.size()) return -1;
    while (level-- > 0) x = x * 64 + std::countr_zero(levels_[level][at(x)]);  // down, always leftmost
    return x;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;  // [0]: elements; [i + 1]: words of [i] that are not zero
};

// Items 0 … n − 1 ordered by key ascending, equal keys in their order: counting sort. begin[k]: first item of key k.
template <class Key>
std::vector<std::int64_t> order_by(std::int64_t n, std::int64_t num_keys, const Key& key,
                                   std::vector<std::int64_t>& begin) {
  begin.assign(at(num_keys + 1), 0);
  for (std::int64_t i = 0; i < n; ++i) ++begin[at(key(i) + 1)];
  for (std::int64_t k = 0; k < num_keys; ++k) begin[at(k + 1)] += begin[at(k)];
  std::vector<std::int64_t> order(at(n)), next(begin.begin(), begin.end() - 1);
  for (std::int64_t i = 0; i < n; ++i) order[at(next[at(key(i))]++)] = i;
  return order;
}

}  // namespace

Packing::Packing(std::span<const std::int64_t> positions, std::int64_t sequence_length)
    : sequence_length_(sequence_length) {
  ANNULUS_CHECK(sequence_length >= 1, "samples of {} positions", sequence_length);
  std::vector<Tail> tails;
  for (std::int64_t d = 0; d < std::ssize(positions); ++d) {
    const std::int64_t length = positions[at(d)];
    ANNULUS_CHECK(length >= 0, "document {} has {} positions", d, length);
    if (length >= sequence_length) full_.push_back({d, num_full_samples_});
    num_full_samples_ += length / sequence_length;
    if (length % sequence_length != 0) tails.push_back({d, length});
  }
  pack_tails(tails);
}

void Packing::pack_tails(const std::vector<Tail>& tails) {
  const std::int64_t n = std::ssize(tails), size = sequence_length_;
  std::vector<std::int64_t> begin;
  const auto longest_first = order_by(
      n, size, [&](std::int64_t i) { return size - 1 - tails[at(i)].positions % size; }, begin);

  // Samples with room left, one stack per amount of room.
  IntegerSet rooms(size);
  std::vector<std::int64_t> top(at(size), -1), below, sample_of(at(n));
  for (const std::int64_t item : longest_first) {
    const std::int64_t length = tails[at(item)].positions % size;
    std::int64_t room = rooms.at_least(length), sample;
    if (room < 0) {
      room = size;
      sample = std::ssize(below);
      below.push_back(-1);
    } else {
      sample = top[at(room)];
      top[at(room)] = below[at(sample)];
      if (top[at(room)] < 0) rooms.erase(room);
    }
    sample_of[at(item)] = sample;
    room -= length;
    if (room == 0) continue;
    if (top[at(room)] < 0) rooms.insert(room);
    below[at(sample)] = top[at(room)];
    top[at(room)] = sample;
  }
  const auto order = order_by(
      n, std::ssize(below), [&](std::int64_t i) { return sample_of[at(longest_first[at(i)])]; }, packed_begin_);
  packed_.reserve(at(n));
  for (const std::int64_t i : order) packed_.push_back(tails[at(longest_first[at(i)])]);
}

std::vector<Piece> Packing::sample(std::int64_t index) const {
  ANNULUS_CHECK(index >= 0 && index < num_samples(), "sample {} of {}", index, num_samples());
  if (index < num_full_samples_) {
    const auto behind = std::upper_bound(full_.begin(), full_.end(), index,
                                         [](std::int64_t i, const FullRun& run) { return i < run.first_sample; });
    const FullRun& run = *std::prev(behind);
    return {{run.document, (index - run.first_sample) * sequence_length_, sequence_length_}};
  }
  const std::size_t packed = at(index - num_full_samples_);
  std::vector<Piece> pieces;
  for (std::int64_t i = packed_begin_[packed]; i < packed_begin_[packed + 1]; ++i) {
    const Tail& tail = packed_[at(i)];
    const std::int64_t length = tail.positions % sequence_length_;
    pieces.push_back({tail.document, tail.positions - length, length});
  }
  return pieces;
}

}  // namespace annulus::data
