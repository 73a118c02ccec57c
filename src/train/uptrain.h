// Uptraining (arXiv 2305.13245, section 2.2; spec/checkpoint.md): a model that was converted, or is to have a longer
// context, trains on for a small share of the tokens that its source was trained with, by the source's own recipe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/mpi_runtime.h"
#include "train/config.h"
#include "train/open_model.h"

namespace annulus::train {

struct UptrainOptions {
  std::string model;                   // checkpoint, run folder or HuggingFace folder
  double fraction = 0.05;              // of the tokens that the source's run was planned for
  std::int64_t tokens = 0;             // or so many; 0: by the fraction
  std::string config;                  // a recipe (TOML; its [model] is not used); empty: the source's
  std::string run;                     // the new run folder; empty: the source run's name with "-uptrained"
  std::vector<std::string> overrides;  // section.key=value
};

// The run that uptrains `source`: its recipe with the overrides; steps that fill the tokens; warm-up and decay steps
// scaled with them; a run folder of its own that starts with the source's weights. What an override sets stays.
// `ranks` decides whether the recipe's mesh still fits. ConfigError names what is missing or cannot be.
RunConfig uptrain_config(const Model& source, const UptrainOptions& options, int ranks);

// The subcommand. Collective over the runtime's world. Returns the exit code of training.
int run_uptraining(const UptrainOptions& options, parallel::MpiRuntime& runtime);

}  // namespace annulus::train
