#include "train/trainer.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "parallel/agreement.h"
#include "parallel/heartbeat.h"
#include "parallel/watchdog.h"
#include "train/evaluate.h"
#include "train/peak.h"
#include "train/signals.h"
#include "train/state.h"

namespace annulus::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

RunConfig validated(RunConfig config, parallel::MpiRuntime& runtime) {
  config.resolve_and_validate(runtime.world().size());
  const std::string text = to_toml(config);
  parallel::check_equal(runtime.world(), "configuration", std::as_bytes(std::span(text)));
  return config;
}

// Steps begun, for the heartbeat: Context knows the place within a step only.
std::int64_t published_step = 0;

void publish(const Place& place) { parallel::Heartbeat::publish(published_step, place.phase, place.layer, place.hop); }

void move_messages() {
  parallel::Heartbeat::touch();
  parallel::mpi_progress();
}

CheckpointError no_whole_checkpoint(const std::string& dir, const std::vector<std::string>& reasons) {
  std::string text;
  for (const auto& reason : reasons) text += "\n  " + reason;
  return CheckpointError(
      fmt::format("{}: no checkpoint of this run folder is whole; move it away to start anew:{}", dir, text));
}

void write_resolved(const RunConfig& config) {
  const std::string path = config.checkpoint.dir + "/config.toml";
  std::ofstream out(path);
  out << to_toml(config) << std::flush;
  if (!out) throw CheckpointError(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
}

// A name that the ranks of this host agree on, in memory where there is /dev/shm.
std::string heartbeat_path(parallel::Communicator& host) {
  std::int64_t pid = getpid();
  Context ctx;
  host.wait(ctx, host.broadcast(ctx, host_view(&pid, {1}), 0));
  const std::filesystem::path shared = "/dev/shm";
  const auto folder = std::filesystem::is_directory(shared) ? shared : std::filesystem::temp_directory_path();
  return folder / fmt::format("annulus-heartbeat-{}", pid);
}

}  // namespace

Trainer::Trainer(const RunConfig& config, parallel::MpiRuntime& runtime)
    : config_(validated(config, runtime)),
      runtime_(runtime),
      session_(config_, runtime, /*training=*/true),
      data_(config_.data, config_.model.vocab_size, config_.train.sequence_length,
            static_cast<std::uint64_t>(config_.train.seed)) {
  if (!config_.data.validation.empty()) {
    validation_ = std::make_unique<data::ScoringData>(config_.data.validation, config_.data.tokenizer,
                                                      config_.model.vocab_size, config_.train.sequence_length);
  }
  engine().context().on_place = publish;
  if (session_.device().kind == DeviceKind::cpu) engine().context().progress = move_messages;
  const std::string fingerprint = data_.fingerprint();
  parallel::check_equal(runtime_.world(), "training data", std::as_bytes(std::span(fingerprint)));
  if (root()) lock_ = std::make_unique<checkpoint::RunLock>(config_.checkpoint.dir);
  std::vector<std::string> notes;
  const Start start = find_start(notes);
  session_.take_memory();
  begin(start, notes);
  writer_ = std::make_unique<checkpoint::Writer>(
      runtime_.world(), checkpoint::Writer::Options{config_.checkpoint.dir, static_cast<int>(config_.checkpoint.keep),
                                                    host_copy(session_.device(), engine())});
  slices_ = checkpoint_slices(engine());
  writer_->reserve(slices_);
  peak_flops_ = config_.log.peak_tflops > 0
                    ? config_.log.peak_tflops * 1e12
                    : measured_peak_flops(engine().context(), engine().options().dtype, session_.device().allocator);
  if (root()) {
    write_resolved(config_);
    metrics_ = std::make_unique<Metrics>(config_.checkpoint.dir + "/metrics.jsonl", done_, config_.log.bar);
    print_start(notes);
  }
}

Trainer::~Trainer() = default;

