// The trainer: the loop around Engine (docs/tour.md walks through it). Collective over the runtime's world.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/run_lock.h"
#include "train/batches.h"
#include "train/config.h"
#include "train/metrics.h"
#include "train/session.h"

namespace annulus::train {

class Trainer {
 public:
  // Validates, opens data, plans and takes memory, and goes on from a checkpoint if there is one. Throws the user
  // errors of spec/cli.md.
  Trainer(const RunConfig& config, parallel::MpiRuntime& runtime);
  ~Trainer();

  // Trains to the end. Returns 0, or 75 after a signal, when a checkpoint was saved. Throws DivergedError when a loss
  // or gradient is not finite (the step is refused first).
  int run();

  // One step; `done` counts steps done before it. For tests and benches as well.
  StepResult step(std::int64_t done);
  const BatchLoader& batches() const { return *batches_; }
  Engine& engine() { return session_.engine(); }
  std::int64_t steps_done() const { return done_; }

 private:
  struct Start {                                   // checked, nothing taken
    std::optional<checkpoint::Checkpoint> resume;  // or
    std::optional<Model> weights;                  // or neither
  };
  Start find_start(std::vector<std::string>& notes);
  void begin(const Start& start, std::vector<std::string>& notes);
  bool synchronize_ranks();  // the step's host reduction: true when some rank was told to stop
  void report(const StepResult& result, double seconds);
  void evaluate_validation();
  void save();
  void finish_save(const checkpoint::Outcome& outcome);
  void check_saves() const;  // throws where the disk holds less than was asked for
  [[noreturn]] void refuse(const StepResult& result);
  std::int64_t tokens_seen() const;
  void print_start(const std::vector<std::string>& notes);
  bool root() const { return runtime_.world().rank() == 0; }
  void note(const std::string& text);
  checkpoint::Meta meta() const;

  RunConfig config_;
  parallel::MpiRuntime& runtime_;
  Session session_;
  data::TrainingData data_;
  std::unique_ptr<data::ScoringData> validation_;
  std::unique_ptr<BatchLoader> batches_;
  std::unique_ptr<checkpoint::RunLock> lock_;  // rank 0
  std::unique_ptr<checkpoint::Writer> writer_;
  std::unique_ptr<Metrics> metrics_;  // rank 0
  std::vector<checkpoint::Slice> slices_;
  std::int64_t done_ = 0;                   // steps
  std::int64_t targets_ = 0;                // of the last step
  std::string last_whole_;                  // the newest checkpoint that is known to be whole; empty: none
  std::vector<std::int64_t> failed_saves_;  // their steps
  bool last_save_failed_ = false;
  double peak_flops_ = 0;  // per rank, MFU's denominator
};

// The subcommand: trains with the watchdog running. Returns the exit code.
int run_training(const RunConfig& config, parallel::MpiRuntime& runtime);

}  // namespace annulus::train
