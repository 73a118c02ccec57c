// Watchdog: a thread that ends the job with exit code 6 when a rank of its host hangs, and says which rank and where.
// It makes no MPI call; it reads the heartbeats (parallel/heartbeat.h) of all ranks of the host.
//
// Each rank runs one, so that a stopped process is noticed by its neighbours; the first to notice prints once for the
// host and leaves by _exit(6), the others follow, mpirun kills the rest (also a stopped rank) and returns 6.
//
// A hang is declared when, for `seconds`, a rank that does not wait for others has not moved, or when no rank of the
// host has (then the rank that hangs may be on another host, which the message says). A rank that waits while another
// rank of the host moves is not a hang: that is how a slow step, or one rank writing a checkpoint, looks. Time counts
// only while the watchdog itself runs: a job that is stopped and continued, or a host that sleeps, does not trip it.
// Named is, among the ranks that have not moved: one whose process is stopped (its watchdog does not beat), else one
// that does not wait, else the furthest behind, else the one that has been silent longest.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "parallel/heartbeat.h"

namespace annulus::parallel {

// The decision, without thread or clock.
class HangDetector {
 public:
  HangDetector(double seconds, bool host_has_all) : seconds_(seconds), host_has_all_(host_has_all) {}
  // `elapsed`: seconds since the last call. Returns the report when a rank hangs.
  std::optional<std::string> observe(const std::vector<Heartbeat::SlotState>& slots, double elapsed);

 private:
  struct Seen {
    std::uint64_t moves = 0, beats = 0;
    double quiet = 0, beatless = 0;  // seconds
  };
  std::size_t culprit(const std::vector<Heartbeat::SlotState>& slots) const;
  std::string report(const std::vector<Heartbeat::SlotState>& slots) const;
  bool stopped(std::size_t i) const { return seen_[i].beatless >= std::min(1.5, seconds_ / 2); }

  double seconds_;
  bool host_has_all_;
  std::vector<Seen> seen_;
};

class Watchdog {
 public:
  // seconds <= 0: off. on_hang: by default prints to stderr and leaves. Not collective; `heartbeat` must outlive it.
  Watchdog(Heartbeat& heartbeat, double seconds, double period = 0.25,
           std::function<void(const std::string& report)> on_hang = nullptr);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void run();
  [[noreturn]] void leave(const std::string& report);

  Heartbeat& heartbeat_;
  HangDetector detector_;
  double period_;
  std::function<void(const std::string&)> on_hang_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace annulus::parallel
