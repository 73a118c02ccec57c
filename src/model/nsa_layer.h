// The class of native sparse attention's sublayer: training passes in nsa_layer.cpp, generation in nsa_cached.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/nsa.h"
#include "model/attention_layer.h"
#include "model/compression.h"

namespace annulus::model {

class NsaLayer : public AttentionLayer {
 public:
  NsaLayer(const std::string& name, const ModelConfig& config);

  std::unique_ptr<AttentionLayer::Saved> allocate_saved(SavedAllocator& allocator, DType dtype, std::int64_t batch,
                                                        std::int64_t local_tokens) const override;
  void forward(Context& ctx, const SequenceBatch& sequence, const TensorView& x, const TensorView& y,
               AttentionLayer::Saved& saved, bool attention_kept) const override;
  void backward(Context& ctx, const SequenceBatch& sequence, const TensorView& d_y, const TensorView& x,
                const AttentionLayer::Saved& saved, const TensorView& d_x) const override;
  void visit_parameters(const ParameterVisitor& visit) override;
  View view(const AttentionLayer::Saved& saved) const override;
  void pin_selection(const TensorView& selected) override { pinned_ = selected; }
  double attention_flops(std::int64_t tokens) const override;
  std::unique_ptr<AttentionLayer::Cache> allocate_cache(Arena& arena, const CacheSizes& sizes) const override;
  View forward_cached(Context& ctx, const CachedRows& rows, const TensorView& x, const TensorView& y,
                      AttentionLayer::Cache& cache) const override;

 private:
  struct Pair {             // one K and V: of a branch, or of all of them
    TensorView kv;          // [2, B, T, Hkv, D]; K rotated, except that of compression with rope = "after"
    TensorView k_raw;       // before k_norm
    RmsNorm::Saved k_norm;  // [R·Hkv]
  };
  struct Saved : AttentionLayer::Saved {
    TensorView q, q_raw;  // [B, T, Hq, D], rotated; before q_norm
    RmsNorm::Saved q_norm;
    std::vector<Pair> pairs;  // by branch, or one
    TensorView plain_k;       // one pair and rope = "after": K before rotation, for compression
    TensorView compressed;    // 2 · B · ⌊T/d⌋ · Hkv · D elements, of which compressed_view() uses the first
    TensorView logits;        // [R, 3·Hq]
    TensorView out[attention::kNumBranches], lse[attention::kNumBranches];
    TensorView selected;
  };
  struct Gradients {  // stat
    TensorView q;     // of q, rotated
    TensorView kv[attention::kNumBranches];
  };

  // Raw keys and values that tokens to come may need, and the compressed ones of all full blocks.
  struct Cache : AttentionLayer::Cache {
    RowCache all;           // what the selection reads, rotated; of all branches with one pair
    RowCache window;        // per branch: rotated
    RowCache open;          // what blocks that are not full yet cover; unless compression reads `all`
    TensorView compressed;  // [2, M, Hkv, D]
  };

  const Pair& pair(const Saved& s, int branch) const { return s.pairs[shared_ ? 0 : static_cast<std::size_t>(branch)]; }
  TensorView compression_k(const Saved& s) const {
    return shared_ && rope_after_ ? s.plain_k : pair(s, attention::kCompressed).kv[0];
  }
  TensorView heads(const TensorView& t) const { return t.reshape({t.numel() / head_dim_, head_dim_}); }
  TensorView compressed_view(const Saved& s, const attention::LocalBlocks& local) const;
  void rotate(Context& ctx, const SequenceBatch& sequence, const TensorView& x, bool inverse) const;
  void rotate_blocks(Context& ctx, const SequenceBatch& sequence, const attention::LocalBlocks& local,
                     const TensorView& k, bool inverse) const;
  void project(Context& ctx, const SequenceBatch& sequence, const TensorView& x, Saved& s) const;
  void compress(Context& ctx, const SequenceBatch& sequence, const Saved& s) const;
  void compress_backward(Context& ctx, const SequenceBatch& sequence, const Saved& s, const TensorView& d_compressed,
                         const TensorView& d_k, const TensorView& d_v) const;
  bool compresses_all() const { return shared_ && !rope_after_; }  // rotated K of the one pair, as the others read it
  void project_cached(Context& ctx, const CachedRows& in, const TensorView& x, Cache& cache) const;
  void compress_cached(Context& ctx, const CachedRows& in, Cache& cache) const;
  void gate(Context& ctx, const Saved& s, const TensorView& out) const;
  void attend_backward(Context& ctx, const SequenceBatch& sequence, const Saved& s, const TensorView (&d_out)[3],
                       const Gradients& g) const;
  void join_pairs(Context& ctx, const SequenceBatch& sequence, const Gradients& g) const;
  void project_backward(Context& ctx, const SequenceBatch& sequence, const Saved& s, const TensorView& x,
                        const Gradients& g, const TensorView& d_x) const;

  std::int64_t heads_, kv_heads_, head_dim_;
  attention::NsaShape shape_;
  bool shared_, rope_after_;
  Linear q_proj_;
  std::vector<Linear> k_proj_, v_proj_;       // by branch, or one
  std::unique_ptr<RmsNorm> q_norm_, k_norm_;  // null without qk_norm; k_norm serves every branch
  Compression compress_k_, compress_v_;
  Linear gate_, o_proj_;
  TensorView pinned_;
};

}  // namespace annulus::model
