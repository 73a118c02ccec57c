// Runs the band operations on guarded, poisoned memory of a device and compares with the naive reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "attention/band.h"
#include "core/rng.h"
#include "reference/attention.h"
#include "support/device.h"

namespace annulus::testing {

using reference::BandInput;
using reference::BandOutput;
using reference::BandSize;

struct BandCase {
  std::string name;
  BandSize size;
  std::vector<std::int32_t> first, last;  // [B, T]
};

// Shapes (odd, G = 1 … Hq, B = 2, T ≠ S) times kinds of bounds.
std::vector<BandCase> band_cases();

// Normal random inputs; scale is sharpness/√D.
BandInput<double> random_input(const BandCase& band, std::uint64_t seed, double sharpness = 1);

template <class To, class From>
std::vector<To> convert(const std::vector<From>& from) {
  return std::vector<To>(from.begin(), from.end());
}

template <class To, class From>
BandInput<To> convert(const BandInput<From>& in) {
  return {in.size,  in.scale, convert<To>(in.q), convert<To>(in.k), convert<To>(in.v), convert<To>(in.d_o),
          in.first, in.last};
}

template <class T>
struct BandState {
  std::vector<T> o, lse;
};

// Tensors of one call: what `fill` gives is there, the rest is NaN.
template <class T>
class BandMemory {
 public:
  explicit BandMemory(const BandSize& size) : size_(size), device_(DeviceKind::cpu), tensors_(device_) {}

  // `shift` elements past an aligned address: kernels must not rely on alignment.
  std::size_t add(DType dtype, const Shape& shape, std::int64_t shift) { return tensors_.add(dtype, shape, shift); }
  std::size_t queries() { return add(dtype_of<T>(), {size_.batch, size_.queries, size_.query_heads, size_.depth}, 1); }
  std::size_t keys() { return add(dtype_of<T>(), {size_.batch, size_.keys, size_.kv_heads, size_.depth}, 3); }
  std::size_t statistics() { return add(dtype_of<T>(), {size_.batch, size_.query_heads, size_.queries}, 1); }
  std::size_t bounds() { return add(DType::i32, {size_.batch, size_.queries}, 1); }

  template <class U>
  void fill(std::size_t tensor, const std::vector<U>& values) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size() * sizeof(U)), tensors_.bytes(tensor));
    if (!values.empty()) std::memcpy(tensors_.host(tensor), values.data(), values.size() * sizeof(U));
  }
  std::vector<T> read(std::size_t tensor) {
    std::vector<T> values(static_cast<std::size_t>(tensors_.bytes(tensor)) / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), tensors_.host(tensor), values.size() * sizeof(T));
    return values;
  }
  GuardedTensors& tensors() { return tensors_; }
  TestDevice& device() { return device_; }
  TensorView view(std::size_t tensor) const { return tensors_.view(tensor); }

  // Plans, runs with exactly the planned scratch, and checks that nothing was written outside.
  void run(const std::function<void(Context&)>& operation) {
    tensors_.upload();
    device_.plan_scratch([&] { operation(device_.context()); });
    operation(device_.context());
    tensors_.download();
    EXPECT_EQ(tensors_.check_guards(), "");
  }

 private:
  BandSize size_;
  TestDevice device_;
  GuardedTensors tensors_;
};

// band_forward on top of `state` (or of nothing). With `out`, also the finished output, in memory of its own.
template <class T>
void run_forward(const BandInput<T>& in, BandState<T>& state, bool has_state, std::vector<T>* out = nullptr) {
  BandMemory<T> memory(in.size);
  const auto q = memory.queries(), k = memory.keys(), v = memory.keys(), first = memory.bounds(),
             last = memory.bounds();
  const auto o = memory.queries(), lse = memory.statistics(), result = memory.queries();
  memory.tensors().commit();
  memory.fill(q, in.q);
  memory.fill(k, in.k);
  memory.fill(v, in.v);
  memory.fill(first, in.first);
  memory.fill(last, in.last);
  if (has_state) {
    memory.fill(o, state.o);
    memory.fill(lse, state.lse);
  }
  memory.run([&](Context& ctx) {
    attention::band_forward(ctx, {.q = memory.view(q),
                                  .k = memory.view(k),
                                  .v = memory.view(v),
                                  .first = memory.view(first),
                                  .last = memory.view(last),
                                  .o = memory.view(o),
                                  .lse = memory.view(lse),
                                  .has_state = has_state,
                                  .out = out ? memory.view(result) : TensorView{},
                                  .scale = in.scale});
  });
  state = {memory.read(o), memory.read(lse)};
  if (out) *out = memory.read(result);
}

