// What a run says: metrics.jsonl (one object a line, flushed) and the progress line or live bar. Rank 0 only; others
// make none. Not collective.
#pragma once

#include <cstdint>
#include <string>

namespace annulus::train {

struct StepRecord {
  std::int64_t step = 0, steps = 0;  // steps done, of how many
  double loss = 0, grad_norm = 0, lr = 0;
  double seconds = 0;            // of the step
  double tokens_per_second = 0;  // of all ranks
  double mfu = 0;                // of the peak that the run named at its start, executed operations
  double dense_mfu = 0;          // sparse layers counted as dense ones would be; 0: there are none
  double memory_gib = 0;         // this rank's peak
  std::int64_t tokens_seen = 0;
};

struct EvalRecord {
  std::int64_t step = 0;
  double loss = 0, bits_per_byte = 0;  // bits_per_byte < 0: the documents have no bytes
  std::int64_t tokens = 0;
};

class Metrics {
 public:
  // Appends to `path` after cutting records of steps after `resumed_step` (and a torn last line); CheckpointError where
  // that cannot be done. Losses and norms are written with all their bits. bar: a live bar where stdout is a terminal.
  Metrics(const std::string& path, std::int64_t resumed_step, bool bar);
  ~Metrics();
  Metrics(const Metrics&) = delete;

  void step(const StepRecord& record);
  void eval(const EvalRecord& record);
  void note(const std::string& text);   // a line of its own on stdout, never inside the bar
  void event(const std::string& json);  // a record as it stands; where the disk is full it is left out, which is said

 private:
  void clear_bar();
  std::string path_;
  int file_ = -1;
  std::int64_t size_ = 0;
  bool warned_ = false;
  bool bar_ = false, bar_drawn_ = false;
  double smoothed_seconds_ = 0;
};

std::string format_step(const StepRecord& record, double seconds_per_step);  // the progress line
std::string format_duration(double seconds);                                 // "12m", "1h 05m"

}  // namespace annulus::train
