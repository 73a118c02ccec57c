// Runs a row of the table on a device and compares it with the reference: values, guard bands, inputs left alone,
// repeatability, unaligned tensors, scratch as planned.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/rng.h"
#include "ops/cases_dense.h"
#include "ops/cases_gates.h"
#include "ops/cases_loss.h"
#include "support/device.h"

namespace annulus::testing {

inline std::vector<Case> all_cases() {
  std::vector<Case> table;
  add_elementwise_cases(table);
  add_cast_cases(table);
  add_matmul_cases(table);
  add_bias_cases(table);
  add_norm_cases(table);
  add_rope_cases(table);
  add_swiglu_cases(table);
  add_silu_cases(table);
  add_gate_cases(table);
  add_embedding_cases(table);
  add_loss_cases(table);
  add_correct_cases(table);
  add_sum_cases(table);
  add_clip_cases(table);
  add_adamw_cases(table);
  return table;
}

inline DType type_of(const Slot& slot, DType work) {
  switch (slot.role) {
    case Role::work:
      return work;
    case Role::stat:
      return stat_type(work);
    case Role::i32:
      return DType::i32;
    case Role::f64:
      return DType::f64;
    case Role::f32:
      return DType::f32;
    case Role::bf16:
      return DType::bf16;
  }
  return work;
}

inline long double rounded(long double x, DType dtype) {
  switch (dtype) {
    case DType::f64:
      return static_cast<double>(x);
    case DType::f32:
      return static_cast<float>(x);
    case DType::bf16:
      return reference::round_to_bf16(x);
    default:
      return x;
  }
}

inline long double epsilon(DType dtype) {  // the distance from 1 to the next number
  return dtype == DType::f64 ? 0x1p-52L : dtype == DType::f32 ? 0x1p-23L : dtype == DType::bf16 ? 0x1p-7L : 0.0L;
}

inline void store_value(std::byte* to, DType dtype, std::int64_t i, double x) {
  const auto put = [&](auto value) {
    std::memcpy(to + static_cast<std::size_t>(i) * sizeof value, &value, sizeof value);
  };
  switch (dtype) {
    case DType::f32:
      return put(static_cast<float>(x));
    case DType::f64:
      return put(x);
    case DType::bf16:
      return put(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> 16));
    default:
      return put(static_cast<std::int32_t>(x));
  }
}

inline double load_value(const std::byte* from, DType dtype, std::int64_t i) {
  const auto get = [&](auto value) {
    std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof value, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::f32:
      return get(float{});
    case DType::f64:
      return get(double{});
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(get(std::uint16_t{})) << 16);
    default:
      return get(std::int32_t{});
  }
}

// The inputs of a row, representable in their types; outputs hold NaN.
inline Tensors<double> make_inputs(const Case& c, DType work) {
  Tensors<double> tensors;
  for (const Slot& slot : c.slots) {
    const CounterRng rng(7, c.op + "/" + slot.name);
    std::vector<double> values(static_cast<std::size_t>(slot.shape.numel()), nan_of<double>());
    for (std::size_t i = 0; i < values.size() && slot.use != Use::out; ++i) {
      values[i] =
          static_cast<double>(rounded(slot.value(static_cast<std::int64_t>(i), rng.normal(i)), type_of(slot, work)));
    }
    tensors.push_back(std::move(values));
  }
  return tensors;
}

template <class R>
Tensors<R> evaluate(const std::function<void(Tensors<R>&)>& reference, const Tensors<double>& inputs) {
  Tensors<R> t;
  for (const auto& values : inputs) t.emplace_back(values.begin(), values.end());
  reference(t);
  return t;
}

// What the naive implementation of the same precision stores.
inline Tensors<double> naive_results(const Case& c, const Tensors<double>& inputs, DType work) {
  Tensors<double> results;
  const auto take = [&](const auto& tensors) {
    for (std::size_t s = 0; s < tensors.size(); ++s) {
      results.emplace_back();
      for (const auto x : tensors[s]) results[s].push_back(static_cast<double>(rounded(x, type_of(c.slots[s], work))));
    }
  };
  if (c.stat_is_f64 || work == DType::f64) {
    take(evaluate(c.naive64, inputs));
  } else {
    take(evaluate(c.naive32, inputs));
  }
  return results;
}

struct Run {
  std::vector<std::vector<std::byte>> tensors;  // bytes of every slot afterwards
};

