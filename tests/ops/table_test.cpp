// The operation table on the CPU: values, guard bands, repeatability, any number of threads.
#include <omp.h>

#include <set>

#include "ops/runner.h"

namespace annulus::testing {
namespace {

void test_on_cpu(const Case& c, DType work) {
  const int threads = omp_get_max_threads();
  TestDevice device(DeviceKind::cpu);
  const auto inputs = make_inputs(c, work);
  const auto truth = evaluate(c.truth, inputs);
  const auto naive = naive_results(c, inputs, work);
  const Run first = run_case(c, device, inputs, work, 0);
  expect_close(c, first, truth, naive, inputs, work);
  EXPECT_EQ(first.tensors, run_case(c, device, inputs, work, 0).tensors) << "a second run gives other bits";
  expect_close(c, run_case(c, device, inputs, work, 1), truth, naive, inputs, work);
  for (const int n : {1, 2, 3}) {
    omp_set_num_threads(n);
    const Run other = run_case(c, device, inputs, work, 0);
    if (c.any_threads) EXPECT_EQ(first.tensors, other.tensors) << n << " threads give other bits";
    else expect_close(c, other, truth, naive, inputs, work);
  }
  omp_set_num_threads(threads);
}

TEST(OperationTable, HasEveryOperation) {
  std::set<std::string> rows, operations;
  for (const Case& c : all_cases()) rows.insert(c.op);
#define ANNULUS_INSERT_NAME(name, Args) operations.insert(#name);
  ANNULUS_OPS(ANNULUS_INSERT_NAME)
#undef ANNULUS_INSERT_NAME
  EXPECT_EQ(rows, operations);
}

TEST(OperationTable, NamesAreUnique) {
  std::set<std::string> names;
  for (const Case& c : all_cases())
    EXPECT_TRUE(names.insert(case_name(c, DType::f32)).second) << case_name(c, DType::f32);
}

const bool kRegistered = register_rows("Cpu", __FILE__, {DType::f32, DType::f64}, test_on_cpu);

}  // namespace
}  // namespace annulus::testing
