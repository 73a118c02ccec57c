// Backward operations against central differences of the forward operations, in double: for y = f(x) and a fixed random
// r, the gradient of Σ y∘r. The fourth-order stencil with h = 1e-3 leaves about 1e-12 of truncation and rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "core/rng.h"
#include "ops/ops.h"

namespace annulus::testing {
namespace {

class Tensor {  // owns double data
 public:
  Tensor(const Shape& shape, const char* name) : shape_(shape), values_(static_cast<std::size_t>(shape.numel())) {
    const CounterRng rng(3, name);
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = rng.normal(i);
  }
  explicit Tensor(const Shape& shape, double value = 0)
      : shape_(shape), values_(static_cast<std::size_t>(shape.numel()), value) {}

  TensorView view() { return host_view(values_.data(), shape_); }
  std::vector<double>& values() { return values_; }

 private:
  Shape shape_;
  std::vector<double> values_;
};

struct Gradients : ::testing::Test {
  Gradients() : scratch("scratch", DeviceKind::cpu) {
    scratch.allocate("any operation here", DType::u8, {1 << 20});
    scratch.commit();
    ctx.scratch = &scratch;
  }

  // `loss` reads x; `gradient` is what the backward operation made of it.
  static void expect_gradient(Tensor& x, Tensor& gradient, const std::function<double()>& loss) {
    constexpr double h = 1e-3;
    double largest = 0;
    for (const double g : gradient.values()) largest = std::max(largest, std::abs(g));
    ASSERT_GT(largest, 0);
    for (std::size_t i = 0; i < x.values().size(); ++i) {
      const double kept = x.values()[i];
      const auto at = [&](double shift) {
        x.values()[i] = kept + shift;
        return loss();
      };
      const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      x.values()[i] = kept;
      EXPECT_NEAR(gradient.values()[i], difference, 1e-10 * std::max(1.0, largest)) << "element " << i;
    }
  }

  static double dot(Tensor& y, Tensor& r) {
    double sum = 0;
    for (std::size_t i = 0; i < y.values().size(); ++i) sum += y.values()[i] * r.values()[i];
    return sum;
  }

  Context ctx;
  Arena scratch;
};

TEST_F(Gradients, Matmul) {
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      const std::int64_t m = 4, n = 3, k = 5;
      Tensor a(ta ? Shape{k, m} : Shape{m, k}, "a"), b(tb ? Shape{n, k} : Shape{k, n}, "b"), c({m, n}), r({m, n}, "r");
      Tensor d_a(ta ? Shape{k, m} : Shape{m, k}), d_b(tb ? Shape{n, k} : Shape{k, n});
      const auto loss = [&] {
        ops::matmul(ctx, {a.view(), b.view(), c.view(), ta, tb});
        return dot(c, r);
      };
      // d_a = r · bᵀ and d_b = aᵀ · r, and their transposes where a or b is stored transposed.
      if (ta) ops::matmul(ctx, {b.view(), r.view(), d_a.view(), tb, true});
      else ops::matmul(ctx, {r.view(), b.view(), d_a.view(), false, !tb});
      if (tb) ops::matmul(ctx, {r.view(), a.view(), d_b.view(), true, ta});
      else ops::matmul(ctx, {a.view(), r.view(), d_b.view(), !ta, false});
      expect_gradient(a, d_a, loss);
      expect_gradient(b, d_b, loss);
    }
  }
}

TEST_F(Gradients, AddBias) {
  Tensor x({5, 3}, "x"), bias({3}, "bias"), y({5, 3}), r({5, 3}, "r"), d_bias({3});
  const auto loss = [&] {
    ops::cast(ctx, {x.view(), y.view()});
    ops::add_bias(ctx, {y.view(), bias.view()});
    return dot(y, r);
  };
  ops::add_bias_backward(ctx, {r.view(), d_bias.view()});
  expect_gradient(bias, d_bias, loss);
  expect_gradient(x, r, loss);
}

TEST_F(Gradients, RmsNorm) {
  Tensor x({5, 7}, "x"), w({7}, "w"), y({5, 7}), rstd({5}), r({5, 7}, "r"), d_x({5, 7}, NAN), d_w({7});
  const auto loss = [&] {
    ops::rms_norm_forward(ctx, {x.view(), w.view(), y.view(), rstd.view(), 0.25});
    return dot(y, r);
  };
  loss();
  ops::rms_norm_backward(ctx, {r.view(), x.view(), w.view(), rstd.view(), d_x.view(), d_w.view()});
  expect_gradient(x, d_x, loss);
  expect_gradient(w, d_w, loss);
}

