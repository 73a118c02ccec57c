// The same body on any number of ranks: saving together, reading by other numbers of ranks, and failures of one rank
// that every rank hears of.
#include <mpi.h>

#include <csignal>

#include "../fixture.h"
#include "checkpoint/exchange.h"
#include "checkpoint/fault.h"
#include "parallel/mpi_communicator.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;

class Collective : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world_.rank() == 0) folder_ = std::make_unique<TempFolder>();
    run_ = broadcast_text(world_, folder_ ? folder_->path() : "");
  }
  void TearDown() override {
    set_fault_hook(nullptr);
    world_.barrier();  // nobody still reads what rank 0 deletes
  }
  Outcome save(Writer& writer, std::int64_t step) {
    const Shards shards = shards_of(model_, world_.rank(), world_.size(), static_cast<std::uint64_t>(step));
    std::string message;
    EXPECT_TRUE(writer.start(meta_of(step), shards.slices, message)) << message;
    return writer.wait_and_finish().value();
  }
  // The same text on every rank.
  void expect_same(const std::string& text) {
    for (const auto& other : gather_texts(world_, text)) EXPECT_EQ(other, text);
  }
  int last() const { return world_.size() - 1; }

  parallel::MpiCommunicator world_{MPI_COMM_WORLD};
  const std::vector<Tensor> model_ = small_model();
  std::unique_ptr<TempFolder> folder_;
  std::string run_;
};

TEST_F(Collective, SavedTogetherReadByAnyNumber) {
  Writer writer(world_, run_, 2);
  const Outcome outcome = save(writer, 5);
  ASSERT_TRUE(outcome.ok) << outcome.message;
  expect_same(outcome.message + outcome.path + std::to_string(outcome.bytes) + std::to_string(outcome.seconds));
  EXPECT_EQ(outcome.path, run_ + "/step-00000005");
  const Checkpoint c = open_collective(world_, outcome.path + "/");
  EXPECT_EQ(c.meta(), meta_of(5));
  expect_holds(c, model_, 5);
  for (const int ranks : {1, 2, 3, 4, 6}) {  // what each of that many ranks would load
    for (int r = 0; r < ranks; ++r) {
      const Shards shards = shards_of(model_, r, ranks, 5);
      for (const Slice& s : shards.slices)
        EXPECT_TRUE(holds_range(c, {s.group, s.tensor, s.global_shape, s.data.dtype}, 5, s.begin, s.data.numel()));
    }
  }
  // Half of the ranks alone: N -> M in earnest.
  const auto half = world_.split(world_.rank() % 2, world_.rank());
  expect_holds(open_collective(*half, outcome.path), model_, 5);
  if (world_.rank() == 0) {
    std::vector<std::string> wanted{"checkpoint.h5", "manifest.json"};
    for (int r = 0; r < world_.size(); ++r) wanted.push_back(fmt::format("shard-{:05}.h5", r));
    EXPECT_EQ(names_in(outcome.path), wanted);
  }
}

// As the trainer does it: every step one MAX of the status, training goes on meanwhile.
TEST_F(Collective, TheFlagRidesTheStepsReduction) {
  if (world_.rank() == last()) {
    set_fault_hook([](std::string_view point) {
      if (point == "before_shard_close") usleep(50000);  // the slowest writer
    });
  }
  Writer writer(world_, run_, 2);
  std::string message;
  int saves = 0, refused = 0;
  std::int64_t step = 0, running_steps = 0;
  for (; saves < 3; ++step) {
    const std::int64_t reduced = reduce_max(world_, writer.status());
    running_steps += reduced == kRunning;
    if (Writer::over(reduced)) {
      const Outcome outcome = writer.finish(reduced);
      EXPECT_TRUE(outcome.ok) << outcome.message;
      ++saves;
    }
    const Shards shards = shards_of(model_, world_.rank(), world_.size(), static_cast<std::uint64_t>(step));
    refused += !writer.start(meta_of(step), shards.slices, message);
    usleep(5000);
  }
  EXPECT_GT(running_steps, 0);
  EXPECT_EQ(refused, running_steps);
  expect_same(std::to_string(refused) + message);
  EXPECT_TRUE(writer.wait_and_finish()->ok);
  std::vector<std::string> skipped;
  const auto newest = find_newest_collective(world_, run_, skipped);
  ASSERT_TRUE(newest);
  EXPECT_TRUE(skipped.empty());
  EXPECT_EQ(newest->meta().step, step - 1);
  expect_holds(*newest, model_, static_cast<std::uint64_t>(step - 1));
}

