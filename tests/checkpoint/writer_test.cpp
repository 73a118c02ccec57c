// The writer's life: a second save while one runs, lost writers, a full disk, retention, replacing, setting aside.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <csignal>

#include <condition_variable>
#include <mutex>

#include "checkpoint/fault.h"
#include "child.h"
#include "fixture.h"
#include "hdf5_api.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;

class WriterTest : public ::testing::Test {
 protected:
  void TearDown() override { set_fault_hook(nullptr); }
  Outcome save(Writer& writer, std::int64_t step) {
    const Shards shards = shards_of(model_, 0, 1, static_cast<std::uint64_t>(step));
    std::string message;
    EXPECT_TRUE(writer.start(meta_of(step), shards.slices, message)) << message;
    return writer.wait_and_finish().value();
  }
  std::vector<std::string> committed() {
    std::vector<std::string> out;
    for (const auto& name : names_in(run_.path())) out.push_back(name);
    return out;
  }

  const std::vector<Tensor> model_ = small_model();
  const std::unique_ptr<parallel::Communicator> world_ = parallel::make_self_communicator();
  TempFolder run_;
};

TEST_F(WriterTest, CopiesThenWritesBehind) {
  Writer writer(*world_, run_ / "new/run/", 2);
  EXPECT_EQ(writer.status(), kIdle);
  EXPECT_FALSE(writer.wait_and_finish());
  std::string message;
  {
    Shards shards = shards_of(model_, 0, 1, 1);
    ASSERT_TRUE(writer.start(meta_of(1), shards.slices, message));
    for (auto& m : shards.memory) std::fill(m.begin(), m.end(), std::uint8_t{0xFF});  // the trainer steps on at once
  }
  const auto outcome = writer.wait_and_finish();
  ASSERT_TRUE(outcome && outcome->ok) << outcome->message;
  EXPECT_EQ(outcome->path, run_ / "new/run/step-00000001");
  EXPECT_EQ(outcome->step, 1);
  std::int64_t bytes = 0;
  for (const auto& name : names_in(outcome->path))
    bytes += static_cast<std::int64_t>(std::filesystem::file_size(outcome->path + "/" + name));
  EXPECT_EQ(outcome->bytes, bytes);
  expect_parts(outcome->message, {outcome->path, "MiB"});
  EXPECT_EQ(writer.status(), kIdle);
  const Checkpoint c = Checkpoint::open(outcome->path);
  c.verify();
  EXPECT_EQ(c.meta(), meta_of(1));
  expect_holds(c, model_, 1);
}

TEST_F(WriterTest, HostBufferIsTakenOnce) {
  Writer writer(*world_, run_.path(), 2);
  const Shards shards = shards_of(model_, 0, 1, 1);
  writer.reserve(shards.slices);
  const auto commits = Arena::num_commits();
  for (std::int64_t step = 1; step <= 3; ++step) EXPECT_TRUE(save(writer, step).ok);
  EXPECT_EQ(Arena::num_commits(), commits);
  std::int64_t values = 0;
  for (const Slice& s : shards.slices) values += s.data.bytes();
  EXPECT_GE(Writer::host_bytes(shards.slices), values);
  EXPECT_LE(Writer::host_bytes(shards.slices), values + 256 * static_cast<std::int64_t>(shards.slices.size()));
  // Other slices than the buffer was made for fail that save, and not the run.
  std::string message;
  ASSERT_TRUE(writer.start(meta_of(4), {shards.slices[0]}, message));
  EXPECT_EQ(writer.status(), kFailed);
  const Outcome outcome = writer.finish(kFailed);
  EXPECT_FALSE(outcome.ok);
  expect_parts(outcome.message, {"step 4", "rank 0", "host buffer"});
  EXPECT_TRUE(save(writer, 5).ok);
}

