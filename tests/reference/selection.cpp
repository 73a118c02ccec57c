#include "reference/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace annulus::reference {
namespace {

template <class Real>
class Selection {
 public:
  explicit Selection(const SelectionInput<Real>& in)
      : in_(in), size_(in.size), group_(size_.query_heads / size_.kv_heads) {
    for (const std::int32_t token : in.token)
      out_.num_blocks = std::max(out_.num_blocks, token / in.rule.select_block + 1);
    out_.lse.assign(static_cast<std::size_t>(size_.rows()), -std::numeric_limits<Real>::infinity());
    out_.scores.assign(static_cast<std::size_t>(size_.bounds() * size_.kv_heads * out_.num_blocks), 0);
  }

  SelectionOutput<Real> run() {
    for (std::int64_t row = 0; row < size_.bounds(); ++row) {
      for (std::int64_t h = 0; h < size_.kv_heads; ++h) {
        const std::span<Real> score(out_.scores.data() + (row * size_.kv_heads + h) * out_.num_blocks,
                                    static_cast<std::size_t>(out_.num_blocks));
        for (std::int64_t g = 0; g < group_; ++g) add_scores(probabilities(row, h, g), score);
        choose(row, score);
      }
    }
    return out_;
  }

 private:
  bool sees(std::int64_t row, std::int64_t i) const {
    const std::int64_t begin = i * in_.rule.stride, last = begin + in_.rule.block - 1;
    return last <= in_.token[static_cast<std::size_t>(row)] && begin >= in_.start[static_cast<std::size_t>(row)];
  }

  // Of every compressed block for query head g of KV head h's group.
  std::vector<Real> probabilities(std::int64_t row, std::int64_t h, std::int64_t g) {
    const std::int64_t sequence = row / size_.queries, head = h * group_ + g;
    const Real* q = in_.q.data() + (row * size_.query_heads + head) * size_.depth;
    std::vector<Real> p(static_cast<std::size_t>(size_.keys), -std::numeric_limits<Real>::infinity());
    Real maximum = -std::numeric_limits<Real>::infinity(), sum = 0;
    for (std::int64_t i = 0; i < size_.keys; ++i) {
      if (!sees(row, i)) continue;
      const Real* k = in_.k.data() + ((sequence * size_.keys + i) * size_.kv_heads + h) * size_.depth;
      Real dot = 0;
      for (std::int64_t c = 0; c < size_.depth; ++c) dot += q[c] * k[c];
      p[static_cast<std::size_t>(i)] = static_cast<Real>(in_.scale) * dot;
      maximum = std::max(maximum, p[static_cast<std::size_t>(i)]);
    }
    if (maximum == -std::numeric_limits<Real>::infinity()) return std::vector<Real>(p.size(), 0);
    for (Real& x : p) sum += x = x == -std::numeric_limits<Real>::infinity() ? 0 : std::exp(x - maximum);
    for (Real& x : p) x = x / sum < std::numeric_limits<Real>::min() ? 0 : x / sum;
    out_.lse[static_cast<std::size_t>((sequence * size_.query_heads + head) * size_.queries + row % size_.queries)] =
        maximum + std::log(sum);
    return p;
  }

  void add_scores(const std::vector<Real>& p, std::span<Real> score) const {
    const std::int64_t tiles = in_.rule.select_block / in_.rule.stride, block_tiles = in_.rule.block / in_.rule.stride;
    for (std::int64_t j = 0; j < out_.num_blocks; ++j) {
      for (std::int64_t a = 0; a < tiles; ++a) {
        for (std::int64_t b = 0; b < block_tiles; ++b) {
          const std::int64_t i = tiles * j + a + b - (block_tiles - 1);
          if (i >= 0 && i < size_.keys) score[static_cast<std::size_t>(j)] += p[static_cast<std::size_t>(i)];
        }
      }
    }
  }

  void choose(std::int64_t row, std::span<const Real> score) {
    const SelectionRule& rule = in_.rule;
    const std::int64_t own = in_.token[static_cast<std::size_t>(row)] / rule.select_block;
    const std::int64_t first = in_.start[static_cast<std::size_t>(row)] / rule.select_block;
    std::vector<std::int32_t> chosen, rest;
    for (std::int64_t j = first; j <= own; ++j) {
      const bool forced = j < first + rule.init_blocks || j > own - rule.local_blocks;
      (forced ? chosen : rest).push_back(static_cast<std::int32_t>(j));
    }
    std::stable_sort(rest.begin(), rest.end(), [&](std::int32_t a, std::int32_t b) {
      return score[static_cast<std::size_t>(a)] > score[static_cast<std::size_t>(b)];
    });
    rest.resize(std::min(rest.size(), static_cast<std::size_t>(rule.count) - chosen.size()));
    chosen.insert(chosen.end(), rest.begin(), rest.end());
    std::sort(chosen.begin(), chosen.end());
    chosen.resize(static_cast<std::size_t>(rule.count), -1);
    out_.selected.insert(out_.selected.end(), chosen.begin(), chosen.end());
  }

  const SelectionInput<Real>& in_;
  const BandSize size_;
  const std::int64_t group_;
  SelectionOutput<Real> out_;
};

}  // namespace

template <class Real>
SelectionOutput<Real> select_blocks(const SelectionInput<Real>& in) {
  return Selection<Real>(in).run();
}

template SelectionOutput<float> select_blocks(const SelectionInput<float>&);
template SelectionOutput<double> select_blocks(const SelectionInput<double>&);

}  // namespace annulus::reference