// One call of the operation on fresh tensors, `shift` elements off alignment.
inline Run run_case(const Case& c, TestDevice& device, const Tensors<double>& inputs, DType work, std::int64_t shift) {
  GuardedTensors memory(device);
  std::vector<std::size_t> index;
  for (const Slot& slot : c.slots) {
    index.push_back(slot.shares_memory_with >= 0 ? index[static_cast<std::size_t>(slot.shares_memory_with)]
                                                 : memory.add(type_of(slot, work), slot.shape, shift));
  }
  memory.commit();
  for (std::size_t s = 0; s < c.slots.size(); ++s) {
    if (c.slots[s].use == Use::out) continue;
    const DType dtype = type_of(c.slots[s], work);
    for (std::size_t i = 0; i < inputs[s].size(); ++i) {
      store_value(memory.host(index[s]), dtype, static_cast<std::int64_t>(i), inputs[s][i]);
    }
  }
  Views views;
  for (const auto i : index) views.push_back(memory.view(i));
  device.plan_scratch([&] { c.run(device.context(), views); });
  memory.upload();
  c.run(device.context(), views);
  EXPECT_EQ(device.context().scratch->used(), 0) << "scratch was not given back";
  memory.download();
  EXPECT_EQ(memory.check_guards(), "");
  Run run;
  for (std::size_t s = 0; s < c.slots.size(); ++s) {
    const std::byte* begin = memory.host(index[s]);
    run.tensors.emplace_back(begin, begin + memory.bytes(index[s]));
  }
  return run;
}

inline bool is_overwritten(const Case& c, std::size_t slot) {
  if (c.slots[slot].use != Use::in) return true;
  return std::any_of(c.slots.begin(), c.slots.end(),
                     [&](const Slot& s) { return s.shares_memory_with == static_cast<int>(slot); });
}

// Largest error of one tensor; a NaN or infinity must stand where the truth has one.
struct Comparison {
  long double error = 0, largest = 0;
  std::string mismatch;
};

inline void compare(Comparison& out, double value, long double truth, std::size_t i) {
  if (std::isnan(value) || std::isnan(truth) || std::isinf(value) || std::isinf(truth)) {
    const bool same = std::isnan(value) ? std::isnan(truth) : static_cast<long double>(value) == truth;
    if (!same && out.mismatch.empty()) {
      out.mismatch = fmt::format("element {} is {}, expected {}", i, value, static_cast<double>(truth));
    }
    return;
  }
  out.error = std::max(out.error, std::fabs(static_cast<long double>(value) - truth));
  out.largest = std::max(out.largest, std::fabs(truth));
}

inline void expect_close(const Case& c, const Run& run, const Tensors<long double>& truth, const Tensors<double>& naive,
                         const Tensors<double>& inputs, DType work) {
  for (std::size_t s = 0; s < c.slots.size(); ++s) {
    const Slot& slot = c.slots[s];
    const DType dtype = type_of(slot, work);
    if (slot.use == Use::in) {
      if (is_overwritten(c, s)) continue;
      for (std::size_t i = 0; i < inputs[s].size(); ++i) {
        const double now = load_value(run.tensors[s].data(), dtype, static_cast<std::int64_t>(i));
        ASSERT_TRUE(now == inputs[s][i] || (std::isnan(now) && std::isnan(inputs[s][i])))
            << "the input " << slot.name << " was written at " << i;
      }
      continue;
    }
    Comparison ours, bound;
    for (std::size_t i = 0; i < truth[s].size(); ++i) {
      const double value = load_value(run.tensors[s].data(), dtype, static_cast<std::int64_t>(i));
      const long double stored = rounded(truth[s][i], dtype);  // infinite where the type has no such number
      const bool beyond = std::isinf(stored);
      compare(ours, value, c.tolerance == Tolerance::exact ? naive[s][i] : beyond ? stored : truth[s][i], i);
      compare(bound, naive[s][i], beyond ? stored : truth[s][i], i);
    }
    EXPECT_EQ(ours.mismatch, "") << slot.name;
    if (c.truncates_in_bf16 && work == DType::bf16) bound.error *= 2;
    const long double limit =
        c.tolerance == Tolerance::exact ? 0 : std::max(2 * bound.error, epsilon(dtype) * bound.largest);
    EXPECT_LE(ours.error, limit) << slot.name << ": the naive implementation's error is "
                                 << static_cast<double>(bound.error) << ", the largest element "
                                 << static_cast<double>(bound.largest);
  }
}

inline std::string case_name(const Case& c, DType work) {
  std::string name = c.op + "_" + c.label;
  if (!c.fixed_types) name.append("_").append(name_of(work));
  return name;
}

// One GoogleTest per row and type, so that a failure has a name and --gtest_filter finds it.
inline bool register_rows(const char* suite, const char* file, std::initializer_list<DType> types,
                          void (*test)(const Case&, DType)) {
  class Row : public ::testing::Test {
   public:
    Row(Case c, DType work, void (*body)(const Case&, DType)) : case_(std::move(c)), work_(work), body_(body) {}
    void TestBody() override { body_(case_, work_); }

   private:
    Case case_;
    DType work_;
    void (*body_)(const Case&, DType);
  };
  for (const Case& c : all_cases()) {
    for (const DType work : types) {
      if (c.fixed_types && work != *types.begin()) continue;
      if (c.mixed_types && work != DType::bf16) continue;
      ::testing::RegisterTest(suite, case_name(c, work).c_str(), nullptr, nullptr, file, __LINE__,
                              [c, work, test]() -> ::testing::Test* { return new Row(c, work, test); });
    }
  }
  return true;
}

}  // namespace annulus::testing
