#include <fmt/core.h>

#include <filesystem>

#include "commands.h"
#include "core/error.h"
#include "data/output_file.h"

namespace annulus::tools {

int run_prepare_recall(const PrepareCommand& command) {
  const data::RecallOptions& options = command.recall;
  options.validate();
  if (std::filesystem::path(command.output).extension() != ".jsonl") {
    throw UsageError(fmt::format("DST = {}: expected a name that ends in .jsonl, as data files do", command.output));
  }
  data::OutputFile file(command.output, command.force);
  for (std::int64_t i = 0; i < options.documents; ++i) file.write(to_json_line(recall_document(options, i)));
  file.commit();

  const std::int64_t tokens = options.documents * options.length, targets = options.documents * options.num_queries();
  if (command.json) {
    fmt::print(R"({{"documents":{},"tokens":{},"targets":{},"format":"jsonl, tokens and mask"}})"
               "\n",
               options.documents, tokens, targets);
    return 0;
  }
  fmt::print("{}: {} documents of {} tokens and {} answers\n", command.output, options.documents, options.length,
             options.num_queries());
  return 0;
}

}  // namespace annulus::tools
