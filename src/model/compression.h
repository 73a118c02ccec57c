// NSA's compression φ of keys or values (spec/nsa.md, 1): blocks of l rows become their mean, with "mlp" plus
// w2·silu(w1·vec(x_j + pe_j)). One set of weights for all KV heads. Shapes and halo as in attention/compress.h.
#pragma once

#include "attention/compress.h"
#include "model/layers.h"

namespace annulus::model {

class Compression {
 public:
  // name.pe [l, D], name.w1 [h, l·D], name.w2 [D, h]; none with "mean".
  Compression(const std::string& name, const NsaConfig& config, std::int64_t kv_heads, std::int64_t head_dim);

  // x [B, chunks·c, Hkv, D], halo -> y [B, chunks, N, Hkv, D].
  void forward(Context& ctx, const attention::LocalBlocks& blocks, const TensorView& x, const TensorView& halo,
               const TensorView& y) const;
  // d_y is stat. Adds to d_x and d_halo (stat) and to the weights' gradients. What forward computed on the way is
  // computed again.
  void backward(Context& ctx, const attention::LocalBlocks& blocks, const TensorView& d_y, const TensorView& x,
                const TensorView& halo, const TensorView& d_x, const TensorView& d_halo) const;
  void visit_parameters(const ParameterVisitor& visit);

 private:
  template <class Visit>
  void for_row_ranges(const TensorView& vectors, DType dtype, const Visit& visit) const;
  void hidden(Context& ctx, const attention::LocalBlocks& blocks, const TensorView& x, const TensorView& halo,
              std::int64_t first, const TensorView& u, const TensorView& z) const;

  bool mlp_;
  std::int64_t block_, head_dim_;
  Parameter pe_, w1_, w2_;
};

}  // namespace annulus::model
