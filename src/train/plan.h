// What a run would take: parameters, memory of every arena, bytes per ring hop and their overlap with compute, time.
// Starts nothing: no rank, no device, no file beside the config.
#pragma once

#include "train/config.h"

namespace annulus::train {

// The subcommand: prints the plan of a config that was resolved and validated for `ranks` ranks. Returns the exit code.
int run_plan(const RunConfig& config, int ranks);

}  // namespace annulus::train