TEST_F(Collective, OneLostWriterFailsTheSaveOnAllRanks) {
  Writer writer(world_, run_, 2);
  EXPECT_TRUE(save(writer, 1).ok);
  std::int64_t step = 2;
  for (const char* point :
       {"before_folder", "after_shard_create", "mid_datasets", "before_shard_fsync", "after_shard", "before_gather"}) {
    if (world_.rank() == last()) {
      set_fault_hook([&](std::string_view p) {
        if (p == point) throw std::runtime_error("lost at " + std::string(p));
      });
    }
    const Outcome outcome = save(writer, step);
    EXPECT_FALSE(outcome.ok) << point;
    expect_parts(outcome.message, {fmt::format("step {}", step), fmt::format("rank {}", last()), point});
    expect_same(outcome.message);
    if (world_.rank() == 0) {
      EXPECT_EQ(names_in(run_), std::vector<std::string>{"step-00000001"}) << point;
    }
    world_.barrier();  // before the others start the next save's folder
    ++step;
  }
  if (world_.rank() == 0) {
    set_fault_hook([](std::string_view p) {
      if (p == "before_manifest") throw std::runtime_error("rank 0 lost");
    });
  } else {
    set_fault_hook(nullptr);
  }
  const Outcome outcome = save(writer, step);
  EXPECT_FALSE(outcome.ok);
  expect_same(outcome.message);
  set_fault_hook(nullptr);
  EXPECT_TRUE(save(writer, step + 1).ok);
}

TEST_F(Collective, WhatOneRankFindsDamagedIsAnErrorOnAll) {
  {
    Writer writer(world_, run_, 4);
    for (std::int64_t step : {1, 2, 3}) EXPECT_TRUE(save(writer, step).ok);
  }
  if (world_.rank() == 0) {
    const std::string path = fmt::format("{}/step-00000003/shard-{:05}.h5", run_, last());
    std::string shard = slurp(path);
    const Tensor t{"optimizer/master", "w", {23, 1}, DType::f64};  // its end lies in the last shard
    const auto values = values_of(t, 3);
    const auto at = shard.find(std::string(reinterpret_cast<const char*>(values.data()) + values.size() - 32, 32));
    ASSERT_NE(at, shard.npos);
    shard[at + 5] ^= 1;
    spit(path, shard);
    std::filesystem::remove(run_ + "/step-00000002/manifest.json");
    std::filesystem::create_directory(run_ + "/step-00000004.tmp");
  }
  world_.barrier();
  for (const auto& [name, parts] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"step-00000003", {"optimizer/master/w", "XXH3-128"}},
           {"step-00000002", {"no manifest.json"}},
           {"nowhere", {"no manifest.json"}}}) {
    const std::string error = checkpoint_error([&] { open_collective(world_, run_ + "/" + name); });
    expect_parts(error, parts);
    expect_same(error);
  }
  std::vector<std::string> skipped;
  const auto newest = find_newest_collective(world_, run_, skipped);
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->meta().step, 1);
  ASSERT_EQ(skipped.size(), 3u);
  for (const auto& line : skipped) expect_same(line);
  expect_parts(skipped[0], {"step-00000004.tmp", "interrupted"});
}

// Every rank's share of verify() together covers all: a bit flipped in any shard is found, whichever rank looks at it.
TEST_F(Collective, EveryShardIsVerified) {
  Writer writer(world_, run_, 2);
  ASSERT_TRUE(save(writer, 1).ok);
  for (int r = 0; r < world_.size(); ++r) {
    const std::string path = fmt::format("{}/step-00000001/shard-{:05}.h5", run_, r);
    const std::string shard = slurp(path);
    const Shards shards = shards_of(model_, r, world_.size(), 1);
    const auto it =
        std::find_if(shards.memory.begin(), shards.memory.end(), [](const auto& m) { return m.size() >= 32; });
    world_.barrier();
    if (world_.rank() == 0) {
      std::string bad = shard;
      bad[bad.find(std::string(reinterpret_cast<const char*>(it->data()), 8))] ^= 1;
      spit(path, bad);
    }
    world_.barrier();
    const std::string error = checkpoint_error([&] { open_collective(world_, run_ + "/step-00000001"); });
    expect_parts(error, {fmt::format("shard-{:05}.h5", r), "XXH3-128"});
    world_.barrier();
    if (world_.rank() == 0) spit(path, shard);
    world_.barrier();
    open_collective(world_, run_ + "/step-00000001");
  }
}

TEST_F(Collective, AnUnusableRunFolderIsTheSameErrorOnAll) {
  if (world_.rank() == 0) spit(run_ + "/file", "x");
  world_.barrier();
  const std::string error = checkpoint_error([&] { Writer(world_, run_ + "/file", 2); });
  expect_parts(error, {run_ + "/file"});
  expect_same(error);
}

}  // namespace
}  // namespace annulus::checkpoint
