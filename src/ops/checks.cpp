#include "ops/checks.h"

#include <cstdint>
#include <initializer_list>

namespace annulus::ops {
namespace {

constexpr std::string_view device_name(DeviceKind device) { return device == DeviceKind::cpu ? "cpu" : "cuda"; }

class Checker {
 public:
  Checker(const Context& ctx, const char* operation) : ctx_(ctx), operation_(operation) {}

  // The tensor's rank, device and memory.
  void present(const char* name, const TensorView& x, int rank) const {
    if (x.shape.rank() != rank) fail(name, x, fmt::format("{} dimension{}", rank, rank == 1 ? "" : "s"));
    on_device(name, x);
  }

  void on_device(const char* name, const TensorView& x) const {
    if (x.device != ctx_.device) fail(name, x, fmt::format("a tensor on {}", device_name(ctx_.device)));
    if (!ctx_.planning && !x.data && x.numel() > 0) fail(name, x, "memory (is its arena committed?)");
  }

  void shape(const char* name, const TensorView& x, const Shape& wanted) const {
    if (x.shape != wanted) fail(name, x, wanted.str());
    on_device(name, x);
  }

  void one_of(const char* name, const TensorView& x, std::initializer_list<DType> wanted) const {
    for (const DType dtype : wanted) {
      if (x.dtype == dtype) return;
    }
    std::string names;
    for (const DType dtype : wanted) names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
    fail(name, x, names);
  }

  void typed(const char* name, const TensorView& x, DType wanted) const { one_of(name, x, {wanted}); }

  // A working type that the device computes in.
  void working(const char* name, const TensorView& x) const {
    if (ctx_.device == DeviceKind::cpu && x.dtype == DType::bf16) {
      fail(name, x, "float32 or float64: the CPU does not compute in bfloat16");
    }
    one_of(name, x, {DType::f32, DType::f64, DType::bf16});
  }

  void tensor(const char* name, const TensorView& x, DType dtype, const Shape& wanted) const {
    shape(name, x, wanted);
    typed(name, x, dtype);
  }

  // An output apart from everything it must not overwrite.
  struct Named {
    const char* name;
    const TensorView& x;
  };
  void apart(const char* name, const TensorView& out, std::initializer_list<Named> others) const {
    for (const auto& other : others) {
      if (overlap(out, other.x)) fail(name, out, fmt::format("memory apart from {}'s", other.name));
    }
  }
  // An output that may be exactly one of `others`, and otherwise is apart from them.
  void same_or_apart(const char* name, const TensorView& out, std::initializer_list<Named> others) const {
    for (const auto& other : others) {
      if (out.data != other.x.data || out.bytes() != other.x.bytes()) apart(name, out, {other});
    }
  }

  [[noreturn]] void fail(const char* name, const TensorView& x, std::string_view expected) const {
    throw Error(fmt::format("operation {}: {} is {} {} on {}, expected {}", operation_, name, name_of(x.dtype),
                            x.shape.str(), device_name(x.device), expected));
  }

 private:
  static bool overlap(const TensorView& a, const TensorView& b) {
    if (!a.data || !b.data || a.bytes() == 0 || b.bytes() == 0) return false;
    const auto a0 = reinterpret_cast<std::uintptr_t>(a.data), b0 = reinterpret_cast<std::uintptr_t>(b.data);
    return a0 < b0 + static_cast<std::uintptr_t>(b.bytes()) && b0 < a0 + static_cast<std::uintptr_t>(a.bytes());
  }