// Adds into result.d_q, d_k, d_v; reads its lse and delta.
template <class T>
void run_backward(const BandInput<T>& in, BandOutput<T>& result) {
  BandMemory<T> memory(in.size);
  const auto q = memory.queries(), k = memory.keys(), v = memory.keys(), first = memory.bounds(),
             last = memory.bounds();
  const auto d_o = memory.queries(), lse = memory.statistics(), delta = memory.statistics();
  const auto d_q = memory.queries(), d_k = memory.keys(), d_v = memory.keys();
  memory.tensors().commit();
  memory.fill(q, in.q);
  memory.fill(k, in.k);
  memory.fill(v, in.v);
  memory.fill(first, in.first);
  memory.fill(last, in.last);
  memory.fill(d_o, in.d_o);
  memory.fill(lse, result.lse);
  memory.fill(delta, result.delta);
  memory.fill(d_q, result.d_q);
  memory.fill(d_k, result.d_k);
  memory.fill(d_v, result.d_v);
  memory.run([&](Context& ctx) {
    attention::band_backward(ctx, {.q = memory.view(q),
                                   .k = memory.view(k),
                                   .v = memory.view(v),
                                   .first = memory.view(first),
                                   .last = memory.view(last),
                                   .d_o = memory.view(d_o),
                                   .lse = memory.view(lse),
                                   .delta = memory.view(delta),
                                   .d_q = memory.view(d_q),
                                   .d_k = memory.view(d_k),
                                   .d_v = memory.view(d_v),
                                   .scale = in.scale});
  });
  result.d_q = memory.read(d_q);
  result.d_k = memory.read(d_k);
  result.d_v = memory.read(d_v);
}

template <class T>
std::vector<T> run_delta(const BandInput<T>& in, const std::vector<T>& output) {
  BandMemory<T> memory(in.size);
  const auto d_o = memory.queries(), o = memory.queries(), delta = memory.statistics();
  memory.tensors().commit();
  memory.fill(d_o, in.d_o);
  memory.fill(o, output);
  memory.run([&](Context& ctx) {
    attention::band_delta(ctx, {.d_o = memory.view(d_o), .o = memory.view(o), .delta = memory.view(delta)});
  });
  return memory.read(delta);
}

// One call over all keys: output, statistics, gradients from zero.
template <class T>
BandOutput<T> run_band(const BandInput<T>& in) {
  BandState<T> state;
  run_forward(in, state, false);
  BandOutput<T> result{state.o, state.lse, run_delta(in, state.o), {}, {}, {}};
  result.d_q.assign(in.q.size(), 0);
  result.d_k.assign(in.k.size(), 0);
  result.d_v.assign(in.v.size(), 0);
  run_backward(in, result);
  return result;
}

template <class T>
struct NamedTensor {
  const char* name;
  std::vector<T> BandOutput<T>::*values;
};
template <class T>
inline const NamedTensor<T> kBandOutputs[] = {{"o", &BandOutput<T>::o},         {"lse", &BandOutput<T>::lse},
                                              {"delta", &BandOutput<T>::delta}, {"d_q", &BandOutput<T>::d_q},
                                              {"d_k", &BandOutput<T>::d_k},     {"d_v", &BandOutput<T>::d_v}};

// max |a − b|; equal infinities differ by 0, and a NaN or an infinity on one side only gives +∞.
template <class A>
double max_error(const std::vector<A>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = a[i], error = std::abs(x - b[i]);
    if (x == b[i]) continue;
    if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, error);
  }
  return worst;
}

inline double max_finite(const std::vector<double>& x) {
  double largest = 0;
  for (const double e : x) largest = std::isfinite(e) ? std::max(largest, std::abs(e)) : largest;
  return largest;
}

template <class A>
double rms_error(const std::vector<A>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (a[i] != b[i]) sum += (a[i] - b[i]) * (a[i] - b[i]);
  }
  return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(b.size(), 1)));
}

inline double rms(const std::vector<double>& x) {
  std::vector<double> finite;
  for (const double e : x) finite.push_back(std::isfinite(e) ? e : 0);
  return rms_error(finite, std::vector<double>(x.size(), 0.0));
}

// Size of the terms that cancel in a tensor: their rounding is an error even where the sum is small, and where it is
// mathematically zero; the naive order of sums may cancel exactly there.
struct Condition {
  double maximum = 0, rms = 0;
};

// fp64: a relative bound. fp32: maximum and root mean square at most twice those of the naive fp32 implementation, and
// three roundings that are the kernel's own (of the exponent to base 2, of 1 / sum, of the result).
inline void expect_close(const std::vector<double>& mine, const std::vector<double>& exact, double relative,
                         const char* name, const Condition& condition = {}) {
  EXPECT_LE(max_error(mine, exact), relative * std::max(max_finite(exact), condition.maximum)) << name;
}
inline void expect_as_good(const std::vector<float>& mine, const std::vector<float>& naive,
                           const std::vector<double>& exact, const char* name, const Condition& condition = {}) {
  const double roundings = 3 * std::numeric_limits<float>::epsilon() / 2;
  EXPECT_LE(max_error(mine, exact),
            2 * max_error(naive, exact) + roundings * std::max(max_finite(exact), condition.maximum))
      << name;
  EXPECT_LE(rms_error(mine, exact), 2 * rms_error(naive, exact) + roundings * std::max(rms(exact), condition.rms))
      << name;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return same_bits(std::span<const T>(a), std::span<const T>(b));
}

}  // namespace annulus::testing
