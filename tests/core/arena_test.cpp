// Arenas: the plan is what the run takes, scopes, alignment, running out, ownership.
#include "core/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace annulus {
namespace {

bool is_aligned(const TensorView& x) { return reinterpret_cast<std::uintptr_t>(x.data) % 256 == 0; }

TEST(Arena, PlanEqualsTheRun) {
  Arena arena("parameters", DeviceKind::cpu);
  const auto sequence = [&] {
    return std::vector<TensorView>{arena.allocate("a", DType::f32, {3, 5}), arena.allocate("b", DType::bf16, {7}),
                                   arena.allocate("empty", DType::f64, {0}), arena.allocate("c", DType::u8, {257})};
  };
  for (const TensorView& view : sequence()) EXPECT_EQ(view.data, nullptr);
  EXPECT_FALSE(arena.committed());
  EXPECT_EQ(arena.planned_bytes(), 256 + 256 + 0 + 512);
  ASSERT_EQ(arena.blocks().size(), 4u);
  EXPECT_EQ(arena.blocks()[3].name, "c");
  EXPECT_EQ(arena.blocks()[3].bytes, 512);

  arena.commit();
  EXPECT_EQ(arena.used(), 0);
  const auto views = sequence();
  EXPECT_EQ(arena.used(), arena.planned_bytes());
  EXPECT_EQ(arena.blocks().size(), 4u);  // the report is the plan's
  for (const TensorView& view : views) {
    EXPECT_TRUE(is_aligned(view));
    std::memset(view.data, 0x5a, static_cast<std::size_t>(view.bytes()));
  }
  EXPECT_EQ(static_cast<char*>(views[1].data) - static_cast<char*>(views[0].data), 256);
}

TEST(Arena, MemoryStartsAtZero) {
  Arena arena("x", DeviceKind::cpu);
  arena.allocate("x", DType::f64, {1000});
  arena.commit();
  const TensorView x = arena.allocate("x", DType::f64, {1000});
  for (std::int64_t i = 0; i < 1000; ++i) ASSERT_EQ(x.as<double>()[i], 0);
}

TEST(Arena, ScopesMakeAStackWhosePlanIsTheHighWaterMark) {
  Arena arena("scratch", DeviceKind::cpu);
  void* last = nullptr;
  const auto step = [&] {
    const Arena::Scope outer(arena);
    arena.allocate("kept", DType::u8, {256});
    for (int i = 0; i < 3; ++i) {
      const Arena::Scope inner(arena);
      last = arena.allocate("loop", DType::u8, {256 * (i + 1)}).data;
    }
    const Arena::Scope inner(arena);
    EXPECT_EQ(arena.used(), 256);
    last = arena.allocate("after", DType::u8, {512}).data;
  };
  step();
  EXPECT_EQ(arena.used(), 0);
  EXPECT_EQ(arena.planned_bytes(), 256 + 768);
  EXPECT_EQ(arena.blocks().size(), 5u);
  arena.commit();
  step();
  void* const first_time = last;
  step();
  EXPECT_EQ(last, first_time);
  EXPECT_EQ(arena.used(), 0);
}

TEST(Arena, RunningOutNamesArenaAndBlock) {
  Arena arena("scratch", DeviceKind::cpu);
  arena.allocate("small", DType::f32, {10});
  arena.commit();
  arena.allocate("small", DType::f32, {64});  // still inside the aligned block
  try {
    arena.allocate("surplus", DType::f32, {1});
    FAIL() << "more was handed out than was planned";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("scratch"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("surplus"), std::string::npos) << error.what();
    EXPECT_EQ(error.exit_code(), 1);
  }
  EXPECT_EQ(arena.used(), 256);  // a refused block takes nothing
  EXPECT_THROW(arena.commit(), Error);
}

TEST(Arena, OwnsOneBlockAndCountsIt) {
  std::int64_t taken = 0, given_back = 0;
  static char memory[4096];
  const Allocator counting{[&](std::int64_t bytes) -> void* {
                             ++taken;
                             EXPECT_EQ(bytes, 512);
                             return memory;
                           },
                           [&](void* block) {
                             ++given_back;
                             EXPECT_EQ(block, memory);
                           }};
  const std::int64_t before = Arena::num_commits();
  {
    Arena unused("never committed", DeviceKind::cpu, counting);
    Arena arena("x", DeviceKind::cuda, counting);
    EXPECT_EQ(arena.allocate("a", DType::f32, {65}).device, DeviceKind::cuda);
    arena.commit();
    arena.allocate("a", DType::f32, {65});
    EXPECT_EQ(taken, 1);
    EXPECT_EQ(given_back, 0);
  }
  EXPECT_EQ(taken, 1);
  EXPECT_EQ(given_back, 1);
  EXPECT_EQ(Arena::num_commits(), before + 1);
}

}  // namespace
}  // namespace annulus