  const Context& ctx_;
  const char* operation_;
};

bool is_absent(const TensorView& x) { return x.data == nullptr && x.shape.rank() == 0; }

template <class Args>
void check_reduction(const Context& ctx, const char* operation, const Args& a) {
  const Checker c(ctx, operation);
  c.on_device("x", a.x);
  c.working("x", a.x);
  c.tensor("result", a.result, DType::f64, {1});
  c.apart("result", a.result, {{"x", a.x}});
}

}  // namespace

void check(const Context& ctx, const Fill& a) {
  const Checker c(ctx, "fill");
  c.on_device("y", a.y);
  if (a.y.dtype == DType::bf16) c.working("y", a.y);
}

void check(const Context& ctx, const Cast& a) {
  const Checker c(ctx, "cast");
  c.on_device("x", a.x);
  c.on_device("y", a.y);
  if (a.x.dtype == DType::i32) {
    c.typed("y", a.y, DType::i32);
  } else {
    c.one_of("x", a.x, {DType::f32, DType::f64, DType::bf16});
    c.one_of("y", a.y, {DType::f32, DType::f64, DType::bf16});
  }
  if (a.x.numel() != a.y.numel()) c.fail("y", a.y, fmt::format("{} elements, as x {}", a.x.numel(), a.x.shape.str()));
  c.apart("y", a.y, {{"x", a.x}});
}

void check(const Context& ctx, const Add& a) {
  const Checker c(ctx, "add");
  c.on_device("a", a.a);
  c.working("a", a.a);
  c.tensor("b", a.b, a.a.dtype, a.a.shape);
  c.tensor("y", a.y, a.a.dtype, a.a.shape);
  c.same_or_apart("y", a.y, {{"a", a.a}, {"b", a.b}});
}

void check(const Context& ctx, const Scale& a) {
  const Checker c(ctx, "scale");
  c.on_device("y", a.y);
  c.working("y", a.y);
}

void check(const Context& ctx, const Matmul& a) {
  const Checker c(ctx, "matmul");
  c.present("a", a.a, 2);
  c.working("a", a.a);
  c.present("b", a.b, 2);
  c.typed("b", a.b, a.a.dtype);
  const auto m = a.a.dim(a.transpose_a ? 1 : 0), k = a.a.dim(a.transpose_a ? 0 : 1);
  const auto n = a.b.dim(a.transpose_b ? 0 : 1);
  c.shape("b", a.b, a.transpose_b ? Shape{n, k} : Shape{k, n});
  c.shape("c", a.c, {m, n});
  c.one_of("c", a.c, {a.a.dtype, stat_type(a.a.dtype)});
  c.apart("c", a.c, {{"a", a.a}, {"b", a.b}});
}

void check(const Context& ctx, const AddBias& a) {
  const Checker c(ctx, "add_bias");
  c.present("x", a.x, 2);
  c.working("x", a.x);
  c.tensor("bias", a.bias, a.x.dtype, {a.x.dim(1)});
  c.apart("x", a.x, {{"bias", a.bias}});
}

void check(const Context& ctx, const AddBiasBackward& a) {
  const Checker c(ctx, "add_bias_backward");
  c.present("d_y", a.d_y, 2);
  c.working("d_y", a.d_y);
  c.tensor("d_bias", a.d_bias, stat_type(a.d_y.dtype), {a.d_y.dim(1)});
  c.apart("d_bias", a.d_bias, {{"d_y", a.d_y}});
}

void check(const Context& ctx, const RmsNormForward& a) {
  const Checker c(ctx, "rms_norm_forward");
  c.present("x", a.x, 2);
  c.working("x", a.x);
  c.tensor("w", a.w, a.x.dtype, {a.x.dim(1)});
  c.tensor("y", a.y, a.x.dtype, a.x.shape);
  c.tensor("rstd", a.rstd, stat_type(a.x.dtype), {a.x.dim(0)});
  c.same_or_apart("y", a.y, {{"x", a.x}});
  c.apart("y", a.y, {{"w", a.w}, {"rstd", a.rstd}});
  c.apart("rstd", a.rstd, {{"x", a.x}, {"w", a.w}});
}

void check(const Context& ctx, const RmsNormBackward& a) {
  const Checker c(ctx, "rms_norm_backward");
  c.present("x", a.x, 2);
  c.working("x", a.x);
  const DType stat = stat_type(a.x.dtype);
  c.tensor("d_y", a.d_y, a.x.dtype, a.x.shape);
  c.tensor("w", a.w, a.x.dtype, {a.x.dim(1)});
  c.tensor("rstd", a.rstd, stat, {a.x.dim(0)});
  c.tensor("d_x", a.d_x, a.x.dtype, a.x.shape);
  c.tensor("d_w", a.d_w, stat, {a.x.dim(1)});
  c.same_or_apart("d_x", a.d_x, {{"d_y", a.d_y}});
  c.apart("d_x", a.d_x, {{"x", a.x}, {"w", a.w}, {"rstd", a.rstd}, {"d_w", a.d_w}});
  c.apart("d_w", a.d_w, {{"d_y", a.d_y}, {"x", a.x}, {"w", a.w}, {"rstd", a.rstd}});
}

void check(const Context& ctx, const RopeTable& a) {
  const Checker c(ctx, "rope_table");
  c.present("position", a.position, 1);
  c.typed("position", a.position, DType::i32);
  c.present("inv_freq", a.inv_freq, 1);
  c.one_of("inv_freq", a.inv_freq, {DType::f32, DType::f64});
  const Shape table{a.position.dim(0), a.inv_freq.dim(0)};
  c.tensor("cos", a.cos, a.inv_freq.dtype, table);
  c.tensor("sin", a.sin, a.inv_freq.dtype, table);
  c.apart("cos", a.cos, {{"sin", a.sin}, {"position", a.position}, {"inv_freq", a.inv_freq}});
  c.apart("sin", a.sin, {{"position", a.position}, {"inv_freq", a.inv_freq}});
}

void check(const Context& ctx, const Rope& a) {
  const Checker c(ctx, "rope");
  c.present("x", a.x, 3);
  c.working("x", a.x);
  if (a.x.dim(2) % 2 != 0) c.fail("x", a.x, "an even head dimension");
  ANNULUS_CHECK(a.table_stride >= 1, "operation rope: table_stride {}, expected >= 1", a.table_stride);
  c.present("cos", a.cos, 2);
  const std::int64_t least = a.x.dim(0) > 0 ? (a.x.dim(0) - 1) * a.table_stride + 1 : 0;
  if (a.cos.dim(0) != least)
    c.fail("cos", a.cos, fmt::format("{} rows for {} rows of x at stride {}", least, a.x.dim(0), a.table_stride));
  const Shape table{a.cos.dim(0), a.x.dim(2) / 2};
  c.tensor("cos", a.cos, stat_type(a.x.dtype), table);
  c.tensor("sin", a.sin, stat_type(a.x.dtype), table);
  c.apart("x", a.x, {{"cos", a.cos}, {"sin", a.sin}});
}

void check(const Context& ctx, const SwigluForward& a) {
  const Checker c(ctx, "swiglu_forward");
  c.on_device("gate", a.gate);
  c.working("gate", a.gate);
  c.tensor("up", a.up, a.gate.dtype, a.gate.shape);
  c.tensor("y", a.y, a.gate.dtype, a.gate.shape);
  c.same_or_apart("y", a.y, {{"gate", a.gate}, {"up", a.up}});
}

void check(const Context& ctx, const SwigluBackward& a) {
  const Checker c(ctx, "swiglu_backward");
  c.on_device("gate", a.gate);
  c.working("gate", a.gate);
  c.tensor("up", a.up, a.gate.dtype, a.gate.shape);
  c.tensor("d_y", a.d_y, a.gate.dtype, a.gate.shape);
  c.tensor("d_gate", a.d_gate, a.gate.dtype, a.gate.shape);
  c.tensor("d_up", a.d_up, a.gate.dtype, a.gate.shape);
  c.same_or_apart("d_gate", a.d_gate, {{"gate", a.gate}});
  c.apart("d_gate", a.d_gate, {{"up", a.up}, {"d_y", a.d_y}, {"d_up", a.d_up}});
  c.same_or_apart("d_up", a.d_up, {{"up", a.up}});
  c.apart("d_up", a.d_up, {{"gate", a.gate}, {"d_y", a.d_y}});
}

void check(const Context& ctx, const SiluForward& a) {
  const Checker c(ctx, "silu_forward");
  c.on_device("x", a.x);
  c.working("x", a.x);
  c.tensor("y", a.y, a.x.dtype, a.x.shape);
  c.same_or_apart("y", a.y, {{"x", a.x}});
}

void check(const Context& ctx, const SiluBackward& a) {
  const Checker c(ctx, "silu_backward");
  c.on_device("x", a.x);
  c.working("x", a.x);
  c.tensor("d_y", a.d_y, a.x.dtype, a.x.shape);
  c.tensor("d_x", a.d_x, a.x.dtype, a.x.shape);
  c.same_or_apart("d_x", a.d_x, {{"x", a.x}, {"d_y", a.d_y}});
}

void check(const Context& ctx, const GateForward& a) {
  const Checker c(ctx, "gate_forward");
  c.present("out", a.out, 3);
  c.working("out", a.out);
  c.tensor("logits", a.logits, a.out.dtype, {a.out.dim(0), 3 * a.out.dim(1)});
  c.apart("out", a.out, {{"logits", a.logits}});
  for (const TensorView& o : a.o) {
    c.tensor("o", o, a.out.dtype, a.out.shape);
    c.apart("out", a.out, {{"o", o}});
  }
}

void check(const Context& ctx, const GateBackward& a) {
  const Checker c(ctx, "gate_backward");
  c.present("d_out", a.d_out, 3);
  c.working("d_out", a.d_out);
  c.tensor("logits", a.logits, a.d_out.dtype, {a.d_out.dim(0), 3 * a.d_out.dim(1)});
  c.tensor("d_logits", a.d_logits, a.d_out.dtype, a.logits.shape);
  c.apart("d_logits", a.d_logits, {{"logits", a.logits}, {"d_out", a.d_out}});
  for (int b = 0; b < 3; ++b) {
    c.tensor("o", a.o[b], a.d_out.dtype, a.d_out.shape);
    c.tensor("d_o", a.d_o[b], a.d_out.dtype, a.d_out.shape);
    c.apart("d_o", a.d_o[b],
            {{"d_out", a.d_out}, {"logits", a.logits}, {"d_logits", a.d_logits}, {"d_o", a.d_o[(b + 1) % 3]}});
    for (const TensorView& o : a.o) c.apart("d_o", a.d_o[b], {{"o", o}});
    c.apart("d_logits", a.d_logits, {{"o", a.o[b]}});
  }
}

void check(const Context& ctx, const EmbeddingForward& a) {
  const Checker c(ctx, "embedding_forward");
  c.present("token", a.token, 1);
  c.typed("token", a.token, DType::i32);
  c.present("w", a.w, 2);
  c.working("w", a.w);
  c.tensor("y", a.y, a.w.dtype, {a.token.dim(0), a.w.dim(1)});
  c.apart("y", a.y, {{"token", a.token}, {"w", a.w}});
}

void check(const Context& ctx, const EmbeddingBackward& a) {
  const Checker c(ctx, "embedding_backward");
  c.present("token", a.token, 1);
  c.typed("token", a.token, DType::i32);
  c.present("d_y", a.d_y, 2);
  c.working("d_y", a.d_y);
  c.present("d_w", a.d_w, 2);
  c.typed("d_w", a.d_w, stat_type(a.d_y.dtype));
  c.shape("d_y", a.d_y, {a.token.dim(0), a.d_w.dim(1)});
  c.apart("d_w", a.d_w, {{"token", a.token}, {"d_y", a.d_y}});
}

void check(const Context& ctx, const CrossEntropy& a) {
  const Checker c(ctx, "cross_entropy");
  c.present("logits", a.logits, 2);
  c.working("logits", a.logits);
  c.tensor("target", a.target, DType::i32, {a.logits.dim(0)});
  c.tensor("loss", a.loss, stat_type(a.logits.dtype), {a.logits.dim(0)});
  c.apart("loss", a.loss, {{"logits", a.logits}, {"target", a.target}});
  if (!is_absent(a.correct)) {
    c.tensor("correct", a.correct, DType::i32, {a.logits.dim(0)});
    c.apart("correct", a.correct, {{"logits", a.logits}, {"target", a.target}, {"loss", a.loss}});
  }
  c.apart("logits", a.logits, {{"target", a.target}});
}

void check(const Context& ctx, const Sum& a) { check_reduction(ctx, "sum", a); }
void check(const Context& ctx, const SumSquares& a) { check_reduction(ctx, "sum_squares", a); }

void check(const Context& ctx, const ClipFactor& a) {
  const Checker c(ctx, "clip_factor");
  c.tensor("sum_squares", a.sum_squares, DType::f64, {1});
  c.tensor("loss", a.loss, DType::f64, {1});
  c.tensor("norm", a.norm, DType::f64, {1});
  c.tensor("factor", a.factor, DType::f64, {1});
  c.apart("norm", a.norm, {{"sum_squares", a.sum_squares}, {"loss", a.loss}, {"factor", a.factor}});
  c.apart("factor", a.factor, {{"sum_squares", a.sum_squares}, {"loss", a.loss}});
}

void check(const Context& ctx, const AdamW& a) {
  const Checker c(ctx, "adamw");
  c.on_device("param", a.param);
  c.working("param", a.param);
  const DType stat = stat_type(a.param.dtype);
  c.tensor("m", a.m, stat, a.param.shape);
  c.tensor("v", a.v, stat, a.param.shape);
  c.tensor("grad", a.grad, stat, a.param.shape);
  c.tensor("clip_factor", a.clip_factor, DType::f64, {1});
  if (!is_absent(a.master)) {
    c.tensor("master", a.master, stat, a.param.shape);
    c.same_or_apart("master", a.master, {{"param", a.param}});
    c.apart("master", a.master, {{"m", a.m}, {"v", a.v}, {"grad", a.grad}});
  } else if (a.param.dtype != stat) {
    c.fail("master", a.master, "the fp32 masters of bfloat16 parameters");
  }
  c.apart("param", a.param, {{"m", a.m}, {"v", a.v}, {"grad", a.grad}});
  c.apart("m", a.m, {{"v", a.v}, {"grad", a.grad}});
  c.apart("v", a.v, {{"grad", a.grad}});
}

}  // namespace annulus::ops
