// Heartbeat: where each rank of a host is, published outside MPI, so that a rank that hangs can be named when every MPI
// call of every other rank waits for it (parallel/watchdog.h reads it).
//
// One slot per rank of the host lies in a shared file (mmap). The main thread of each rank writes its own slot; writes
// are lock-free: a sequence counter is odd while the fields change, so that a reader never sees halves of two
// positions. A publication costs some ten nanoseconds, a touch one. Without a Heartbeat every static call does nothing.
//
// Who is behind: ranks run the same program, so publish() (through Context::at) must be called in the same order on
// every rank; each call counts, and (step, calls since the step began) orders the ranks without knowing what a phase
// is, that layers run backwards in backward, or that recompute visits hops twice. Work of one rank alone (rank 0
// writing a log or a checkpoint) calls touch() and no other.
//
// What counts as moving: publications and touches. touch() is for long work that does move: kernels call it between
// tiles (with mpi_progress in Context::progress), file reading and writing between pieces. Waiting for other ranks
// never touches, else a rank that waits for ever would look alive; it sets `waiting` instead, so that in a job where
// nobody moves the rank that is not waiting is the one to name. Anything that takes longer than the watchdog's time
// without a touch is taken for a hang: on GPUs, where the host waits for a whole step, that time must exceed the
// longest step.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/communicator.h"

namespace annulus::parallel {

struct Position {
  std::int64_t step = 0;
  Phase phase = Phase::setup;
  std::int32_t layer = -1, hop = -1;  // −1: not in one
};
std::string to_string(const Position& position);  // "step 12, forward, layer 3, hop 1"

class Heartbeat {
 public:
  // Collective over `host`, the ranks on this host (MpiRuntime::host()). `path`: a file name of this run and this host,
  // where a file can be made and mapped; it is removed again as soon as all have mapped it, so that nothing stays
  // behind however the job ends. Throws Error on every rank when it cannot be made. One per process at a time.
  Heartbeat(Communicator& host, int world_rank, int world_size, const std::string& path);
  ~Heartbeat();  // publishes `finished`: others no longer expect this rank to move
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Main thread only.
  static void publish(std::int64_t step, Phase phase, int layer = -1, int hop = -1) {
    if (current_) write({step, phase, layer, hop});
  }
  static void touch() {
    if (current_)
      current_->touches.store(current_->touches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  class Waiting {  // set around waits for other ranks; may nest
   public:
    Waiting() { add(1); }
    ~Waiting() { add(-1); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    static void add(int n) {
      if (current_)
        current_->waiting.store(current_->waiting.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
    }
  };

  struct SlotState {  // one slot as read; `moves` changes whenever the rank published or touched
    Position position;
    std::int64_t order = 0;    // publications since the step began
    std::int64_t time_ns = 0;  // of the last publication, CLOCK_MONOTONIC
    std::uint64_t moves = 0, watchdog_beats = 0;
    int world_rank = -1;
    bool present = false, waiting = false;
    bool whole = false;  // false: the rank lost its core, or was stopped, in the middle of a publication
  };

  // Any thread.
  std::vector<SlotState> read() const;
  void watchdog_beat();  // by this process's watchdog: the process itself runs
  bool claim_report();   // true for one caller on this host
  int local_rank() const { return local_rank_; }
  bool host_has_all() const { return num_slots_ == world_size_; }

 private:
  struct Slot {  // own cache lines for what different threads write
    alignas(64) std::atomic<std::uint64_t> sequence;
    std::atomic<std::int64_t> step, order, time_ns;
    std::atomic<std::int32_t> phase, layer, hop, world_rank;
    alignas(64) std::atomic<std::uint64_t> touches;
    std::atomic<std::int32_t> waiting;
    alignas(64) std::atomic<std::uint64_t> watchdog_beats;
  };
  static_assert(std::atomic<std::int64_t>::is_always_lock_free && std::atomic<std::int32_t>::is_always_lock_free);

  struct Header {
    alignas(64) std::atomic<std::uint32_t> reported;
  };
  static void write(const Position& position);
  Header& header() const { return *static_cast<Header*>(memory_); }
  Slot& slot(int local_rank) const;
  std::string map(const std::string& path, bool create);  // an error's text, or empty

  static Slot* current_;  // this process's slot
  int local_rank_, num_slots_, world_size_;
  std::size_t bytes_;
  void* memory_ = nullptr;
};

}  // namespace annulus::parallel
