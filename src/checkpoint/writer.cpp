#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "checkpoint/exchange.h"
#include "checkpoint/fault.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/new_folder.h"
#include "checkpoint/save.h"
#include "checkpoint/store.h"

namespace annulus::checkpoint {
namespace {

// Runs jobs one after another on a thread that takes no signals (the main thread's handlers own them).
class Worker {
 public:
  Worker() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { loop(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void post(std::function<void()> job) {  // jobs do not throw
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
  }
  void run(const std::function<void()>& job) {  // after what was posted; returns when done
    bool done = false;
    post([&] {
      job();
      const std::lock_guard lock(mutex_);
      done = true;
    });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done; });
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;  // what was posted is done even when stopping
      const auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_;
};

// What kept `work` from being done; empty: nothing.
std::string error_of(const std::function<void()>& work) {
  try {
    work();
    return "";
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown exception";
  }
}

std::string human_bytes(std::int64_t bytes) {
  constexpr double kMiB = 1 << 20;
  const double mib = static_cast<double>(bytes) / kMiB;
  return mib < 1024 ? fmt::format("{:.1f} MiB", mib) : fmt::format("{:.2f} GiB", mib / 1024);
}

using Clock = std::chrono::steady_clock;

}  // namespace

std::string step_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

struct Writer::Impl {
  Impl(parallel::Communicator& comm, Options o) : world(comm), options(std::move(o)) {}

  parallel::Communicator& world;
  Options options;

  // The save in flight. `error` and `report` belong to the worker while status is kRunning.
  bool in_flight = false;  // from start() to finish(): equal on all ranks
  std::atomic<std::int64_t> status{kIdle};
  std::atomic<bool> cancel{false};
  Meta meta;
  std::vector<Slice> slices;  // views of the host buffer
  ShardReport report;
  std::string error;
  Clock::time_point started;

  std::unique_ptr<Arena> buffer;
  std::vector<TensorView> views;  // of the buffer, one per slice
  Worker worker;                  // last: its thread ends before what it uses

