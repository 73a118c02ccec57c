#include "parallel/heartbeat.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace annulus::parallel {

Heartbeat::Slot* Heartbeat::current_ = nullptr;

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

std::int64_t coarse_time_ns() {  // to about 4 ms, for a few nanoseconds
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

std::string to_string(const Position& p) {
  std::string text = fmt::format("step {}, {}", p.step, name_of(p.phase));
  if (p.layer >= 0) text += fmt::format(", layer {}", p.layer);
  if (p.hop >= 0) text += fmt::format(", hop {}", p.hop);
  return text;
}

Heartbeat::Heartbeat(Communicator& host, int world_rank, int world_size, const std::string& path)
    : local_rank_(host.rank()),
      num_slots_(host.size()),
      world_size_(world_size),
      bytes_(sizeof(Header) + sizeof(Slot) * static_cast<std::size_t>(host.size())) {
  ANNULUS_CHECK(!current_, "a process has one Heartbeat");
  Context ctx;
  const auto all_good = [&](bool good) {
    std::int32_t flag = good;
    host.wait(ctx, host.all_reduce(ctx, host_view(&flag, {1}), ReduceOp::min));
    return flag != 0;
  };
  std::string error;
  if (local_rank_ == 0) error = map(path, true);
  bool good = all_good(error.empty());
  if (good && local_rank_ != 0) error = map(path, false);
  good = all_good(error.empty()) && good;
  if (local_rank_ == 0) ::unlink(path.c_str());  // the mapping lives on
  if (!good) {
    if (memory_) ::munmap(memory_, bytes_);
    throw Error(fmt::format("the heartbeat file {} cannot be shared on this host: {}", path,
                            error.empty() ? "another rank could not" : error));
  }
  slot(local_rank_).world_rank.store(world_rank, kRelaxed);
  current_ = &slot(local_rank_);
  write({});
}

Heartbeat::~Heartbeat() {
  write({current_->step.load(kRelaxed), Phase::finished});
  current_ = nullptr;
  ::munmap(memory_, bytes_);
}

std::string Heartbeat::map(const std::string& path, bool create) {
  const auto failed = [&](const char* call) { return fmt::format("{}: {}", call, std::strerror(errno)); };
  if (create) ::unlink(path.c_str());  // of an earlier run that died in between
  const int file = ::open(path.c_str(), create ? O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC : O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return failed("open");
  std::string error;
  if (create && ::ftruncate(file, static_cast<off_t>(bytes_)) != 0) error = failed("ftruncate");
  if (error.empty()) {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory_ == MAP_FAILED) {
      memory_ = nullptr;
      error = failed("mmap");
    }
  }
  ::close(file);
  if (create && memory_) {
    new (memory_) Header{};
    for (int i = 0; i < num_slots_; ++i) new (&slot(i)) Slot{};
  }
  return error;
}

Heartbeat::Slot& Heartbeat::slot(int local_rank) const {
  return *(reinterpret_cast<Slot*>(static_cast<std::byte*>(memory_) + sizeof(Header)) + local_rank);
}

void Heartbeat::write(const Position& position) {
  Slot& s = *current_;
  const auto sequence = s.sequence.load(kRelaxed);
  const bool same_step = s.step.load(kRelaxed) == position.step;
  s.sequence.store(sequence + 1, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  s.order.store(same_step ? s.order.load(kRelaxed) + 1 : 0, kRelaxed);
  s.step.store(position.step, kRelaxed);
  s.phase.store(static_cast<std::int32_t>(position.phase), kRelaxed);
  s.layer.store(position.layer, kRelaxed);
  s.hop.store(position.hop, kRelaxed);
  s.time_ns.store(coarse_time_ns(), kRelaxed);
  s.sequence.store(sequence + 2, std::memory_order_release);
}

std::vector<Heartbeat::SlotState> Heartbeat::read() const {
  std::vector<SlotState> states(static_cast<std::size_t>(num_slots_));
  for (int i = 0; i < num_slots_; ++i) {
    const Slot& s = slot(i);
    SlotState& out = states[static_cast<std::size_t>(i)];
    std::uint64_t sequence = 0;
    // A rank stopped in the middle of a publication leaves its counter odd for ever: then halves must do.
    for (int tries = 0; tries < 200 && !out.whole; ++tries) {
      if (tries > 100) ::sched_yield();  // the writer may have lost its core
      sequence = s.sequence.load(std::memory_order_acquire);
      out.position = {s.step.load(kRelaxed), static_cast<Phase>(s.phase.load(kRelaxed)), s.layer.load(kRelaxed),
                      s.hop.load(kRelaxed)};
      out.order = s.order.load(kRelaxed);
      out.time_ns = s.time_ns.load(kRelaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      out.whole = sequence % 2 == 0 && s.sequence.load(kRelaxed) == sequence;
    }
    out.moves = sequence + s.touches.load(kRelaxed);
    out.watchdog_beats = s.watchdog_beats.load(kRelaxed);
    out.world_rank = s.world_rank.load(kRelaxed);
    out.present = sequence != 0;
    out.waiting = s.waiting.load(kRelaxed) > 0;
  }
  return states;
}

void Heartbeat::watchdog_beat() {
  auto& beats = slot(local_rank_).watchdog_beats;
  beats.store(beats.load(kRelaxed) + 1, kRelaxed);
}

bool Heartbeat::claim_report() {
  std::uint32_t free = 0;
  return header().reported.compare_exchange_strong(free, 1);
}

}  // namespace annulus::parallel
