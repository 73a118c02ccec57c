#include "train/uptrain.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>

#include "train/session.h"
#include "train/trainer.h"

namespace annulus::train {
namespace {

bool overridden(const UptrainOptions& options, const std::string& key) {
  return std::any_of(options.overrides.begin(), options.overrides.end(),
                     [&](const std::string& text) { return text.starts_with(key + "="); });
}

// The source's recipe with the overrides, or that of a file; the architecture is the source's in either case.
RunConfig recipe_of(const Model& source, const UptrainOptions& options) {
  const std::string name = source.path() + " (its config)";
  if (options.config.empty()) {
    if (has_recipe(config_of(source, source.path())))
      return parse_config(source.meta().config, name, options.overrides);
    throw ConfigError(fmt::format(
        "{}: this model has no recipe (it was not trained here); give one with --config FILE.toml, and --tokens N",
        source.path()));
  }
  RunConfig config = load_config(options.config, options.overrides);
  std::vector<std::string> of_model;
  std::copy_if(options.overrides.begin(), options.overrides.end(), std::back_inserter(of_model),
               [](const std::string& text) { return text.starts_with("model."); });
  config.model = parse_config(source.meta().config, name, of_model).model;
  return config;
}

std::int64_t wanted_tokens(const Model& source, const UptrainOptions& options) {
  if (options.tokens > 0) return options.tokens;
  if (!(options.fraction > 0) || options.fraction > 1000) {
    throw ConfigError(fmt::format("--fraction {}: expected a number above 0, for example 0.05", options.fraction));
  }
  const std::int64_t planned = source.meta().tokens_planned;
  if (planned <= 0) {
    throw ConfigError(fmt::format(
        "{}: it does not say how many tokens its model was trained with, so --fraction {} means nothing; give "
        "--tokens N",
        source.path(), options.fraction));
  }
  return static_cast<std::int64_t>(std::ceil(options.fraction * static_cast<double>(planned)));
}

// runs/english/step-00000200 -> runs/english-uptrained; models/gqa -> models/gqa-uptrained
std::string run_beside(const std::string& model) {
  std::filesystem::path path = std::filesystem::path(model).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  const bool in_run = path.filename().string().starts_with("step-") && !path.parent_path().empty();
  if (in_run) path = path.parent_path();
  return path.string() + "-uptrained";
}

}  // namespace

RunConfig uptrain_config(const Model& source, const UptrainOptions& options, int ranks) {
  RunConfig config = recipe_of(source, options);
  const std::int64_t recipe_steps = config.train.steps;
  if (!overridden(options, "train.steps")) {
    const std::int64_t per_step = config.train.global_batch * config.train.sequence_length;
    if (per_step <= 0) return config;  // validation says what is wrong
    config.train.steps = (wanted_tokens(source, options) + per_step - 1) / per_step;
    const double share =
        static_cast<double>(config.train.steps) / static_cast<double>(std::max<std::int64_t>(recipe_steps, 1));
    const auto scale = [&](const char* key, std::int64_t& steps) {
      if (steps <= 0 || overridden(options, key)) return;
      steps = std::clamp<std::int64_t>(std::llround(static_cast<double>(steps) * share), 1, config.train.steps);
    };
    scale("schedule.warmup_steps", config.schedule.warmup_steps);
    scale("schedule.decay_steps", config.schedule.decay_steps);
  }
  if (!overridden(options, "checkpoint.dir")) {
    config.checkpoint.dir = options.run.empty() ? run_beside(options.model) : options.run;
  }
  if (!overridden(options, "checkpoint.resume")) config.checkpoint.resume = "auto";
  config.checkpoint.init_from = source.path();
  // Not where the source was trained.
  if (!overridden(options, "parallel.device")) config.parallel.device = "auto";
  if (!overridden(options, "parallel.data") && !overridden(options, "parallel.sequence") &&
      config.parallel.data * config.parallel.sequence != ranks) {
    config.parallel.data = config.parallel.sequence = 0;
  }
  return config;
}

int run_uptraining(const UptrainOptions& options, parallel::MpiRuntime& runtime) {
  const auto source = open_model(runtime.world(), options.model);
  return run_training(uptrain_config(source, options, runtime.world().size()), runtime);
}

}  // namespace annulus::train