TEST_F(Gradients, Rope) {
  Tensor x({3, 2, 6}, "x"), y({3, 2, 6}), r({3, 2, 6}, "r"), d_x({3, 2, 6}), cosines({3, 3}), sines({3, 3});
  Tensor inv_freq({3}, "f");
  std::vector<std::int32_t> position{0, 5, 77};
  ops::rope_table(ctx, {host_view(position.data(), {3}), inv_freq.view(), cosines.view(), sines.view(), 1.5});
  const auto loss = [&] {
    ops::cast(ctx, {x.view(), y.view()});
    ops::rope(ctx, {y.view(), cosines.view(), sines.view(), false});
    return dot(y, r);
  };
  ops::cast(ctx, {r.view(), d_x.view()});
  ops::rope(ctx, {d_x.view(), cosines.view(), sines.view(), true});
  expect_gradient(x, d_x, loss);
}

TEST_F(Gradients, Swiglu) {
  Tensor gate({4, 5}, "gate"), up({4, 5}, "up"), y({4, 5}), r({4, 5}, "r"), d_gate({4, 5}), d_up({4, 5});
  const auto loss = [&] {
    ops::swiglu_forward(ctx, {gate.view(), up.view(), y.view()});
    return dot(y, r);
  };
  ops::swiglu_backward(ctx, {r.view(), gate.view(), up.view(), d_gate.view(), d_up.view()});
  expect_gradient(gate, d_gate, loss);
  expect_gradient(up, d_up, loss);
}

TEST_F(Gradients, RopeAtAStride) {
  Tensor x({3, 2, 6}, "x"), y({3, 2, 6}), r({3, 2, 6}, "r"), d_x({3, 2, 6}), cosines({7, 3}, "c"), sines({7, 3}, "s");
  const auto rotate = [&](Tensor& from, Tensor& to, bool inverse) {
    ops::cast(ctx, {from.view(), to.view()});
    ops::rope(ctx, {to.view(), cosines.view(), sines.view(), inverse, 3});
  };
  rotate(r, d_x, true);
  expect_gradient(x, d_x, [&] {
    rotate(x, y, false);
    return dot(y, r);
  });
}

TEST_F(Gradients, Silu) {
  Tensor x({4, 5}, "x"), y({4, 5}), r({4, 5}, "r"), d_x({4, 5}, NAN);
  const auto loss = [&] {
    ops::silu_forward(ctx, {x.view(), y.view()});
    return dot(y, r);
  };
  ops::silu_backward(ctx, {r.view(), x.view(), d_x.view()});
  expect_gradient(x, d_x, loss);
}

TEST_F(Gradients, Gate) {
  const Shape rows{3, 2, 5};
  Tensor logits({3, 6}, "logits"), o[3]{{rows, "cmp"}, {rows, "slc"}, {rows, "win"}}, y(rows), r(rows, "r");
  Tensor d_logits({3, 6}, NAN), d_o[3]{Tensor(rows, NAN), Tensor(rows, NAN), Tensor(rows, NAN)};
  const auto loss = [&] {
    ops::gate_forward(ctx, {.logits = logits.view(), .o = {o[0].view(), o[1].view(), o[2].view()}, .out = y.view()});
    return dot(y, r);
  };
  ops::gate_backward(ctx, {.d_out = r.view(),
                           .logits = logits.view(),
                           .o = {o[0].view(), o[1].view(), o[2].view()},
                           .d_logits = d_logits.view(),
                           .d_o = {d_o[0].view(), d_o[1].view(), d_o[2].view()}});
  expect_gradient(logits, d_logits, loss);
  for (int b = 0; b < 3; ++b) expect_gradient(o[b], d_o[b], loss);
}

TEST_F(Gradients, Embedding) {
  Tensor w({4, 3}, "w"), y({6, 3}), r({6, 3}, "r"), d_w({4, 3});
  std::vector<std::int32_t> token{2, 0, 2, 1, 2, 0};  // token 3 does not occur: gradient 0
  const auto loss = [&] {
    ops::embedding_forward(ctx, {host_view(token.data(), {6}), w.view(), y.view()});
    return dot(y, r);
  };
  ops::embedding_backward(ctx, {host_view(token.data(), {6}), r.view(), d_w.view()});
  expect_gradient(w, d_w, loss);
}

TEST_F(Gradients, CrossEntropy) {
  Tensor logits({4, 5}, "logits"), worked({4, 5}), loss_rows({4}), r({4}, 0.25);
  std::vector<std::int32_t> target{3, -1, 0, 4};
  const auto run = [&](bool gradient) {
    ops::cast(ctx, {logits.view(), worked.view()});
    ops::cross_entropy(ctx, {.logits = worked.view(),
                             .target = host_view(target.data(), {4}),
                             .loss = loss_rows.view(),
                             .scale = 0.25,
                             .gradient = gradient});
    return dot(loss_rows, r);
  };
  run(true);
  Tensor gradient({4, 5});
  gradient.values() = worked.values();
  expect_gradient(logits, gradient, [&] { return run(false); });
}

}  // namespace
}  // namespace annulus::testing