Trainer::Start Trainer::find_start(std::vector<std::string>& notes) {
  auto& world = runtime_.world();
  const std::string& wanted = config_.checkpoint.resume;
  const std::string& dir = config_.checkpoint.dir;
  Start start;
  auto& from = start.resume;
  if (wanted == "none") {
    if (checkpoint::has_committed(dir)) {
      throw ConfigError(
          fmt::format("checkpoint.resume = \"none\", but {} holds checkpoints of an earlier run; "
                      "choose another checkpoint.dir or move it away",
                      dir));
    }
  } else if (wanted == "auto") {
    from = checkpoint::find_newest_collective(world, dir, notes);
    // Starting anew would cut back the run's metrics and overwrite what can perhaps be saved.
    if (!from && checkpoint::has_committed(dir)) throw no_whole_checkpoint(dir, notes);
  } else {
    from = open_checkpoint(world, wanted);
  }
  if (!from) {
    if (config_.checkpoint.init_from.empty()) return start;
    start.weights = open_model(world, config_.checkpoint.init_from);
    check_tensors(*start.weights, engine());
    return start;
  }
  const checkpoint::Meta& meta = from->meta();
  for (const auto& text : model_differences(parse_config(meta.config, from->path(), {}), config_)) {
    notes.push_back(fmt::format("warning: the model is not the checkpoint's: {}", text));
  }
  try {
    check_tensors(*from, engine());
  } catch (const CheckpointError& error) {
    std::string text = error.what();
    for (const auto& line : notes) text += "\n  " + line;
    throw CheckpointError(text);
  }
  if (meta.data_fingerprint != data_.fingerprint()) {
    throw ConfigError(
        fmt::format("{}: the run's data has changed since this checkpoint (files, weights, tokenizer or "
                    "sequence_length), so its position means nothing; restore the data, or start a new "
                    "checkpoint.dir",
                    from->path()));
  }
  if (const auto seed = static_cast<std::uint64_t>(config_.train.seed); meta.seed != seed) {
    throw ConfigError(
        fmt::format("{}: train.seed was {} and is {}, but it fixes the order of the samples, of which some would come "
                    "twice; set it back, or start a new checkpoint.dir",
                    from->path(), meta.seed, seed));
  }
  return start;
}

void Trainer::begin(const Start& start, std::vector<std::string>& notes) {
  const auto& t = config_.train;
  std::vector<std::int64_t> position;
  if (const auto& from = start.resume) {
    const checkpoint::Meta& meta = from->meta();
    restore(*from, engine(), notes);
    done_ = meta.step;
    last_whole_ = from->path();
    position = meta.data_position;
    if (meta.precision != t.precision) {
      notes.push_back(fmt::format("precision changes from {} to {}", meta.precision, t.precision));
    }
    notes.push_back(fmt::format("going on from {} (step {})", from->path(), meta.step));
    if (root()) {
      for (auto& line : checkpoint::set_aside_newer(config_.checkpoint.dir, meta.step)) {
        notes.push_back(std::move(line));
      }
    }
  } else if (start.weights) {
    restore_weights(*start.weights, engine());
    notes.push_back(fmt::format("weights from {} (step {}), zero optimiser state", start.weights->path(),
                                start.weights->meta().step));
  } else {
    engine().initialize(static_cast<std::uint64_t>(t.seed));
  }
  batches_ = std::make_unique<BatchLoader>(data_, session_.mesh(), t.global_batch, t.micro_batch, t.sequence_length,
                                           std::move(position));
}

void Trainer::print_start(const std::vector<std::string>& notes) {
  auto& e = engine();
  const auto& mesh = session_.mesh();
  metrics_->note(fmt::format("{} parameters, {} | {} ranks: data {} x sequence {}, {} | {}", e.model().num_parameters(),
                             config_.train.precision, runtime_.world().size(), mesh.size("data"), mesh.size("sequence"),
                             config_.parallel.layout, session_.device().name));
  metrics_->note(fmt::format("{} tokens in {} source{} per epoch | {} tokens per step | peak {:.1f} GFLOP/s per rank{}",
                             data_.num_tokens(), data_.num_sources(), data_.num_sources() == 1 ? "" : "s",
                             config_.train.global_batch * config_.train.sequence_length, peak_flops_ * 1e-9,
                             config_.log.peak_tflops > 0 ? " (log.peak_tflops)" : " (matrix product, measured)"));
  std::string memory = "memory per rank:";
  for (const Arena* arena : e.arenas()) {
    memory += fmt::format(" {} {:.1f} MiB,", arena->name(), static_cast<double>(arena->planned_bytes()) / (1 << 20));
  }
  metrics_->note(fmt::format("{} checkpoint copy {:.1f} MiB", memory,
                             static_cast<double>(checkpoint::Writer::host_bytes(slices_)) / (1 << 20)));
  for (const auto& text : notes) metrics_->note(text);
}

