// The dense operations, naively: loops as the formulas read (ops/ops.h), one element after the other, in the arithmetic
// R. With R = long double this is the truth, with R = double or float the naive implementation whose error bounds ours.
// Tensors are flat vectors; integers are held as R.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace annulus::reference {

template <class R>
using Values = std::vector<R>;
using Size = std::size_t;

template <class R>
void matmul(const Values<R>& a, const Values<R>& b, Values<R>& c, Size m, Size n, Size k, bool ta, bool tb,
            bool accumulate) {
  for (Size i = 0; i < m; ++i) {
    for (Size j = 0; j < n; ++j) {
      R sum = 0;
      for (Size p = 0; p < k; ++p) sum += a[ta ? p * m + i : i * k + p] * b[tb ? j * k + p : p * n + j];
      c[i * n + j] = accumulate ? c[i * n + j] + sum : sum;
    }
  }
}

template <class R>
void rms_norm_forward(const Values<R>& x, const Values<R>& w, Values<R>& y, Values<R>& rstd, Size h, R eps) {
  for (Size r = 0; r < rstd.size(); ++r) {
    R squares = 0;
    for (Size j = 0; j < h; ++j) squares += x[r * h + j] * x[r * h + j];
    rstd[r] = R(1) / std::sqrt(squares / static_cast<R>(h) + eps);
    for (Size j = 0; j < h; ++j) y[r * h + j] = x[r * h + j] * rstd[r] * w[j];
  }
}

template <class R>
void rms_norm_backward(const Values<R>& d_y, const Values<R>& x, const Values<R>& w, const Values<R>& rstd,
                       Values<R>& d_x, Values<R>& d_w, Size h, bool accumulate) {
  for (Size r = 0; r < rstd.size(); ++r) {
    R mean = 0;
    for (Size j = 0; j < h; ++j) mean += d_y[r * h + j] * w[j] * (x[r * h + j] * rstd[r]);
    mean /= static_cast<R>(h);
    for (Size j = 0; j < h; ++j) {
      const Size i = r * h + j;
      const R normed = x[i] * rstd[r], grad = rstd[r] * (d_y[i] * w[j] - normed * mean);
      d_w[j] += d_y[i] * normed;
      d_x[i] = accumulate ? d_x[i] + grad : grad;
    }
  }
}

template <class R>
void rope_table(const Values<R>& position, const Values<R>& inv_freq, Values<R>& cosines, Values<R>& sines,
                R magnitude) {
  for (Size r = 0; r < position.size(); ++r) {
    for (Size j = 0; j < inv_freq.size(); ++j) {
      const R angle = position[r] * inv_freq[j];
      cosines[r * inv_freq.size() + j] = std::cos(angle) * magnitude;
      sines[r * inv_freq.size() + j] = std::sin(angle) * magnitude;
    }
  }
}

template <class R>
void rope(Values<R>& x, const Values<R>& cosines, const Values<R>& sines, Size rows, Size heads, Size half,
          Size table_stride, bool inverse) {
  for (Size r = 0; r < rows; ++r) {
    for (Size head = 0; head < heads; ++head) {
      for (Size j = 0; j < half; ++j) {
        R& low = x[((r * heads + head) * 2) * half + j];
        R& high = x[((r * heads + head) * 2 + 1) * half + j];
        const Size entry = r * table_stride * half + j;
        const R a = low, b = high, c = cosines[entry], s = inverse ? -sines[entry] : sines[entry];
        low = a * c - b * s;
        high = b * c + a * s;
      }
    }
  }
}

template <class R>
void swiglu_forward(const Values<R>& gate, const Values<R>& up, Values<R>& y) {
  for (Size i = 0; i < y.size(); ++i) y[i] = gate[i] / (R(1) + std::exp(-gate[i])) * up[i];
}

template <class R>
void swiglu_backward(const Values<R>& d_y, const Values<R>& gate, const Values<R>& up, Values<R>& d_gate,
                     Values<R>& d_up) {
  for (Size i = 0; i < d_y.size(); ++i) {
    const R g = gate[i], sigma = R(1) / (R(1) + std::exp(-g));
    const R d_silu = sigma + g * sigma * (R(1) - sigma);
    const R gate_gradient = d_y[i] * up[i] * d_silu, up_gradient = d_y[i] * g * sigma;
    d_gate[i] = gate_gradient;
    d_up[i] = up_gradient;
  }
}

template <class R>
R sigmoid(R x) {
  return R(1) / (R(1) + std::exp(-x));
}

template <class R>
void silu_forward(const Values<R>& x, Values<R>& y) {
  for (Size i = 0; i < x.size(); ++i) y[i] = x[i] * sigmoid(x[i]);
}

template <class R>
void silu_backward(const Values<R>& d_y, const Values<R>& x, Values<R>& d_x) {
  for (Size i = 0; i < x.size(); ++i) {
    const R s = sigmoid(x[i]);
    d_x[i] = d_y[i] * (s + x[i] * s * (R(1) - s));
  }
}

