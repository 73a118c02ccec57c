#include "train/plan.h"

#include <algorithm>

#include "commands.h"
#include "core/error.h"
#include "train/config.h"

namespace annulus::tools {

int run_plan(const PlanCommand& command) {
  if (command.gpus > 0 && command.ranks > 0)
    throw UsageError("--gpus and --ranks exclude each other: a GPU has one rank");
  train::RunConfig config = train::load_config(command.config, command.overrides);
  const int ranks = std::max({command.gpus, command.ranks, 1});
  train::Machine machine = train::this_machine();
  if (command.gpus > 0) machine = {.cuda_build = true, .gpus = command.gpus};  // planned for, not needed here
  if (command.ranks > 0) machine.gpus = 0;
  config.resolve_and_validate(ranks, machine);
  if (command.gpus > 0 && config.parallel.device != "cuda") {
    throw ConfigError(fmt::format(
        "--gpus {}: this run is for CPU ranks ({}); plan it with --ranks {}", command.gpus,
        config.model.has_nsa() ? "sparse layers run there only in this version" : "parallel.device = \"cpu\"",
        command.gpus));
  }
  return train::run_plan(config, ranks);
}

}  // namespace annulus::tools
