#include <fmt/core.h>

#include <filesystem>

#include "commands.h"
#include "core/error.h"
#include "data/output_file.h"

namespace annulus::tools {

namespace {

// Writes validated documents of equal length, `answers` targets in each.
template <class MakeDocument>
int write_documents(const PrepareCommand& command, std::int64_t documents, std::int64_t length, std::int64_t answers,
                    const MakeDocument& make) {
  if (std::filesystem::path(command.output).extension() != ".jsonl") {
    throw UsageError(fmt::format("DST = {}: expected a name that ends in .jsonl, as data files do", command.output));
  }
  data::OutputFile file(command.output, command.force);
  for (std::int64_t i = 0; i < documents; ++i) file.write(to_json_line(make(i)));
  file.commit();
  if (command.json) {
    fmt::print(R"({{"documents":{},"tokens":{},"targets":{},"format":"jsonl, tokens and mask"}})"
               "\n",
               documents, documents * length, documents * answers);
  } else {
    fmt::print("{}: {} documents of {} tokens and {} answers\n", command.output, documents, length, answers);
  }
  return 0;
}

}  // namespace

int run_prepare_recall(const PrepareCommand& command) {
  const data::RecallOptions& o = command.recall;
  o.validate();
  return write_documents(command, o.documents, o.length, o.num_queries(),
                         [&](std::int64_t i) { return recall_document(o, i); });
}

int run_prepare_passkey(const PrepareCommand& command) {
  const data::PasskeyOptions& o = command.passkey;
  o.validate();
  return write_documents(command, o.documents, o.length, o.digits,
                         [&](std::int64_t i) { return passkey_document(o, i); });
}

}  // namespace annulus::tools
