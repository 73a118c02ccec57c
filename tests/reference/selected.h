// Attention over selected blocks without tricks (attention/select.h): every key of the buffer is asked whether a query
// sees it; whole rows of scores, one loop per sum, in any real type. double is the reference; float is the naive
// implementation that tolerances are measured in.
#pragma once

#include "attention/select.h"
#include "reference/attention.h"

namespace annulus::reference {

template <class Real>
struct SelectedInput {
  BandSize size;
  std::int64_t count = 1, block = 1;  // n, l'
  attention::KeyChunks chunks;
  double scale = 1;
  std::vector<Real> q, k, v, d_o;                    // as in select.h
  std::vector<std::int32_t> selected, token, start;  // [B, T, Hkv, n], [B, T], [B, T]
};

// The token of the sequence that row `s` of a buffer holds.
std::int64_t token_of(const attention::KeyChunks& chunks, std::int64_t s);

// Whether query row t of KV head h sees row s of the buffer.
template <class Real>
bool sees(const SelectedInput<Real>& in, std::int64_t batch, std::int64_t t, std::int64_t kv_head, std::int64_t s);

// Everything, gradients from zero, of a call over all keys that the queries have.
template <class Real>
BandOutput<Real> selected_attention(const SelectedInput<Real>& in);

extern template BandOutput<float> selected_attention(const SelectedInput<float>&);
extern template BandOutput<double> selected_attention(const SelectedInput<double>&);
extern template bool sees(const SelectedInput<float>&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
extern template bool sees(const SelectedInput<double>&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);

}  // namespace annulus::reference
