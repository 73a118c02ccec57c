// NSA's selection without tricks (attention/select.h; spec: arXiv 2502.11089, Eq. 8 to 12): the probabilities of the
// compressed attention as whole rows, the scores as the double sum of Eq. 9 with 0-based indices, and a stable sort. In
// any real type: double is the reference, float the naive implementation that tolerances are measured in.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/attention.h"

namespace annulus::reference {

struct SelectionRule {
  std::int64_t block = 1, stride = 1, select_block = 1;  // l, d, l'
  std::int64_t count = 1, init_blocks = 0, local_blocks = 1;
};

template <class Real>
struct SelectionInput {
  BandSize size;  // keys: rows of k, of which the compressed blocks that no token sees may be padding
  SelectionRule rule;
  double scale = 1;
  std::vector<Real> q, k;
  std::vector<std::int32_t> token, start;  // [B, T]
};

template <class Real>
struct SelectionOutput {
  std::int64_t num_blocks = 0;         // selection blocks up to the last token
  std::vector<Real> lse;               // [B, Hq, T]
  std::vector<Real> scores;            // [B, T, Hkv, num_blocks]
  std::vector<std::int32_t> selected;  // [B, T, Hkv, n]
};

// Probabilities below the smallest normal number are 0, as kernels flush them.
template <class Real>
SelectionOutput<Real> select_blocks(const SelectionInput<Real>& in);

extern template SelectionOutput<float> select_blocks(const SelectionInput<float>&);
extern template SelectionOutput<double> select_blocks(const SelectionInput<double>&);

}  // namespace annulus::reference
