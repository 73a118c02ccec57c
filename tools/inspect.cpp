#include <fmt/core.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "commands.h"
#include "core/error.h"
#include "train/open_model.h"

namespace annulus::tools {

namespace {

std::int64_t num_parameters(const train::Model& opened) {
  std::int64_t count = 0;
  for (const checkpoint::TensorInfo& t : opened.tensors()) count += t.group == "model" ? t.shape.numel() : 0;
  return count;
}

void print_json(const train::Model& opened, bool verified) {
  const checkpoint::Meta& meta = opened.meta();
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (const checkpoint::TensorInfo& t : opened.tensors()) {
    std::vector<std::int64_t> shape;
    for (int i = 0; i < t.shape.rank(); ++i) shape.push_back(t.shape[i]);
    tensors.push_back({{"group", t.group}, {"name", t.tensor}, {"shape", shape}, {"dtype", name_of(t.dtype)}});
  }
  const nlohmann::ordered_json out = {
      {"path", opened.path()},
      {"format", opened.as_checkpoint() ? "checkpoint" : "huggingface"},
      {"step", meta.step},
      {"tokens", meta.tokens_seen},
      {"tokens_planned", meta.tokens_planned},
      {"parameters", num_parameters(opened)},
      {"bytes", opened.bytes()},
      {"precision", meta.precision},
      {"ranks", meta.ranks},
      {"seed", meta.seed},
      {"data", {{"fingerprint", meta.data_fingerprint}, {"position", meta.data_position}}},
      {"provenance", meta.provenance},
      {"verified", verified},
      {"config", meta.config},
      {"tensors", tensors}};
  fmt::print("{}\n", out.dump());
}

void print_text(const train::Model& opened, bool verified) {
  const checkpoint::Meta& meta = opened.meta();
  fmt::print("{}  {}\n", opened.as_checkpoint() ? "checkpoint" : "HuggingFace", opened.path());
  fmt::print("step        {}\n", meta.step);
  fmt::print("tokens      {} of {} planned\n", meta.tokens_seen, meta.tokens_planned);
  fmt::print("parameters  {}\n", num_parameters(opened));
  fmt::print("values      {:.1f} MiB, optimiser state among them\n", static_cast<double>(opened.bytes()) / (1 << 20));
  fmt::print("precision   {}, written by {} ranks, seed {}\n", meta.precision, meta.ranks, meta.seed);
  if (!meta.data_position.empty()) fmt::print("samples     {} of each source\n", fmt::join(meta.data_position, ", "));
  if (!meta.provenance.empty()) fmt::print("provenance  {}\n", meta.provenance);
  fmt::print("checksums   {}\n", verified                 ? "all compared, all right"
                                 : opened.as_checkpoint() ? "not compared (--verify compares them)"
                                                          : "none in safetensors files");
  std::string group;
  for (const checkpoint::TensorInfo& t : opened.tensors()) {
    if (t.group != group) fmt::print("\n/{}\n", t.group);
    group = t.group;
    fmt::print("  {:<56} {:<16} {}\n", t.tensor, t.shape.str(), name_of(t.dtype));
  }
  if (meta.config.empty()) {
    fmt::print("\nno config\n");
  } else {
    const bool recipe = train::has_recipe(train::config_of(opened, opened.path()));
    fmt::print("\n{}{}", recipe ? "" : "no recipe: this model's training is not known here\n\n", meta.config);
  }
}

}  // namespace

int run_inspect(const InspectCommand& command) {
  std::vector<std::string> skipped;
  const train::Model opened = train::open_model(command.path, skipped);
  for (const std::string& line : skipped) fmt::print(stderr, "annulus: {}\n", line);
  if (command.verify) {
    if (!opened.as_checkpoint()) throw UsageError("--verify: safetensors files have no checksums to compare");
    opened.as_checkpoint()->verify();
  }
  if (command.json) {
    print_json(opened, command.verify);
  } else {
    print_text(opened, command.verify);
  }
  return 0;
}

}  // namespace annulus::tools
