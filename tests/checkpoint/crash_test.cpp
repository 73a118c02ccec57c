// kill -9 at every named point of a save: the newest whole checkpoint is found, what was passed over is said, and the
// next run clears up and goes on.
#include <csignal>
#include <cstdlib>

#include "checkpoint/fault.h"
#include "child.h"
#include "fixture.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;

std::string save(Writer& writer, const std::vector<Tensor>& model, std::int64_t step) {
  const Shards shards = shards_of(model, 0, 1, static_cast<std::uint64_t>(step));
  std::string message;
  if (!writer.start(meta_of(step), shards.slices, message)) return message;
  const auto outcome = writer.wait_and_finish();
  return outcome->ok ? "" : outcome->message;
}

class Crash : public ::testing::TestWithParam<std::string_view> {};

TEST_P(Crash, LeavesTheNewestWholeCheckpoint) {
  const std::string point(GetParam());
  const auto after = [&](std::string_view other) {
    const auto at = [](std::string_view p) {
      return std::find(kFaultPoints.begin(), kFaultPoints.end(), p) - kFaultPoints.begin();
    };
    return at(point) >= at(other);
  };
  const TempFolder run;
  const auto model = small_model();
  const ChildEnd end = run_in_child([&] {
    setenv("ANNULUS_FAULT", (point + ":0@3").c_str(), 1);
    const auto world = parallel::make_self_communicator();
    Writer writer(*world, run.path(), 2);
    for (std::int64_t step = 1; step <= 3; ++step) {
      if (const auto error = save(writer, model, step); !error.empty()) return error;
    }
    return std::string();
  });
  EXPECT_EQ(end.signal, SIGKILL) << end.text;

  std::vector<std::string> skipped;
  auto newest = find_newest(run.path(), skipped);
  ASSERT_TRUE(newest);
  const std::int64_t expected = after("after_rename") ? 3 : 2;
  EXPECT_EQ(newest->meta(), meta_of(expected));
  expect_holds(*newest, model, static_cast<std::uint64_t>(expected));
  if (point == "before_folder" || expected == 3) {
    EXPECT_TRUE(skipped.empty());
  } else {
    ASSERT_EQ(skipped.size(), 1u);
    expect_parts(skipped[0], {"step-00000003.tmp", "interrupted"});
  }
  EXPECT_EQ(resolve_model_path(run.path()), run / step_name(expected));

  const auto world = parallel::make_self_communicator();
  {
    Writer writer(*world, run.path(), 2);
    for (const auto& name : names_in(run.path())) EXPECT_TRUE(name.find(".tmp") == name.npos && name[0] != '.') << name;
    for (std::int64_t step = expected + 1; step <= 4; ++step) EXPECT_EQ(save(writer, model, step), "");
  }
  EXPECT_EQ(names_in(run.path()), (std::vector<std::string>{"step-00000003", "step-00000004"}));
  newest = find_newest(run.path(), skipped);
  ASSERT_TRUE(newest);
  expect_holds(*newest, model, 4);
}

INSTANTIATE_TEST_SUITE_P(AtEveryPoint, Crash, ::testing::ValuesIn(kFaultPoints),
                         [](const auto& test) { return std::string(test.param); });

// Killed while it replaces a checkpoint of the same step (a run that went on from an older one): one of the two is
// there.
TEST(CrashReplacing, OldOrNewIsWhole) {
  const auto model = small_model();
  for (const char* point : {"after_manifest", "after_rename"}) {
    const TempFolder run;
    save_as(1, run / step_name(3), model, 3);
    const ChildEnd end = run_in_child([&] {
      setenv("ANNULUS_FAULT", point, 1);
      const auto world = parallel::make_self_communicator();
      Writer writer(*world, run.path(), 2);
      return save(writer, {model.begin(), model.begin() + 3}, 3);
    });
    EXPECT_EQ(end.signal, SIGKILL) << end.text;
    std::vector<std::string> skipped;
    const auto newest = find_newest(run.path(), skipped);
    ASSERT_TRUE(newest);
    EXPECT_EQ(newest->tensors().size(), std::string(point) == "after_rename" ? 3u : model.size());
  }
}

TEST(FaultEnvironment, IsCheckedAndSparesOthers) {
  const TempFolder run;
  const auto model = small_model();
  const auto world = parallel::make_self_communicator();
  for (const char* bad : {"", "nowhere", "after_shard:x", "after_shard@", "after_shard:0:1", "after_shard:-1"}) {
    setenv("ANNULUS_FAULT", bad, 1);
    EXPECT_THROW(Writer(*world, run.path(), 2), UsageError) << bad;
  }
  setenv("ANNULUS_FAULT", "after_shard:1", 1);  // another rank's
  {
    Writer writer(*world, run.path(), 2);
    EXPECT_EQ(save(writer, model, 1), "");
    setenv("ANNULUS_FAULT", "after_shard@3", 1);  // a later save's
    EXPECT_EQ(save(writer, model, 2), "");
  }
  unsetenv("ANNULUS_FAULT");
}

}  // namespace
}  // namespace annulus::checkpoint