TEST_F(WriterTest, DeviceSlicesComeThroughTheCallersCopy) {
  const Shards shards = shards_of(model_, 0, 1, 1);
  auto on_device = shards.slices;
  for (Slice& s : on_device) s.data.device = DeviceKind::cuda;
  std::string message;
  {
    Writer writer(*world_, run_.path(), 2);
    ASSERT_TRUE(writer.start(meta_of(1), on_device, message));
    const auto outcome = writer.wait_and_finish();
    EXPECT_FALSE(outcome->ok);
    expect_parts(outcome->message, {"device"});
  }
  int fetched = 0, waited = 0, taken = 0;
  HostCopy copy;
  copy.allocator.take = [&](std::int64_t bytes) {
    ++taken;
    return cpu_allocator().take(bytes);
  };
  copy.fetch = [&](const TensorView& from, void* to) {
    ++fetched;
    std::memcpy(to, from.data, static_cast<std::size_t>(from.bytes()));
  };
  copy.wait = [&] { waited = fetched; };
  Writer writer(*world_, {run_.path(), 2, copy});
  ASSERT_TRUE(writer.start(meta_of(1), on_device, message));
  EXPECT_EQ(waited, static_cast<int>(on_device.size()));
  EXPECT_EQ(taken, 1);
  ASSERT_TRUE(writer.wait_and_finish()->ok);
  expect_holds(Checkpoint::open(run_ / "step-00000001"), model_, 1);
}

TEST_F(WriterTest, ASecondSaveWhileOneRuns) {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false, go = false;
  set_fault_hook([&](std::string_view point) {
    if (point != "after_first_dataset") return;
    std::unique_lock lock(mutex);
    reached = true;
    changed.notify_all();
    changed.wait(lock, [&] { return go; });
  });
  Writer writer(*world_, run_.path(), 2);
  const Shards first = shards_of(model_, 0, 1, 1), second = shards_of(model_, 0, 1, 2);
  std::string message;
  ASSERT_TRUE(writer.start(meta_of(1), first.slices, message));
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached; });
  }
  EXPECT_EQ(writer.status(), kRunning);
  EXPECT_FALSE(Writer::over(writer.status()));
  EXPECT_FALSE(writer.start(meta_of(2), second.slices, message));
  expect_parts(message, {"step 2", "save of step 1 still runs"});
  {
    const std::lock_guard lock(mutex);
    go = true;
  }
  changed.notify_all();
  while (writer.status() == kRunning) usleep(1000);
  EXPECT_EQ(writer.status(), kDone);
  EXPECT_FALSE(
      writer.start(meta_of(2), second.slices, message));  // done is not yet finished: all ranks answer the same
  EXPECT_TRUE(writer.finish(kDone).ok);
  set_fault_hook(nullptr);
  expect_holds(Checkpoint::open(run_ / "step-00000001"), model_, 1);
  EXPECT_TRUE(save(writer, 2).ok);
}

TEST_F(WriterTest, ALostWriterCostsOnlyItsSave) {
  Writer writer(*world_, run_.path(), 2);
  EXPECT_TRUE(save(writer, 1).ok);
  std::int64_t step = 2;
  for (const auto point : kFaultPoints) {
    if (point == "after_rename") break;  // from here on it is committed
    set_fault_hook([&](std::string_view p) {
      if (p == point) throw std::runtime_error("lost at " + std::string(p));
    });
    const Outcome outcome = save(writer, step);
    EXPECT_FALSE(outcome.ok) << point;
    expect_parts(outcome.message, {fmt::format("step {}", step), std::string(point), "older checkpoints stay"});
    EXPECT_EQ(committed(), std::vector<std::string>{"step-00000001"}) << point;
    EXPECT_EQ(writer.status(), kIdle);
    ++step;
  }
  // Trouble with older ones is said, and the new one stands.
  set_fault_hook([&](std::string_view p) {
    if (p == "before_prune") throw std::runtime_error("no pruning");
  });
  const Outcome outcome = save(writer, 90);
  EXPECT_TRUE(outcome.ok);
  expect_parts(outcome.message, {"step-00000090", "could not be pruned", "no pruning"});
}

