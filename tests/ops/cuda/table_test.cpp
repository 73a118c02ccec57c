// The operation table on the GPU, in float32 and bfloat16, against the naive CPU reference; operations listed in
// ops/cuda_missing.h must refuse by name.
#include "core/device_memory.h"
#include "ops/cuda_missing.h"
#include "ops/runner.h"
#include "support/require_gpu.h"

#include <set>

namespace annulus::testing {
namespace {

TestDevice& gpu() {
  static TestDevice device(DeviceKind::cuda);
  return device;
}

bool is_missing(const std::string& op) {
  static const std::set<std::string> missing = [] {
    std::set<std::string> names;
#define ANNULUS_INSERT_NAME(name, Args) names.insert(#name);
    ANNULUS_OPS_WITHOUT_CUDA(ANNULUS_INSERT_NAME)
#undef ANNULUS_INSERT_NAME
    return names;
  }();
  return missing.count(op) > 0;
}

void test_on_gpu(const Case& c, DType work) {
  const auto inputs = make_inputs(c, work);
  if (is_missing(c.op)) {
    try {
      run_case(c, gpu(), inputs, work, 0);
      FAIL() << c.op << " stands in ops/cuda_missing.h and ran";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), "operation " + c.op + " has no CUDA twin yet");
    }
    return;
  }
  const auto truth = evaluate(c.truth, inputs);
  const auto naive = naive_results(c, inputs, work);
  const Run first = run_case(c, gpu(), inputs, work, 0);
  expect_close(c, first, truth, naive, inputs, work);
  EXPECT_EQ(first.tensors, run_case(c, gpu(), inputs, work, 0).tensors) << "a second run gives other bits";
  expect_close(c, run_case(c, gpu(), inputs, work, 1), truth, naive, inputs, work);
}

const bool kRegistered = register_rows("Cuda", __FILE__, {DType::f32, DType::bf16}, test_on_gpu);

}  // namespace
}  // namespace annulus::testing
