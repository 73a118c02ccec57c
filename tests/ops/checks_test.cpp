// What the operations refuse and how they say it; planning; edge sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/device_memory.h"
#include "ops/cpu/blas_core.h"
#include "ops/ops.h"

namespace annulus::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Run>
std::string message_of(const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

struct Checks : ::testing::Test {
  Context ctx;
  std::vector<float> a = std::vector<float>(64, 1.f), b = a, c = a, d = a;
  TensorView view(std::vector<float>& v, const Shape& shape) { return host_view(v.data(), shape); }
};

TEST_F(Checks, ShapesNameOperationTensorAndWhatWasExpected) {
  const auto text = message_of([&] { ops::matmul(ctx, {view(a, {2, 3}), view(b, {4, 5}), view(c, {2, 5})}); });
  EXPECT_THAT(text, AllOf(HasSubstr("matmul"), HasSubstr("b is float32 [4, 5]"), HasSubstr("expected [3, 5]")));
  EXPECT_THAT(message_of([&] {
                ops::matmul(ctx, {view(a, {2, 3}), view(b, {3, 5}), view(c, {5, 2})});
              }),
              AllOf(HasSubstr("c is float32 [5, 2]"), HasSubstr("expected [2, 5]")));
  EXPECT_THAT(message_of([&] {
                ops::matmul(ctx, {view(a, {6}), view(b, {3, 5}), view(c, {2, 5})});
              }),
              HasSubstr("expected 2 dimensions"));
  EXPECT_THAT(message_of([&] {
                ops::rope(ctx, {view(a, {2, 1, 3}), view(b, {2, 1}), view(c, {2, 1})});
              }),
              HasSubstr("even head dimension"));
}

TEST_F(Checks, TypesAndDevices) {
  std::vector<double> wide(64);
  EXPECT_THAT(message_of([&] {
                ops::add(ctx, {view(a, {4}), host_view(wide.data(), {4}), view(c, {4})});
              }),
              AllOf(HasSubstr("add"), HasSubstr("b is float64"), HasSubstr("expected float32")));
  TensorView elsewhere = view(a, {4});
  elsewhere.device = DeviceKind::cuda;
  EXPECT_THAT(message_of([&] { ops::scale(ctx, {elsewhere, 2}); }), HasSubstr("expected a tensor on cpu"));
  EXPECT_THAT(message_of([&] {
                ops::scale(ctx, {TensorView{nullptr, DType::f32, DeviceKind::cpu, {4}}, 2});
              }),
              HasSubstr("arena committed"));
}

TEST_F(Checks, TheCpuRefusesBfloat16ExceptInCast) {
  std::vector<BFloat16> half(4);
  const TensorView x = host_view(half.data(), {4});
  EXPECT_THAT(message_of([&] { ops::add(ctx, {x, x, x}); }), HasSubstr("the CPU does not compute in bfloat16"));
  EXPECT_THAT(message_of([&] { ops::fill(ctx, {x, 1}); }), HasSubstr("bfloat16"));
  ops::cast(ctx, {view(a, {4}), x});
  EXPECT_EQ(half[3].bits, 0x3f80);
}

TEST_F(Checks, OverlappingMemory) {
  const TensorView low = view(a, {8}).rows(0, 4), shifted = view(a, {8}).rows(1, 4);
  EXPECT_THAT(message_of([&] { ops::add(ctx, {low, view(b, {4}), shifted}); }), HasSubstr("memory apart from a's"));
  ops::add(ctx, {low, view(b, {4}), low});  // exactly one of the inputs is allowed
  EXPECT_EQ(a[0], 2);
  EXPECT_THAT(message_of([&] {
                ops::swiglu_backward(ctx, {view(a, {4}), view(b, {4}), view(c, {4}), view(d, {4}), view(d, {4})});
              }),
              HasSubstr("memory apart from d_up's"));
  EXPECT_THAT(message_of([&] {
                ops::matmul(ctx, {view(a, {2, 2}), view(b, {2, 2}), view(a, {2, 2})});
              }),
              HasSubstr("memory apart from a's"));
}

TEST_F(Checks, TokensAndTargetsOutsideTheVocabulary) {
  std::vector<std::int32_t> token{0, 4};
  EXPECT_THAT(message_of([&] {
                ops::embedding_forward(ctx, {host_view(token.data(), {2}), view(a, {4, 2}), view(b, {2, 2})});
              }),
              AllOf(HasSubstr("token 4 in row 1"), HasSubstr("vocabulary of 4")));
  EXPECT_THAT(message_of([&] {
                ops::cross_entropy(ctx, {view(a, {2, 4}), host_view(token.data(), {2}), view(b, {2})});
              }),
              AllOf(HasSubstr("target 4 in row 1"), HasSubstr("vocabulary of 4")));
  token[1] = -1;
  EXPECT_THAT(message_of([&] {
                ops::embedding_backward(ctx, {host_view(token.data(), {2}), view(b, {2, 2}), view(a, {4, 2})});
              }),
              HasSubstr("token -1 in row 1"));
}

TEST_F(Checks, ABuildOrOperationWithoutCudaSaysSoByName) {
  if (device_count(DeviceKind::cuda) > 0) GTEST_SKIP() << "this machine has a GPU: tests/ops/cuda covers it";
#ifdef ANNULUS_CUDA
  GTEST_SKIP() << "this build has CUDA";
#else
  ctx.device = DeviceKind::cuda;
  TensorView x = view(a, {4});
  x.device = DeviceKind::cuda;
  EXPECT_THAT(message_of([&] {
                ops::scale(ctx, {x, 2});
              }),
              AllOf(HasSubstr("operation scale"), HasSubstr("without CUDA")));
#endif
}

TEST_F(Checks, TablesOfRopeReachTheLastRow) {
  const auto rope = [&](std::int64_t table_rows, std::int64_t stride) {
    return message_of([&] {
      ops::rope(ctx, {view(a, {3, 1, 4}), view(b, {table_rows, 2}), view(c, {table_rows, 2}), false, stride});
    });
  };
  EXPECT_EQ(rope(9, 4), "no error");
  EXPECT_THAT(rope(8, 4), AllOf(HasSubstr("cos is float32 [8, 2]"), HasSubstr("9 rows for 3 rows of x at stride 4")));
  EXPECT_THAT(rope(10, 4), HasSubstr("9 rows"));
  EXPECT_THAT(rope(4, 1), HasSubstr("3 rows"));
  EXPECT_THAT(rope(9, 0), HasSubstr("table_stride 0"));
}

TEST_F(Checks, GatesOfThreeBranches) {
  std::vector<float> e(64), f(64);
  const Shape rows{2, 2, 3};
  ops::GateForward args{view(a, {2, 6}), {view(b, rows), view(c, rows), view(d, rows)}, view(e, rows)};
  ops::gate_forward(ctx, args);
  args.logits = view(a, {2, 2});
  EXPECT_THAT(message_of([&] { ops::gate_forward(ctx, args); }),
              AllOf(HasSubstr("logits is float32 [2, 2]"), HasSubstr("expected [2, 6]")));
  args.logits = view(a, {2, 6});
  args.o[2] = view(d, {2, 3, 2});
  EXPECT_THAT(message_of([&] { ops::gate_forward(ctx, args); }), HasSubstr("o is float32 [2, 3, 2]"));
  args.o[2] = args.out;
  EXPECT_THAT(message_of([&] { ops::gate_forward(ctx, args); }), HasSubstr("out is"));
  const TensorView both = view(f, rows);
  EXPECT_THAT(message_of([&] {
                ops::gate_backward(ctx, {.d_out = view(e, rows),
                                         .logits = view(a, {2, 6}),
                                         .o = {view(b, rows), view(b, rows), view(b, rows)},
                                         .d_logits = view(c, {2, 6}),
                                         .d_o = {view(d, rows), both, both}});
              }),
              HasSubstr("memory apart from d_o's"));
}

TEST_F(Checks, CorrectIsOptionalButOfIntegers) {
  std::vector<std::int32_t> target{1, 3}, correct{7, 7};
  const TensorView targets = host_view(target.data(), {2});
  ops::cross_entropy(ctx, {view(a, {2, 4}), targets, view(b, {2}), host_view(correct.data(), {2})});
  EXPECT_EQ(correct, (std::vector<std::int32_t>{0, 0}));  // all logits are equal
  EXPECT_THAT(message_of([&] {
                ops::cross_entropy(ctx, {view(a, {2, 4}), targets, view(b, {2}), view(c, {2})});
              }),
              AllOf(HasSubstr("correct is float32"), HasSubstr("int32")));
  EXPECT_THAT(message_of([&] {
                ops::cross_entropy(ctx, {view(a, {2, 4}), targets, view(b, {2}), targets});
              }),
              HasSubstr("memory apart from target's"));
}

TEST_F(Checks, PlanningComputesNothingAndCountsWorkspaces) {
  Arena scratch("scratch", DeviceKind::cpu);
  ctx.scratch = &scratch;
  ctx.planning = true;
  ops::fill(ctx, {view(a, {64}), 5});
  EXPECT_EQ(a[0], 1);
  EXPECT_EQ(scratch.planned_bytes(), 0);
  const auto planned = [](const Shape& shape) { return TensorView{nullptr, DType::f32, DeviceKind::cpu, shape}; };
  const ops::RmsNormBackward norm{planned({40, 8}), planned({40, 8}), planned({8}),
                                  planned({40}),    planned({40, 8}), planned({8})};
  ops::rms_norm_backward(ctx, norm);
  EXPECT_GE(scratch.planned_bytes(), 3 * 8 * 4);  // 40 rows are three blocks
  EXPECT_EQ(scratch.used(), 0);
  EXPECT_THROW(ops::matmul(ctx, {planned({2, 3}), planned({4, 5}), planned({2, 5})}), Error);  // planning checks too
  ctx.planning = false;
  EXPECT_THAT(message_of([&] {
                ops::add_bias_backward(ctx, {view(a, {4, 2}), view(b, {2})});
              }),
              HasSubstr("not committed"));
  ctx.scratch = nullptr;
  EXPECT_THAT(message_of([&] {
                ops::add_bias_backward(ctx, {view(a, {4, 2}), view(b, {2})});
              }),
              HasSubstr("no scratch arena"));
}

TEST_F(Checks, EmptySizes) {
  ops::matmul(ctx, {view(a, {2, 0}), view(b, {0, 3}), view(c, {2, 3}), false, false, ops::GradMode::accumulate});
  EXPECT_EQ(c[0], 1);
  ops::matmul(ctx, {view(a, {2, 0}), view(b, {0, 3}), view(c, {2, 3})});
  EXPECT_EQ(c[5], 0);
  EXPECT_EQ(c[6], 1);
  ops::matmul(ctx, {view(a, {0, 2}), view(b, {2, 3}), view(c, {0, 3})});
  ops::rms_norm_forward(ctx, {view(a, {0, 4}), view(b, {4}), view(c, {0, 4}), view(d, {0})});
  std::vector<std::int32_t> none(1);
  ops::cross_entropy(ctx, {view(a, {0, 4}), host_view(none.data(), {0}), view(b, {0})});
  double total = 7;
  ops::sum(ctx, {view(a, {0}), host_view(&total, {1})});
  EXPECT_EQ(total, 0);
}

int polls = 0;

TEST_F(Checks, OperationsPollForMessages) {
  ctx.progress = [] { ++polls; };
  ops::scale(ctx, {view(a, {4}), 2});
  EXPECT_EQ(polls, 1);
}

TEST(BlasCore, OnlyOldKernelsAreReplaced) {
  using ops::cpu::better_blas_core;
  EXPECT_EQ(better_blas_core("Prescott", {.avx512 = true, .avx2 = true}), "SkylakeX");
  EXPECT_EQ(better_blas_core("Prescott", {.avx512 = false, .avx2 = true}), "Haswell");
  EXPECT_EQ(better_blas_core("Sandybridge", {.avx512 = true, .avx2 = true}), "SkylakeX");
  EXPECT_EQ(better_blas_core("Prescott", {}), "");
  for (const char* known : {"SkylakeX", "Cooperlake", "Sapphirerapids", "Haswell", "Zen"}) {
    EXPECT_EQ(better_blas_core(known, {.avx512 = true, .avx2 = true}), "") << known;
  }
}

}  // namespace
}  // namespace annulus::testing