void Trainer::note(const std::string& text) {
  if (metrics_) metrics_->note(text);
}

StepResult Trainer::step(std::int64_t done) {
  auto& e = engine();
  published_step = done + 1;
  e.context().at(Phase::data);
  batches_->next();
  targets_ = batches_->num_targets();
  e.zero_gradients();
  for (std::int64_t i = 0; i < batches_->num_micro_batches(); ++i) {
    e.load(batches_->micro_batch(i));
    e.forward_backward(targets_ > 0 ? 1 / static_cast<double>(targets_) : 0);
  }
  const double lr = optim::learning_rate(config_.schedule, config_.optimizer.lr, done, config_.train.steps);
  return e.optimizer_step(lr, config_.optimizer.grad_clip, done + 1);
}

bool Trainer::synchronize_ranks() {
  std::int64_t shared[2] = {stop_signal() != 0, writer_->status()};
  Context host;
  auto& world = runtime_.world();
  world.wait(host, world.all_reduce(host, host_view(shared, {2}), parallel::ReduceOp::max));
  if (checkpoint::Writer::over(shared[1])) {
    engine().context().at(Phase::checkpoint);
    finish_save(writer_->finish(shared[1]));
  }
  return shared[0] != 0;
}

void Trainer::finish_save(const checkpoint::Outcome& outcome) {
  last_save_failed_ = !outcome.ok;
  if (outcome.ok) {
    last_whole_ = outcome.path;
    note(fmt::format("saved {} ({:.1f} MiB in {:.1f} s)", outcome.path, static_cast<double>(outcome.bytes) / (1 << 20),
                     outcome.seconds));
  } else {
    failed_saves_.push_back(outcome.step);
    note(fmt::format("warning: {}", outcome.message));
  }
}

void Trainer::check_saves() const {
  if (last_save_failed_) {
    throw CheckpointError(fmt::format("the last checkpoint could not be saved (see the warning above); {}",
                                      last_whole_.empty() ? "there is no older one" : last_whole_ + " is whole"));
  }
  if (failed_saves_.empty()) return;
  throw CheckpointError(
      fmt::format("training is done and {} is whole, but {} earlier save{} failed, first that of step {} (see the "
                  "warnings above)",
                  last_whole_, failed_saves_.size(), failed_saves_.size() == 1 ? "" : "s", failed_saves_.front()));
}

void Trainer::refuse(const StepResult& result) {
  if (const auto outcome = writer_->wait_and_finish()) finish_save(*outcome);
  const double loss = result.loss_sum / static_cast<double>(std::max<std::int64_t>(targets_, 1));
  throw DivergedError(fmt::format(
      "step {}: loss {} or gradient norm {} is not finite; the step was refused. {}, with a lower optimizer.lr or with "
      "optimizer.grad_clip",
      done_ + 1, loss, result.grad_norm,
      last_whole_.empty() ? "There is no checkpoint yet: start anew" : last_whole_ + " is whole: start again from it"));
}

std::int64_t Trainer::tokens_seen() const {
  const auto& taken = batches_->position();
  return std::accumulate(taken.begin(), taken.end(), std::int64_t{0}) * config_.train.sequence_length;
}