TEST_F(WriterTest, KeepsTheNewest) {
  {
    Writer writer(*world_, run_.path(), 3);
    for (std::int64_t step = 1; step <= 5; ++step) EXPECT_TRUE(save(writer, step).ok);
  }
  EXPECT_EQ(committed(), (std::vector<std::string>{"step-00000003", "step-00000004", "step-00000005"}));
  EXPECT_THROW(Writer(*world_, run_.path(), 1), ConfigError);
}

TEST_F(WriterTest, NothingGoesBeforeTheNewOneStands) {
  std::vector<std::string> at_manifest;
  set_fault_hook([&](std::string_view point) {
    if (point == "after_manifest") at_manifest = committed();
  });
  Writer writer(*world_, run_.path(), 2);
  for (std::int64_t step = 1; step <= 3; ++step) EXPECT_TRUE(save(writer, step).ok);
  EXPECT_EQ(at_manifest, (std::vector<std::string>{"step-00000001", "step-00000002", "step-00000003.tmp"}));
}

TEST_F(WriterTest, DamagedOnesDoNotCountAndNewerOnesAreLeft) {
  {
    Writer writer(*world_, run_.path(), 2);
    EXPECT_TRUE(save(writer, 1).ok);
    EXPECT_TRUE(save(writer, 2).ok);
    spit(run_ / "step-00000002/shard-00000.h5", "cut");
    EXPECT_TRUE(save(writer, 3).ok);  // whole: 3 and 1
    EXPECT_EQ(committed(), (std::vector<std::string>{"step-00000001", "step-00000002", "step-00000003"}));
    save_as(1, run_ / "step-00000009", model_, 9);
    EXPECT_TRUE(save(writer, 4).ok);  // whole: 4 and 3; 9 is not this run's past
  }
  EXPECT_EQ(committed(), (std::vector<std::string>{"step-00000003", "step-00000004", "step-00000009"}));
}

TEST_F(WriterTest, ReplacesACheckpointOfTheSameStep) {
  save_as(2, run_ / "step-00000007", model_, 1);
  {
    Writer writer(*world_, run_.path(), 2);
    EXPECT_TRUE(save(writer, 7).ok);
  }
  EXPECT_EQ(committed(), std::vector<std::string>{"step-00000007"});
  const Checkpoint c = Checkpoint::open(run_ / "step-00000007");
  c.verify();
  expect_holds(c, model_, 7);
}

TEST_F(WriterTest, ClearsOnlyWhatIsItsOwn) {
  for (const char* name :
       {"step-00000001.tmp", ".trash-step-00000002", "step-1.tmp", "notes.tmp", "my-step-00000001.tmp"}) {
    std::filesystem::create_directories(run_ / name);
  }
  spit(run_ / "step-00000005.tmp", "a file");
  const Writer writer(*world_, run_.path(), 2);
  EXPECT_EQ(committed(),
            (std::vector<std::string>{"my-step-00000001.tmp", "notes.tmp", "step-00000005.tmp", "step-1.tmp"}));
}

TEST_F(WriterTest, AFolderThatCannotBeUsedIsAnErrorAtOnce) {
  spit(run_ / "file", "x");
  expect_parts(checkpoint_error([&] { Writer(*world_, run_ / "file", 2); }), {run_ / "file"});
  expect_parts(checkpoint_error([&] { Writer(*world_, run_ / "file/run", 2); }), {run_ / "file/run"});
}

TEST_F(WriterTest, AbandonedSaveIsClearedByTheNextRun) {
  std::string message;
  {
    Writer writer(*world_, run_.path(), 2);
    const Shards shards = shards_of(model_, 0, 1, 1);
    ASSERT_TRUE(writer.start(meta_of(1), shards.slices, message));
  }
  EXPECT_EQ(committed(), std::vector<std::string>{"step-00000001.tmp"});
  const Writer writer(*world_, run_.path(), 2);
  EXPECT_TRUE(committed().empty());
}