template <class R>
void gate_forward(const Values<R>& logits, std::array<const Values<R>*, 3> o, Values<R>& out, Size heads, Size depth) {
  for (Size i = 0; i < out.size(); ++i) {
    const Size row = i / (heads * depth), head = i / depth % heads;
    out[i] = 0;
    for (Size b = 0; b < 3; ++b) out[i] += sigmoid(logits[(row * 3 + b) * heads + head]) * (*o[b])[i];
  }
}

template <class R>
void gate_backward(const Values<R>& d_out, const Values<R>& logits, std::array<const Values<R>*, 3> o,
                   Values<R>& d_logits, std::array<Values<R>*, 3> d_o, Size heads, Size depth) {
  for (Size g = 0; g < logits.size(); ++g) {
    const Size row = g / (3 * heads), b = g / heads % 3, head = g % heads;
    const R weight = sigmoid(logits[g]);
    R sum = 0;
    for (Size c = 0; c < depth; ++c) {
      const Size i = (row * heads + head) * depth + c;
      (*d_o[b])[i] = weight * d_out[i];
      sum += (*o[b])[i] * d_out[i];
    }
    d_logits[g] = sum * weight * (R(1) - weight);
  }
}

template <class R>
void embedding_forward(const Values<R>& token, const Values<R>& w, Values<R>& y, Size h) {
  for (Size r = 0; r < token.size(); ++r) {
    for (Size j = 0; j < h; ++j) y[r * h + j] = w[static_cast<Size>(token[r]) * h + j];
  }
}

template <class R>
void embedding_backward(const Values<R>& token, const Values<R>& d_y, Values<R>& d_w, Size h) {
  for (Size r = 0; r < token.size(); ++r) {
    for (Size j = 0; j < h; ++j) d_w[static_cast<Size>(token[r]) * h + j] += d_y[r * h + j];
  }
}

template <class R>
void cross_entropy(Values<R>& logits, const Values<R>& target, Values<R>& loss, Size vocab, R scale, bool gradient) {
  for (Size r = 0; r < target.size(); ++r) {
    R* x = &logits[r * vocab];
    loss[r] = 0;
    const bool counts = target[r] >= 0;
    R highest = x[0], sum = 0;
    for (Size i = 1; i < vocab; ++i) highest = std::max(highest, x[i]);
    for (Size i = 0; i < vocab; ++i) sum += std::exp(x[i] - highest);
    if (counts) loss[r] = std::log(sum) + highest - x[static_cast<Size>(target[r])];
    if (!gradient) continue;
    for (Size i = 0; i < vocab; ++i) {
      const R onehot = counts && i == static_cast<Size>(target[r]) ? R(1) : R(0);
      x[i] = counts ? (std::exp(x[i] - highest) / sum - onehot) * scale : R(0);
    }
  }
}

// 1 where the target's logit is greater than every other.
template <class R>
void target_is_greatest(const Values<R>& logits, const Values<R>& target, Values<R>& correct, Size vocab) {
  for (Size r = 0; r < target.size(); ++r) {
    correct[r] = target[r] >= 0 ? R(1) : R(0);
    for (Size i = 0; target[r] >= 0 && i < vocab; ++i) {
      const Size wanted = static_cast<Size>(target[r]);
      if (i != wanted && logits[r * vocab + i] >= logits[r * vocab + wanted]) correct[r] = 0;
    }
  }
}

struct AdamWNumbers {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  int step = 1;
};

template <class R>
void adamw(Values<R>& param, Values<R>& m, Values<R>& v, const Values<R>& grad, R clip, const AdamWNumbers& n) {
  if (!std::isfinite(clip)) return;
  const R lr = static_cast<R>(n.lr), beta1 = static_cast<R>(n.beta1), beta2 = static_cast<R>(n.beta2);
  for (Size i = 0; i < param.size(); ++i) {
    const R g = grad[i] * clip;
    m[i] = beta1 * m[i] + (R(1) - beta1) * g;
    v[i] = beta2 * v[i] + (R(1) - beta2) * g * g;
    const R m_hat = m[i] / (R(1) - static_cast<R>(std::pow(beta1, static_cast<R>(n.step))));
    const R v_hat = v[i] / (R(1) - static_cast<R>(std::pow(beta2, static_cast<R>(n.step))));
    param[i] = param[i] * (R(1) - lr * static_cast<R>(n.weight_decay)) -
               lr * m_hat / (std::sqrt(v_hat) + static_cast<R>(n.eps));
  }
}

// x rounded to nearest even with `digits` significant bits and exponents as in IEEE formats down to 2^min_exponent.
inline long double round_to(long double x, int digits, int min_exponent, long double largest) {
  if (!std::isfinite(x) || x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);  // |x| in [2^(exponent-1), 2^exponent)
  const int quantum = std::max(exponent - digits, min_exponent - digits + 1);
  const long double y = std::ldexp(std::nearbyint(std::ldexp(x, -quantum)), quantum);
  return std::fabs(y) > largest ? std::copysign(std::numeric_limits<long double>::infinity(), y) : y;
}

inline long double round_to_bf16(long double x) { return round_to(x, 8, -126, 0x1.fep127L); }

}  // namespace annulus::reference