checkpoint::Meta Trainer::meta() const {
  const std::int64_t per_step = config_.train.global_batch * config_.train.sequence_length;
  return {.step = done_,
          .tokens_seen = tokens_seen(),
          .tokens_planned = tokens_seen() + (config_.train.steps - done_) * per_step,
          .config = to_toml(config_),
          .data_fingerprint = data_.fingerprint(),
          .data_position = batches_->position(),
          .seed = static_cast<std::uint64_t>(config_.train.seed),
          .precision = config_.train.precision,
          .ranks = runtime_.world().size(),
          .provenance = config_.checkpoint.init_from.empty()
                            ? "annulus train"
                            : fmt::format("annulus train, from the weights of {}", config_.checkpoint.init_from)};
}

void Trainer::save() {
  engine().context().at(Phase::checkpoint);
  std::string message;
  if (!writer_->start(meta(), slices_, message)) note("warning: " + message);
}

void Trainer::report(const StepResult& result, double seconds) {
  if (!metrics_ || (done_ % config_.log.every != 0 && done_ != config_.train.steps)) return;
  const double sequences = static_cast<double>(config_.train.global_batch);
  const double ranks = static_cast<double>(runtime_.world().size());
  const auto share_of_peak = [&](bool as_dense) {
    return sequences * engine().model().training_flops(config_.train.sequence_length, as_dense) / seconds /
           (peak_flops_ * ranks);
  };
  const bool gpu = session_.device().kind == DeviceKind::cuda;
  metrics_->step({.step = done_,
                  .steps = config_.train.steps,
                  .loss = targets_ > 0 ? result.loss_sum / static_cast<double>(targets_) : 0,
                  .grad_norm = result.grad_norm,
                  .lr = optim::learning_rate(config_.schedule, config_.optimizer.lr, done_ - 1, config_.train.steps),
                  .seconds = seconds,
                  .tokens_per_second = sequences * static_cast<double>(config_.train.sequence_length) / seconds,
                  .mfu = share_of_peak(false),
                  .dense_mfu = config_.model.has_nsa() ? share_of_peak(true) : 0,
                  .memory_gib = gpu ? static_cast<double>(engine().planned_bytes()) / (1 << 30) : peak_memory_gib(),
                  .tokens_seen = tokens_seen()});
}

void Trainer::evaluate_validation() {
  const Evaluation e = evaluate(engine(), *validation_, config_.eval.tokens);
  if (metrics_)
    metrics_->eval({.step = done_, .loss = e.loss(), .bits_per_byte = e.bits_per_byte(), .tokens = e.tokens});
}

int Trainer::run() {
  const std::int64_t steps = config_.train.steps;
  if (done_ >= steps) note(fmt::format("nothing to do: step {} of train.steps = {}", done_, steps));
  bool stop = false;
  while (done_ < steps && !stop) {
    const auto begin = Clock::now();
    const StepResult result = step(done_);
    if (!result.finite) refuse(result);
    ++done_;
    report(result, seconds_since(begin));
    const bool told = synchronize_ranks(), last = done_ == steps;
    stop = told && !last;
    const auto due = [&](std::int64_t every) { return every > 0 && done_ % every == 0; };
    if (validation_ && (due(config_.eval.every) || last)) evaluate_validation();
    if (due(config_.checkpoint.every) || last || stop) {
      if (last || stop) {  // the last save waits for the one before
        if (const auto outcome = writer_->wait_and_finish()) finish_save(*outcome);
      }
      save();
    }
  }
  if (const auto outcome = writer_->wait_and_finish()) finish_save(*outcome);
  if (last_save_failed_ || !stop) check_saves();
  if (stop) note(fmt::format("stopped by a signal after step {}; start again to go on", done_));
  return stop ? 75 : 0;
}

int run_training(const RunConfig& config, parallel::MpiRuntime& runtime) {
  install_stop_signals();
  set_threads(runtime);
  auto& world = runtime.world();
  parallel::Heartbeat heartbeat(runtime.host(), world.rank(), world.size(), heartbeat_path(runtime.host()));
  const parallel::Watchdog watchdog(heartbeat, config.train.watchdog_seconds);
  Trainer trainer(config, runtime);
  return trainer.run();
}

}  // namespace annulus::train