TEST_F(WriterTest, NewerOnesAreSetAside) {
  for (std::int64_t step : {1, 2, 3}) save_as(1, run_ / step_name(step), model_, step);
  const auto said = set_aside_newer(run_.path(), 1);
  ASSERT_EQ(said.size(), 2u);
  expect_parts(said[0], {"step-00000003", "aside-step-00000003"});
  save_as(1, run_ / step_name(3), model_, 3);
  expect_parts(set_aside_newer(run_.path(), 2).at(0), {"aside-step-00000003-1"});
  EXPECT_EQ(committed(), (std::vector<std::string>{"aside-step-00000002", "aside-step-00000003",
                                                   "aside-step-00000003-1", "step-00000001"}));
  Checkpoint::open(run_ / "aside-step-00000002").verify();
  std::vector<std::string> skipped;
  EXPECT_EQ(find_newest(run_.path(), skipped)->meta().step, 1);
}

TEST_F(WriterTest, NewestThatVerifiesAndWhyNotTheOthers) {
  std::vector<std::string> skipped;
  EXPECT_FALSE(find_newest(run_ / "nowhere", skipped));
  EXPECT_FALSE(find_newest(run_.path(), skipped));
  EXPECT_TRUE(skipped.empty());
  for (const std::int64_t step : {1, 2, 3, 4, 100000000}) save_as(2, run_ / step_name(step), model_, step);
  std::filesystem::remove(run_ / "step-100000000/manifest.json");
  spit(run_ / "step-00000004/shard-00001.h5", slurp(run_ / "step-00000004/shard-00001.h5").substr(100));
  std::string shard = slurp(run_ / "step-00000003/shard-00000.h5");
  const auto values = values_of(model_[0], 3);
  shard[shard.find(std::string(reinterpret_cast<const char*>(values.data()), 64))] ^= 1;
  spit(run_ / "step-00000003/shard-00000.h5", shard);
  const auto newest = find_newest(run_.path() + "/", skipped);
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run_ / "step-00000002");
  ASSERT_EQ(skipped.size(), 3u);
  expect_parts(skipped[0], {"step-100000000", "no manifest.json"});
  expect_parts(skipped[1], {"step-00000004", "shard-00001.h5", "bytes"});
  expect_parts(skipped[2], {"step-00000003", "shard-00000.h5", "XXH3-128"});

  EXPECT_EQ(resolve_model_path(run_.path()), run_ / "step-00000002");
  EXPECT_EQ(resolve_model_path(run_ / "step-00000003/"), run_ / "step-00000003");  // named: opening it will say
  EXPECT_TRUE(is_checkpoint(run_ / "step-00000003"));
  EXPECT_FALSE(is_checkpoint(run_.path()));
  EXPECT_TRUE(is_run_folder(run_.path()));
  EXPECT_FALSE(is_run_folder(run_ / "step-00000003"));
  expect_parts(checkpoint_error([&] { resolve_model_path(run_ / "nowhere"); }), {run_ / "nowhere", "not there"});
  expect_parts(checkpoint_error([&] { resolve_model_path(run_ / "step-100000000"); }), {"is none", "manifest.json"});
  std::filesystem::remove_all(run_ / "step-00000001");
  std::filesystem::remove_all(run_ / "step-00000002");
  expect_parts(checkpoint_error([&] { resolve_model_path(run_.path()); }),
               {"no checkpoint", "step-00000004 skipped", "step-00000003 skipped"});
}

