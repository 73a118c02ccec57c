// The subcommand generate: a prompt goes on, token by token (spec/cli.md). One process, on the CPU.
#pragma once

#include <cstdint>
#include <string>

#include "parallel/mpi_runtime.h"
#include "train/sampler.h"

namespace annulus::train {

struct GenerateOptions {
  std::string model;        // checkpoint or run folder
  bool has_prompt = false;  // one of the two
  std::string prompt;
  std::string tokens;  // ids with commas between
  std::int64_t max_new = 256;
  std::int64_t sequence_length = 0;  // tokens that the model may see, prompt included; 0: the training length
  SamplingOptions sampling;
  bool json = false;
};

int run_generation(const GenerateOptions& options, parallel::MpiRuntime& runtime);

}  // namespace annulus::train
