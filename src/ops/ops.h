// Every dense operation, declared once. ops::name(ctx, args) checks shapes, dtypes and devices, then calls
// ops::cpu::name or ops::cuda::name, which have the same signature (ops/dispatch.cpp); a missing twin does not link.
// With ctx.planning nothing is computed.
//
// Conventions: R rows (tokens, or tokens x heads), N, H, I columns, V vocabulary, D head dimension. All tensors are
// contiguous and on ctx.device. `T` is the working type (f32, f64 or bf16), `stat` is stat_type(T): f64 for f64, else
// f32. Weight gradients and optimiser state are `stat`. Outputs do not alias inputs unless a field says so. Every
// operation is deterministic: the same inputs give the same bits on the same device and number of threads. None is
// collective.
#pragma once

#include "core/context.h"

namespace annulus::ops {

enum class GradMode { overwrite, accumulate };

// y[i] = value.
struct Fill {
  TensorView y;
  double value = 0;
};

// y = x converted to y's type (bf16 rounds to nearest even); the same type copies. Same number of elements; f32, f64,
// bf16 in any pair, and i32 -> i32.
struct Cast {
  TensorView x, y;
};

// y = a + b, element by element, all of one type (T or stat). y may alias a or b.
struct Add {
  TensorView a, b, y;
};

// y *= factor.
struct Scale {
  TensorView y;
  double factor = 1;
};

// c[M, N] = op(a)[M, K] · op(b)[K, N], or += with accumulate. a is [M, K] ([K, M] with transpose_a), b is [K, N] ([N,
// K] with transpose_b). a and b are T; c is T or stat. Products accumulate in stat.
struct Matmul {
  TensorView a, b, c;
  bool transpose_a = false, transpose_b = false;
  GradMode mode = GradMode::overwrite;
};

// x[R, N] += bias[N], in place.
struct AddBias {
  TensorView x, bias;
};

// d_bias[N] (stat) += sum over rows of d_y[R, N].
struct AddBiasBackward {
  TensorView d_y, d_bias;
};

// y = x · rstd · w, rstd[R] (stat) = 1/sqrt(mean(x²) + eps) per row of x[R, H]; w[H] is T. y may alias x.
struct RmsNormForward {
  TensorView x, w, y, rstd;
  double eps = 1e-5;
};

// d_x[R, H] = (or +=, by mode) the gradient through x; d_w[H] (stat) += its share. d_x may alias d_y.
struct RmsNormBackward {
  TensorView d_y, x, w, rstd, d_x, d_w;
  GradMode mode = GradMode::overwrite;
};

// cos, sin[R, D/2] (stat) of position[r] · inv_freq[j], times `magnitude` (YaRN's attention factor). position[R] is
// i32, inv_freq[D/2] is stat and on the device. Angles are computed in stat.
struct RopeTable {
  TensorView position, inv_freq, cos, sin;
  double magnitude = 1;
};

// Rotates pairs (j, j + D/2) of x[R, heads, D] in place by row r · table_stride of cos, sin[(R − 1) · table_stride + 1,
// D/2]; inverse rotates back (the gradient: the transpose of the forward map, magnitude included).
struct Rope {
  TensorView x, cos, sin;
  bool inverse = false;
  std::int64_t table_stride = 1;
};

// y = silu(gate) ∘ up, all [R, I]. y may alias gate or up.
struct SwigluForward {
  TensorView gate, up, y;
};

// d_gate, d_up from d_y. d_gate may alias gate and d_up may alias up.
struct SwigluBackward {
  TensorView d_y, gate, up, d_gate, d_up;
};

// y = silu(x) = x · sigmoid(x). y may alias x.
struct SiluForward {
  TensorView x, y;
};

// d_x = d_y · silu'(x). d_x may alias d_y or x.
struct SiluBackward {
  TensorView d_y, x, d_x;
};

// Gates of NSA's branches (spec/nsa.md): out[r, h] = Σ_b sigmoid(logits[r, b·Hq + h]) · o[b][r, h] for b < 3. logits[R,
// 3·Hq]; o[b], out [R, Hq, D]; all T.
struct GateForward {
  TensorView logits, o[3], out;
};

// d_logits[R, 3·Hq] and d_o[b] [R, Hq, D], all T, are overwritten; sums in stat.
struct GateBackward {
  TensorView d_out, logits, o[3], d_logits, d_o[3];
};

// y[r] = w[token[r]]; w[V, H], token[R] i32 in [0, V), y[R, H].
struct EmbeddingForward {
  TensorView token, w, y;
};

// d_w[token[r]] (stat) += d_y[r], rows in ascending order.
struct EmbeddingBackward {
  TensorView token, d_y, d_w;
};

// Softmax cross entropy of logits[R, V] (T or stat) against target[R] i32: loss[r] (stat) = logsumexp − logit of the
// target, 0 where target < 0. correct[r] i32 (optional): 1 where target[r] >= 0 and no other logit is as great as the
// target's, else 0. With gradient, logits become (softmax − onehot) · scale, 0 where target < 0.
// Statistics in stat.
struct CrossEntropy {
  TensorView logits, target, loss;
  TensorView correct{};
  double scale = 1;
  bool gradient = true;
};

// result[0] (f64) = (or +=) sum of x (T or stat), accumulated in f64.
struct Sum {
  TensorView x, result;
  GradMode mode = GradMode::overwrite;
};

// result[0] (f64) = (or +=) sum of x², accumulated in f64.
struct SumSquares {
  TensorView x, result;
  GradMode mode = GradMode::overwrite;
};

// norm[0] = sqrt(sum_squares[0]); factor[0] = min(1, max_norm/(norm + 1e-6)), 1 if max_norm is 0; NaN if norm or
// loss[0] is not finite, which makes AdamW refuse the step. All f64 [1].
struct ClipFactor {
  TensorView sum_squares, loss, norm, factor;
  double max_norm = 0;
};

// One AdamW update of n elements (spec/model.md, Optimiser): g is multiplied by clip_factor[0] (f64 [1]); nothing is
// written when that is not finite. param is T; master, m, v, grad are stat; master may be the same memory as param (or
// empty) when T is stat. bias_correction = 1 − β^k.
struct AdamW {
  TensorView param, master, m, v, grad, clip_factor;
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0, bias_correction1 = 1, bias_correction2 = 1;
};

// clang-format off
#define ANNULUS_OPS(X)                     \
  X(fill, Fill)                            \
  X(cast, Cast)                            \
  X(add, Add)                              \
  X(scale, Scale)                          \
  X(matmul, Matmul)                        \
  X(add_bias, AddBias)                     \
  X(add_bias_backward, AddBiasBackward)    \
  X(rms_norm_forward, RmsNormForward)      \
  X(rms_norm_backward, RmsNormBackward)    \
  X(rope_table, RopeTable)                 \
  X(rope, Rope)                            \
  X(swiglu_forward, SwigluForward)         \
  X(swiglu_backward, SwigluBackward)       \
  X(silu_forward, SiluForward)             \
  X(silu_backward, SiluBackward)           \
  X(gate_forward, GateForward)             \
  X(gate_backward, GateBackward)           \
  X(embedding_forward, EmbeddingForward)   \
  X(embedding_backward, EmbeddingBackward) \
  X(cross_entropy, CrossEntropy)           \
  X(sum, Sum)                              \
  X(sum_squares, SumSquares)               \
  X(clip_factor, ClipFactor)               \
  X(adamw, AdamW)
// clang-format on

// void fill(Context&, const Fill&), and so on; the twins in cpu:: and cuda:: likewise.
#define ANNULUS_DECLARE_OP(name, Args) void name(Context& ctx, const Args& args);
ANNULUS_OPS(ANNULUS_DECLARE_OP)
namespace cpu {
ANNULUS_OPS(ANNULUS_DECLARE_OP)
}
namespace cuda {
ANNULUS_OPS(ANNULUS_DECLARE_OP)
}
#undef ANNULUS_DECLARE_OP

}  // namespace annulus::ops