  std::string folder(std::int64_t step) const { return options.run_dir + "/" + step_name(step); }
  void clean_run_folder() const;
  void reserve(const std::vector<Slice>& from);
  void copy(const std::vector<Slice>& from);
  void write() noexcept;
  Outcome conclude(const std::vector<std::string>& reports);
  Outcome commit_all(const std::vector<std::string>& reports, std::vector<std::string>& trash);
  void discard(const std::vector<std::string>& trash);
};

void Writer::Impl::clean_run_folder() const {
  make_folders(options.run_dir);
  for (const RunEntry& entry : list_run(options.run_dir)) {
    const std::string path = options.run_dir + "/" + entry.name;
    if (entry.kind != RunEntry::Kind::committed && !delete_tree(path)) {
      throw CheckpointError(fmt::format("{}: left by an interrupted save, cannot be removed", path));
    }
  }
}

void Writer::Impl::reserve(const std::vector<Slice>& from) {
  auto arena = std::make_unique<Arena>("checkpoint copy", DeviceKind::cpu, options.copy.allocator);
  for (const Slice& s : from) arena->allocate("slice", s.data.dtype, {s.data.numel()});
  arena->commit();
  views.clear();
  for (const Slice& s : from) views.push_back(arena->allocate("slice", s.data.dtype, {s.data.numel()}));
  buffer = std::move(arena);
}

void Writer::Impl::copy(const std::vector<Slice>& from) {
  check_slices(from);
  if (!buffer) reserve(from);
  const bool same = from.size() == views.size() &&
                    std::equal(from.begin(), from.end(), views.begin(), [](const Slice& s, const TensorView& v) {
                      return s.data.dtype == v.dtype && s.data.numel() == v.numel();
                    });
  if (!same) throw CheckpointError("the slices of this save are not those that the host buffer was made for");
  slices = from;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (options.copy.fetch) {
      options.copy.fetch(from[i].data, views[i].data);
    } else if (views[i].bytes() > 0) {
      ANNULUS_CHECK(from[i].data.device == DeviceKind::cpu, "{}/{} lies on a device: HostCopy::fetch is needed",
                    from[i].group, from[i].tensor);
      std::memcpy(views[i].data, from[i].data.data, static_cast<std::size_t>(views[i].bytes()));
    }
    slices[i].data = views[i];
  }
  if (options.copy.wait) options.copy.wait();
}

void Writer::Impl::write() noexcept {
  error = error_of([&] {
    report =
        write_shard({folder(meta.step) + ".tmp", world.rank(), meta.step, slices, [this] { return cancel.load(); }});
  });
  status = error.empty() ? kDone : kFailed;
}

Outcome Writer::Impl::commit_all(const std::vector<std::string>& reports, std::vector<std::string>& trash) {
  std::vector<ShardReport> parsed;
  for (const std::string& text : reports) parsed.push_back(parse_report(text.substr(1)));
  Outcome out{true, "", folder(meta.step), meta.step, 0, 0};
  const std::string displaced = options.run_dir + "/.trash-" + step_name(meta.step);
  delete_tree(displaced);
  const std::string tmp = out.path + ".tmp";
  out.bytes = commit(
      tmp, [&] { commit_rename(tmp, out.path, displaced); }, meta, std::move(parsed));
  if (exists(displaced)) trash.push_back(displaced);
  out.seconds = std::chrono::duration<double>(Clock::now() - started).count();
  out.message = fmt::format("checkpoint {} written: {} in {:.1f} s", out.path, human_bytes(out.bytes), out.seconds);

  // The checkpoint stands; what goes wrong from here on is said, but it is no failure of the save.
  const std::string warning = error_of([&] {
    reach("before_prune", 0, meta.step);
    for (std::string& path : prune(options.run_dir, meta.step, options.keep)) trash.push_back(std::move(path));
    if (!trash.empty()) reach("during_prune", 0, meta.step);
  });
  if (!warning.empty()) out.message += fmt::format("; older ones could not be pruned: {}", warning);
  return out;
}

// Rank 0: every rank's report, a mark and a text: "+" and what it wrote, or "!" and what went wrong.
Outcome Writer::Impl::conclude(const std::vector<std::string>& reports) {
  std::vector<std::string> trash;
  Outcome out;
  std::string failure;
  for (std::size_t r = 0; r < reports.size() && failure.empty(); ++r) {
    if (reports[r].starts_with('!')) failure = fmt::format("rank {}: {}", r, reports[r].substr(1));
  }
  worker.run([&] {
    if (failure.empty()) failure = error_of([&] { out = commit_all(reports, trash); });
    if (failure.empty()) return;
    const std::string tmp = folder(meta.step) + ".tmp";
    out = {
        false, fmt::format("the checkpoint of step {} was not written: {}; older checkpoints stay", meta.step, failure),
        "",    meta.step,
        0,     0};
    bool cleared = true;
    const std::string trouble = error_of([&] { cleared = delete_tree(tmp); });
    if (!cleared || !trouble.empty()) out.message += fmt::format("; {} could not be removed", tmp);
  });
  discard(trash);
  return out;
}

void Writer::Impl::discard(const std::vector<std::string>& trash) {
  if (trash.empty()) return;
  worker.post([trash, step = meta.step] {
    for (const std::string& path : trash) {  // what stays goes when the next Writer of the run folder is made
      error_of([&] { delete_tree(path, [&] { reach("mid_delete", 0, step); }); });
    }
  });
}

Writer::Writer(parallel::Communicator& world, Options options) {
  if (options.keep < 2) {
    throw ConfigError(
        fmt::format("checkpoint.keep is {}: at least 2 are kept, since the newest may be damaged by what ends the run",
                    options.keep));
  }
  check_fault_environment();
  while (options.run_dir.size() > 1 && options.run_dir.ends_with('/')) options.run_dir.pop_back();
  impl_ = std::make_unique<Impl>(world, std::move(options));
  agree(world, [&] {
    if (world.rank() == 0) impl_->clean_run_folder();
  });
}

Writer::~Writer() { impl_->cancel = true; }

std::int64_t Writer::host_bytes(const std::vector<Slice>& slices) {
  Arena plan("checkpoint copy", DeviceKind::cpu);
  for (const Slice& s : slices) plan.allocate("slice", s.data.dtype, {s.data.numel()});
  return plan.planned_bytes();
}

void Writer::reserve(const std::vector<Slice>& slices) {
  ANNULUS_CHECK(!impl_->buffer, "the checkpoint writer's host buffer is made once");
  check_slices(slices);
  impl_->reserve(slices);
}

bool Writer::start(const Meta& meta, const std::vector<Slice>& slices, std::string& message) {
  Impl& s = *impl_;
  if (s.in_flight) {
    message = fmt::format(
        "the checkpoint of step {} is not written: the save of step {} still runs; save less often or to a faster disk",
        meta.step, s.meta.step);
    return false;
  }
  s.in_flight = true;
  s.cancel = false;
  s.started = Clock::now();
  s.meta = meta;
  s.report = {};
  s.status = kRunning;
  s.error = error_of([&] { s.copy(slices); });
  if (s.error.empty()) {
    s.worker.post([&s] { s.write(); });
  } else {
    s.status = kFailed;
  }
  return true;
}

std::int64_t Writer::status() const { return impl_->status; }

Outcome Writer::finish(std::int64_t reduced_max) {
  Impl& s = *impl_;
  ANNULUS_CHECK(s.in_flight && over(reduced_max), "no save is over (status {})", reduced_max);
  if (reduced_max == kFailed) s.cancel = true;  // ranks that still write give up
  s.worker.run([] {});
  const std::string point_error = error_of([&] { reach("before_gather", s.world.rank(), s.meta.step); });
  if (s.error.empty()) s.error = point_error;
  const auto reports = gather_texts(s.world, s.error.empty() ? "+" + to_text(s.report) : "!" + s.error);

  Outcome out;
  if (s.world.rank() == 0) out = s.conclude(reports);
  Context ctx;
  double numbers[] = {out.ok ? 1.0 : 0.0, out.seconds};
  s.world.wait(ctx, s.world.broadcast(ctx, host_view(numbers, {2}), 0));
  s.world.wait(ctx, s.world.broadcast(ctx, host_view(&out.bytes, {1}), 0));
  out.ok = numbers[0] != 0;
  out.seconds = numbers[1];
  out.message = broadcast_text(s.world, out.message);
  out.path = broadcast_text(s.world, out.path);
  out.step = s.meta.step;
  s.status = kIdle;
  s.in_flight = false;
  return out;
}

std::optional<Outcome> Writer::wait_and_finish() {
  Impl& s = *impl_;
  if (!s.in_flight) return std::nullopt;
  s.worker.run([] {});
  return finish(reduce_max(s.world, s.status));
}

std::int64_t write_folder(const std::string& folder, const Meta& meta, const std::vector<Slice>& slices) {
  check_slices(slices);
  NewFolder out(folder);
  return commit(out.tmp(), [&] { out.commit(); }, meta, {write_shard({out.tmp(), 0, meta.step, slices, {}})});
}

}  // namespace annulus::checkpoint
