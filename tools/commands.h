// The subcommands: one file each, tools/<name>.cpp. annulus.cpp parses the command line into these options and turns
// exceptions into exit codes; every function returns an exit code and throws the error types of core/error.h.
#pragma once

#include <string>
#include <vector>

#include "data/passkey.h"
#include "data/recall.h"
#include "parallel/mpi_runtime.h"
#include "train/bench.h"
#include "train/evaluate.h"
#include "train/generate.h"
#include "train/uptrain.h"

namespace annulus::tools {

struct TrainCommand {
  std::string config;
  std::vector<std::string> overrides;  // section.key=value
};
int run_train(const TrainCommand& command, parallel::MpiRuntime& runtime);

struct PlanCommand {
  std::string config;
  std::vector<std::string> overrides;
  int gpus = 0;   // plan for so many GPUs
  int ranks = 0;  // or for so many CPU ranks; both 0: one rank on this machine
};
int run_plan(const PlanCommand& command);

struct ConvertCommand {
  std::string source, destination;
  std::string format = "checkpoint";   // or huggingface
  std::int64_t kv_heads = 0;           // 0: as many as there are
  std::string pool = "mean";           // first, random
  std::string attention;               // nsa, or empty: as it is
  std::vector<std::string> overrides;  // model.nsa.key=value
  bool json = false;
};
int run_convert(const ConvertCommand& command);

struct InspectCommand {
  std::string path;  // checkpoint, run folder or HuggingFace folder
  bool json = false;
  bool verify = false;  // compare every checksum
};
int run_inspect(const InspectCommand& command);

struct PlotCommand {
  std::string run;     // run folder or its metrics.jsonl
  std::string output;  // empty: loss.svg beside the metrics
};
int run_plot(const PlotCommand& command);

struct PrepareCommand {
  std::string output;
  bool force = false;  // replace what is there
  bool json = false;
  data::RecallOptions recall;
  data::PasskeyOptions passkey;
};
int run_prepare_recall(const PrepareCommand& command);
int run_prepare_passkey(const PrepareCommand& command);

// Ends the job after an error: it is said once, by the first rank that fails, and every rank ends with the code.
[[noreturn]] void fail_job(parallel::MpiRuntime& runtime, const std::string& message, int code);

}  // namespace annulus::tools
