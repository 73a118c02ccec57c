#include "train/config.h"

#include <fmt/core.h>

#include <algorithm>

#include "core/config_check.h"
#include "core/device_memory.h"
#include "core/error.h"
#include "parallel/layout.h"
#include "train/config_fields.h"
#include "train/engine.h"

namespace annulus::train {

namespace {

std::string divisors_up_to(int n) {
  std::string text;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", d);
  }
  return text;
}

// Fills the axis that is 0 and checks that the axes cover the ranks.
void resolve_axes(ParallelConfig& p, int ranks) {
  check_range("parallel.sequence", p.sequence, 0);
  check_range("parallel.data", p.data, 0);
  const auto fill = [ranks](int& free, int given, const char* given_key) {
    if (given == 0) given = 1;
    if (ranks % given != 0) {
      fail_key(given_key, fmt::format("{}", given), fmt::format("a divisor of the number of ranks, {}", ranks),
               fmt::format("these fit: {}; or start another number of ranks", divisors_up_to(ranks)));
    }
    free = ranks / given;
  };
  if (p.sequence == 0) {
    fill(p.sequence, p.data, "parallel.data");
    if (p.data == 0) p.data = 1;
  } else if (p.data == 0) {
    fill(p.data, p.sequence, "parallel.sequence");
  }
  const std::int64_t product = static_cast<std::int64_t>(p.sequence) * p.data;
  if (product != ranks) {
    fail_key(
        "parallel.sequence × parallel.data", fmt::format("{} × {} = {}", p.sequence, p.data, product),
        fmt::format("the number of ranks, {}", ranks),
        fmt::format("start {} ranks (mpirun -np {}), or set one of the two to 0 and it takes what the other leaves",
                    product, product));
  }
}

void resolve_device(RunConfig& c, const Machine& machine) {
  std::string& device = c.parallel.device;
  check_choice("parallel.device", device, std::vector<std::string>{"auto", "cpu", "cuda"});
  check_choice("train.precision", c.train.precision, std::vector<std::string>{"fp32", "bf16", "fp64"});
  const bool usable = machine.cuda_build && machine.gpus > 0;
  const bool has_kernels = c.train.precision != "fp64" && !c.model.has_nsa();
  if (device == "auto") device = usable && has_kernels ? "cuda" : "cpu";
  if (device == "cuda" && !machine.cuda_build) {
    fail_key("parallel.device", "\"cuda\"", "\"cpu\" or \"auto\", since this program was built without CUDA",
             "build the preset cuda (cmake --preset cuda) where nvcc is installed");
  }
  if (device == "cuda" && !usable) {
    fail_key("parallel.device", "\"cuda\"", "\"cpu\" or \"auto\", since no GPU is visible here",
             "check nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  if (device == "cuda" && c.train.precision == "fp64") {
    fail_key("train.precision", "\"fp64\"", "\"fp32\" or \"bf16\" on parallel.device = \"cuda\"",
             "fp64 is for tests on the CPU: set parallel.device to \"cpu\"");
  }
  if (device == "cuda" && c.model.has_nsa()) {
    fail_key("model.attention", "with \"nsa\"", "\"dense\" layers on parallel.device = \"cuda\"",
             "sparse layers run on CPU ranks only in this version: set parallel.device to \"cpu\"");
  }
  if (device == "cpu" && c.train.precision == "bf16") {
    fail_key("train.precision", "\"bf16\"", "\"fp32\" on the CPU, which has no bf16 kernels",
             machine.cuda_build ? "set train.precision to \"fp32\", or run where a GPU is visible"
                                : "set train.precision to \"fp32\", or build the preset cuda and run on a GPU");
  }
}

void validate_train(const TrainConfig& t) {
  constexpr std::int64_t kMax = INT32_MAX;  // rows and positions are int32 in the kernels
  check_range("train.steps", t.steps, 1, std::int64_t{1} << 40);
  check_range("train.global_batch", t.global_batch, 1, kMax);
  check_range("train.micro_batch", t.micro_batch, 1, kMax);
  check_range("train.sequence_length", t.sequence_length, 1, kMax);
  check_choice("train.recompute", t.recompute, std::vector<std::string>{"none", "keep_attention", "block"});
  check_range("train.seed", t.seed, 0);
  check_range("train.watchdog_seconds", t.watchdog_seconds, 0, Low::closed);
}

void validate_batch(const TrainConfig& t, int replicas) {
  const std::int64_t unit = replicas * t.micro_batch;
  if (t.global_batch % unit == 0) return;
  const std::int64_t below = t.global_batch / unit * unit;
  fail_key("train.global_batch", fmt::format("{}", t.global_batch),
           fmt::format("a multiple of replicas × train.micro_batch = {} × {} = {}", replicas, t.micro_batch, unit),
           fmt::format("{}{} would fit", below > 0 ? fmt::format("{} or ", below) : "", below + unit));
}

void validate_sequence(const RunConfig& c) {
  check_choice("parallel.layout", c.parallel.layout, std::vector<std::string>{"zigzag", "contiguous"});
  const int ranks = c.parallel.sequence;
  const std::int64_t tokens = c.train.sequence_length;
  if (ranks == 1) return;
  const auto kind = c.parallel.layout == "zigzag" ? parallel::LayoutKind::zigzag : parallel::LayoutKind::contiguous;
  try {
    (void)sequence_layout(c.model, kind, tokens, ranks);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("train.sequence_length = {}: {}", tokens, error.what()));
  }
}

void validate_data(const RunConfig& c) {
  if (c.data.sources.empty()) {
    fail_key("data.sources", "[]", "at least one training file or folder", "for example sources = [\"book.txt\"]");
  }
  for (const data::SourceConfig& source : c.data.sources) {
    if (source.path.empty()) fail_key("data.sources", "\"\"", "paths that are not empty");
    check_range(fmt::format("data.sources weight of \"{}\"", source.path), source.weight, 0, Low::open);
  }
  for (const std::string& path : c.data.validation) {
    if (path.empty()) fail_key("data.validation", "\"\"", "paths that are not empty");
  }
  check_choice("data.tokenizer", c.data.tokenizer, std::vector<std::string>{"bytes", "none"});
  constexpr std::int64_t kByteVocabulary = 257;
  if (c.data.tokenizer == "bytes" && c.model.vocab_size < kByteVocabulary) {
    fail_key("model.vocab_size", fmt::format("{}", c.model.vocab_size),
             "at least 257, since data.tokenizer = \"bytes\" makes 256 bytes and an end-of-document token");
  }
}

void validate_output(const RunConfig& c) {
  if (c.checkpoint.dir.empty())
    fail_key("checkpoint.dir", "\"\"", "a folder for the run, for example \"runs/english\"");
  check_range("checkpoint.every", c.checkpoint.every, 0);
  if (c.checkpoint.dir.find('\0') != std::string::npos) {
    fail_key("checkpoint.dir", toml_string(c.checkpoint.dir), "a path", "a name cannot hold a NUL character");
  }
  check_range("checkpoint.keep", c.checkpoint.keep, 2, 1'000'000);  // one may be damaged by what ended the run
  if (c.checkpoint.resume.empty()) fail_key("checkpoint.resume", "\"\"", "\"auto\", \"none\" or a checkpoint's path");
  check_range("log.every", c.log.every, 1);
  check_range("log.peak_tflops", c.log.peak_tflops, 0, Low::closed);
  check_range("eval.every", c.eval.every, 0);
  check_range("eval.tokens", c.eval.tokens, 0);
  if (c.eval.every > 0 && c.data.validation.empty()) {
    fail_key("eval.every", fmt::format("{}", c.eval.every), "0, since data.validation names nothing to score",
             "name held-out files in data.validation");
  }
}

}  // namespace

Machine this_machine() {
#ifdef ANNULUS_CUDA
  constexpr bool kCudaBuild = true;
#else
  constexpr bool kCudaBuild = false;
#endif
  return {kCudaBuild, device_count(DeviceKind::cuda)};
}

void RunConfig::resolve_and_validate(int world_size, const Machine& machine) {
  ANNULUS_CHECK(world_size >= 1, "a run needs a rank, not {}", world_size);
  model.resolve();
  model.validate();
  resolve_axes(parallel, world_size);
  resolve_device(*this, machine);
  validate_train(train);
  validate_batch(train, parallel.data);
  validate_sequence(*this);
  optimizer.validate();
  schedule.validate(train.steps);
  validate_data(*this);
  validate_output(*this);
}

}  // namespace annulus::train