// The files may not grow beyond a limit: the way a quota looks from inside, without being root. The second limit leaves
// room for the values, not for HDF5's own structure.
TEST_F(WriterTest, AWriteThatFailsIsSaidAndOlderOnesStay) {
  for (const rlim_t bytes : {rlim_t{6} << 20, (rlim_t{12} << 20) + 32768}) {
    SCOPED_TRACE(bytes);
    const TempFolder run;
    const ChildEnd end = run_in_child([&]() -> std::string {
      std::vector<float> values(3 << 20);
      std::vector<Slice> slices{{"model", "a", {3, 1 << 20}, 0, host_view(values.data(), {3 << 20})}};
      for (int i = 0; i < 1000; ++i)
        slices.push_back({"model", fmt::format("s{}", i), {1}, 0, host_view(values.data(), {1})});
      Writer writer(*world_, run.path(), 2);
      std::string message;
      if (!writer.start(meta_of(1), slices, message) || !writer.wait_and_finish()->ok) return "the first save failed";
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{bytes, RLIM_INFINITY};
      setrlimit(RLIMIT_FSIZE, &limit);
      if (!writer.start(meta_of(2), slices, message)) return message;
      const auto outcome = writer.wait_and_finish();
      if (outcome->ok) return "the second save did not fail";
      if (H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_FILE) != 0) return "HDF5 still holds the file";
      const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
      setrlimit(RLIMIT_FSIZE, &none);
      if (!writer.start(meta_of(3), slices, message) || !writer.wait_and_finish()->ok) return "the third save failed";
      return outcome->message;
    });
    EXPECT_EQ(end.signal, 0);
    expect_parts(end.text, {"step 2", "rank 0", "shard-00000.h5", "File too large", "older checkpoints stay"});
    EXPECT_EQ(names_in(run.path()), (std::vector<std::string>{"step-00000001", "step-00000003"}));
    for (const auto& name : names_in(run.path())) Checkpoint::open(run / name).verify();
  }
}

// A disk that is really full (a small tmpfs, where the system lets us mount one), for the values, or only for what HDF5
// writes when it closes the file. Either way it is said, and the space comes back.
TEST_F(WriterTest, AFullDiskIsSaidAndItsSpaceComesBack) {
  for (const bool values_fit : {false, true}) {
    SCOPED_TRACE(values_fit);
    const ChildEnd end = run_in_child([&]() -> std::string {
      if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          mount("tmpfs", run_.path().c_str(), "tmpfs", 0, "size=8m") != 0) {
        return "no mount";
      }
      const auto free_bytes = [&] {
        struct statvfs info;
        statvfs(run_.path().c_str(), &info);
        return static_cast<std::int64_t>(info.f_bfree * info.f_bsize);
      };
      std::vector<float> values(3 << 20);
      const auto save_one = [&](std::int64_t count, std::int64_t num_scalars, std::int64_t step) {
        std::vector<Slice> slices{{"model", "a", {count}, 0, host_view(values.data(), {count})}};
        for (std::int64_t i = 0; i < num_scalars; ++i)
          slices.push_back({"model", fmt::format("s{}", i), {1}, 0, host_view(values.data(), {1})});
        Writer writer(*world_, run_.path(), 2);
        std::string message;
        if (!writer.start(meta_of(step), slices, message)) return message;
        const auto outcome = writer.wait_and_finish();
        return outcome->ok ? std::string("ok") : outcome->message;
      };
      if (const auto first = save_one(1000, 0, 1); first != "ok") return first;
      const auto before = free_bytes();
      const std::string full = values_fit ? save_one((before - 65536) / 4, 1000, 2) : save_one(3 << 20, 0, 2);
      if (free_bytes() != before) return "space is still taken";
      if (H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_FILE) != 0) return "HDF5 still holds the file";  // and may crash on it
      if (const auto third = save_one(1000, 0, 3); third != "ok") return "third: " + third;
      std::vector<std::string> skipped;
      if (find_newest(run_.path(), skipped)->meta().step != 3 || names_in(run_.path()).size() != 2)
        return "step 3 is not there";
      return full;
    });
    if (end.text == "no mount") GTEST_SKIP() << "mounting a tmpfs needs privileges";
    EXPECT_EQ(end.signal, 0);
    expect_parts(end.text, {"step 2", "rank 0", "shard-00000.h5", "No space left on device", "older checkpoints stay"});
  }
}

}  // namespace
}  // namespace annulus::checkpoint
