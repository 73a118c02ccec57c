#include "parallel/watchdog.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <tuple>

namespace annulus::parallel {
namespace {

bool running(const Heartbeat::SlotState& s) { return s.present && s.position.phase != Phase::finished; }

}  // namespace

std::optional<std::string> HangDetector::observe(const std::vector<Heartbeat::SlotState>& slots, double elapsed) {
  seen_.resize(slots.size());
  bool any = false, stuck = false, all_quiet = true;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Seen& seen = seen_[i];
    seen.quiet = slots[i].moves != seen.moves ? 0 : seen.quiet + elapsed;
    seen.beatless = slots[i].watchdog_beats != seen.beats ? 0 : seen.beatless + elapsed;
    seen.moves = slots[i].moves;
    seen.beats = slots[i].watchdog_beats;
    if (!running(slots[i])) continue;
    any = true;
    if (seen.quiet < seconds_) all_quiet = false;
    else if (!slots[i].waiting) stuck = true;
  }
  if (any && (stuck || all_quiet)) return report(slots);
  return std::nullopt;
}

std::size_t HangDetector::culprit(const std::vector<Heartbeat::SlotState>& slots) const {
  const auto key = [&](std::size_t i) {
    const auto& s = slots[i];
    return std::tuple(!(running(s) && seen_[i].quiet >= seconds_), !stopped(i), s.waiting, s.position.step, s.order,
                      s.time_ns);
  };
  std::size_t worst = 0;
  for (std::size_t i = 1; i < slots.size(); ++i) {
    if (key(i) < key(worst)) worst = i;
  }
  return worst;
}

std::string HangDetector::report(const std::vector<Heartbeat::SlotState>& slots) const {
  const std::size_t named = culprit(slots);
  const auto line = [&](std::size_t i) {
    const auto& s = slots[i];
    const char* how = stopped(i) ? " (its process is stopped)" : s.waiting ? " (waiting for other ranks)" : "";
    return fmt::format("{}{}", to_string(s.position), how);
  };
  std::string text = fmt::format("watchdog: rank {} has not moved for {:.0f} s: {}\n", slots[named].world_rank,
                                 seen_[named].quiet, line(named));
  if (slots[named].waiting && !stopped(named)) {
    text += host_has_all_ ? "watchdog: every rank waits for another\n"
                          : "watchdog: every rank of this host waits; the rank that hangs is on another host\n";
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (i == named || !slots[i].present) continue;
    text +=
        fmt::format("watchdog: rank {} is at {}, silent for {:.0f} s\n", slots[i].world_rank, line(i), seen_[i].quiet);
  }
  return text + "watchdog: ending the job with exit code 6\n";
}

Watchdog::Watchdog(Heartbeat& heartbeat, double seconds, double period, std::function<void(const std::string&)> on_hang)
    : heartbeat_(heartbeat),
      detector_(seconds, heartbeat.host_has_all()),
      period_(period),
      on_hang_(std::move(on_hang)) {
  ANNULUS_CHECK(period > 0, "the watchdog looks every {} s", period);
  if (seconds <= 0) return;
  // Signals are the main thread's business: the new thread inherits a full mask.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::run() {
  using Clock = std::chrono::steady_clock;
  auto last = Clock::now();
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::duration<double>(period_), [this] { return stop_; })) {
    heartbeat_.watchdog_beat();
    const auto now = Clock::now();
    // A longer gap means that this thread did not run, so that nothing can be said about the others in it.
    const double elapsed = std::min(std::chrono::duration<double>(now - last).count(), 4 * period_);
    last = now;
    const auto report = detector_.observe(heartbeat_.read(), elapsed);
    if (!report) continue;
    if (!on_hang_) leave(*report);
    on_hang_(*report);
    return;
  }
}

void Watchdog::leave(const std::string& report) {
  if (heartbeat_.claim_report()) {
    // One write(2): stdio may be locked by a thread that hangs.
    if (::write(STDERR_FILENO, report.data(), report.size()) < 0) ::_exit(6);
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the one that reports goes first
  }
  ::_exit(6);
}

}  // namespace annulus::parallel
