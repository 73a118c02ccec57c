// The operation table: one row per operation, shape and variant, run on either device by runner.h. A row states its
// tensors, how to call the operation, and the naive reference of the same arithmetic (tests/reference/ops.h). A test
// fails if an operation of ops.h has no row.
#pragma once

#include <fmt/ranges.h>

#include <functional>
#include <string>
#include <vector>

#include "ops/ops.h"
#include "reference/ops.h"

namespace annulus::testing {

// A tensor's type: the row's working type, its statistics' type, or a fixed one.
enum class Role { work, stat, i32, f64, f32, bf16 };
enum class Use { in, out, inout };

struct Slot {
  const char* name;
  Role role;
  Shape shape;
  Use use;
  std::function<double(std::int64_t index, double normal)> value;  // of an input; `normal` is an N(0, 1) draw
  int shares_memory_with = -1;                                     // an earlier slot
};

enum class Tolerance {
  exact,    // the naive implementation's bits
  rounded,  // at most twice the naive implementation's error, or one rounding of the largest element
};

using Views = std::vector<TensorView>;
template <class R>
using Tensors = std::vector<std::vector<R>>;

struct Case {
  std::string op, label;
  std::vector<Slot> slots;
  std::function<void(Context&, const Views&)> run;
  std::function<void(Tensors<long double>&)> truth;
  std::function<void(Tensors<double>&)> naive64;
  std::function<void(Tensors<float>&)> naive32;
  Tolerance tolerance = Tolerance::rounded;
  bool stat_is_f64 = false;  // accumulates in f64 whatever the inputs: the naive implementation is in double
  bool fixed_types = false;  // no slot depends on the working type: one run
  bool any_threads = true;   // bit-equal for any number of threads
  bool mixed_types = false;  // repeats another row where stat is the working type: run in bf16 alone
  // Tensor cores align and add products of bf16 in fp32 by truncation (Fasi et al., PeerJ CS 2021): an error of up to
  // one unit of the last place per addition where rounding to nearest, as in the naive implementation, has half of one.
  bool truncates_in_bf16 = false;
};

template <class Reference>
Case make_case(std::string op, std::string label, std::vector<Slot> slots,
               std::function<void(Context&, const Views&)> run, const Reference& reference) {
  return {std::move(op), std::move(label), std::move(slots), std::move(run), reference, reference, reference};
}

inline std::string dims(const std::vector<std::int64_t>& list) { return fmt::format("{}", fmt::join(list, "x")); }

inline Slot in(const char* name, Role role, Shape shape, double sigma = 1, double mean = 0) {
  return {name, role, shape, Use::in, [=](std::int64_t, double z) { return mean + sigma * z; }};
}
inline Slot inout(const char* name, Role role, Shape shape, double sigma = 1) {
  return {name, role, shape, Use::inout, [=](std::int64_t, double z) { return sigma * z; }};
}
inline Slot out(const char* name, Role role, Shape shape, int shares_memory_with = -1) {
  return {name, role, shape, Use::out, {}, shares_memory_with};
}
inline Slot positive(const char* name, Role role, Shape shape, double at_least) {
  return {name, role, shape, Use::in, [=](std::int64_t, double z) { return at_least + std::abs(z); }};
}
// Integers in [low, low + count), in a scattered but repeating order.
inline Slot integers(const char* name, Shape shape, std::int64_t low, std::int64_t count) {
  return {name, Role::i32, shape, Use::in,
          [=](std::int64_t i, double) { return static_cast<double>(low + i * i * 7919 % 104729 % count); }};
}

template <class R>
R nan_of() {
  return std::numeric_limits<R>::quiet_NaN();
}

std::vector<Case> all_cases();

}  // namespace annulus::testing
