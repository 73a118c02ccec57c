// Banded attention without tricks (attention/band.h): whole rows of scores, one loop per sum, in any real type. double
// is the reference; float is the naive implementation that tolerances are measured in.
#pragma once

#include <cstdint>
#include <vector>

namespace annulus::reference {

struct BandSize {
  std::int64_t batch = 1, queries = 1, keys = 1, query_heads = 1, kv_heads = 1, depth = 1;

  std::int64_t q_numel() const { return batch * queries * query_heads * depth; }
  std::int64_t k_numel() const { return batch * keys * kv_heads * depth; }
  std::int64_t rows() const { return batch * queries * query_heads; }
  std::int64_t bounds() const { return batch * queries; }
};

template <class Real>
struct BandInput {
  BandSize size;
  double scale = 1;
  std::vector<Real> q, k, v, d_o;  // as in band.h
  std::vector<std::int32_t> first, last;
};

template <class Real>
struct BandOutput {
  std::vector<Real> o, lse, delta, d_q, d_k, d_v;
};

// Everything, gradients from zero.
template <class Real>
BandOutput<Real> band_attention(const BandInput<Real>& in);

extern template BandOutput<float> band_attention(const BandInput<float>&);
extern template BandOutput<double> band_attention(const BandInput<double>&);

}  // namespace annulus::reference
