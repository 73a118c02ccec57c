#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/conversion.h"
#include "checkpoint/folder.h"
#include "commands.h"
#include "core/config_check.h"
#include "core/error.h"
#include "train/open_model.h"

namespace annulus::tools {

namespace {

using nlohmann::ordered_json;

std::string format_of(const train::Model& model) { return model.as_checkpoint() ? "checkpoint" : "huggingface"; }

// The config of the result: the source's, with what the command line changes.
train::RunConfig target_config(const ConvertCommand& command, const train::RunConfig& from, const std::string& path) {
  for (const std::string& assignment : command.overrides) {
    if (!assignment.starts_with("model.nsa.")) {
      throw UsageError(fmt::format("--set {}: a conversion sets only keys of model.nsa", assignment));
    }
    if (command.attention.empty()) throw UsageError("--set goes with --attention nsa");
  }
  train::RunConfig to = train::parse_config(to_toml(from), path, command.overrides);
  if (!command.attention.empty()) {
    check_choice("--attention", command.attention, std::vector<std::string>{"nsa"});
    to.model.attention = {model::AttentionKind::nsa};
    to.model.sliding_window = 0;  // of dense layers
  }
  if (command.kv_heads > 0) to.model.num_key_value_heads = command.kv_heads;
  if (from.model.num_key_value_heads % to.model.num_key_value_heads != 0) {
    throw UsageError(fmt::format("--kv-heads {}: expected a divisor of the {} key/value heads of {}", command.kv_heads,
                                 from.model.num_key_value_heads, path));
  }
  to.model.resolve();
  to.model.validate();
  return to;
}

std::vector<std::string> changes(const ConvertCommand& command, const train::Model& model, const train::RunConfig& from,
                                 const train::RunConfig& to, const std::vector<checkpoint::Slice>& tensors) {
  std::vector<std::string> out;
  if (const auto a = from.model.num_key_value_heads, b = to.model.num_key_value_heads; a != b) {
    out.push_back(command.pool == "random" ? fmt::format("num_key_value_heads {} -> {}: fresh weights", a, b)
                                           : fmt::format("num_key_value_heads {} -> {}: {} of {} consecutive heads", a,
                                                         b, command.pool, a / b));
  }
  std::int64_t sparse = 0;
  for (std::int64_t i = 0; i < to.model.num_hidden_layers; ++i) sparse += from.model.kind(i) != to.model.kind(i);
  if (sparse > 0) {
    out.push_back(
        fmt::format("attention dense -> nsa in {} layers: K and V copied, compression as the mean, gates {} "
                    "selected, {} window, {} compressed",
                    sparse, checkpoint::kGateStart[1], checkpoint::kGateStart[2], checkpoint::kGateStart[0]));
  }
  std::map<std::string, std::int64_t> types;
  const std::string group = model.weights_group();
  for (const auto& t : tensors) {
    const checkpoint::TensorInfo* info = model.find(group, t.tensor);
    if (info && info->dtype != t.data.dtype) {
      ++types[fmt::format("{} -> {}", name_of(info->dtype), name_of(t.data.dtype))];
    }
  }
  for (const auto& [what, count] : types) out.push_back(fmt::format("{} in {} tensors", what, count));
  if (group != "model") out.push_back("weights taken from " + group);
  return out;
}

std::vector<std::string> dropped(const train::Model& model) {
  std::set<std::string> out;
  for (const auto& t : model.tensors()) {
    if (t.group != model.weights_group())
      out.insert(t.group == "model" ? "model (rounded copies of the masters)" : t.group);
  }
  if (model.as_huggingface()) {
    for (const std::string& name : model.as_huggingface()->ignored()) out.insert(name);
  }
  return {out.begin(), out.end()};
}

std::int64_t parameters_of(const std::vector<checkpoint::Slice>& tensors) {
  std::int64_t count = 0;
  for (const auto& t : tensors) count += t.global_shape.numel();
  return count;
}

checkpoint::Written write(const ConvertCommand& command, const train::Model& model, const train::RunConfig& to,
                          const std::vector<std::string>& changed, std::vector<checkpoint::Slice> tensors) {
  if (command.format == "huggingface") {
    checkpoint::HuggingFaceOutput output{.folder = command.destination,
                                         .config = {to.model, to.train.sequence_length, to.data.tokenizer},
                                         .tensors = std::move(tensors),
                                         .companions = {}};
    if (model.as_huggingface()) output.companions = checkpoint::companions_of(model.path());
    return write_huggingface(output);
  }
  checkpoint::Meta meta = model.meta();
  meta.config = train::has_recipe(to) ? to_toml(to) : without_recipe(to);
  meta.ranks = 1;
  std::string what;
  for (const std::string& text : changed) what += (what.empty() ? ": " : ", ") + text;
  meta.provenance = fmt::format("{}{}converted from {} (step {}){}", meta.provenance,
                                meta.provenance.empty() ? "" : "; ", model.path(), meta.step, what);
  return {1, write_folder(command.destination, meta, tensors)};
}

void print_text(const train::Model& model, const std::vector<std::string>& changed,
                const std::vector<std::string>& lost, const ConvertCommand& command, std::int64_t parameters,
                const checkpoint::Written& written) {
  fmt::print("read     {} ({}), {} tensors\n", model.path(), format_of(model), model.tensors().size());
  for (const std::string& text : changed) fmt::print("changed  {}\n", text);
  for (const std::string& text : lost) fmt::print("dropped  {}\n", text);
  fmt::print("written  {} ({}), {} parameters, {:.1f} MiB\n", command.destination, command.format, parameters,
             static_cast<double>(written.bytes) / (1 << 20));
}

}  // namespace

int run_convert(const ConvertCommand& command) {
  namespace fs = std::filesystem;
  if (fs::weakly_canonical(command.source + "/.") == fs::weakly_canonical(command.destination + ".tmp/.")) {
    throw UsageError(
        fmt::format("{}: {} is written there first; choose another DST", command.source, command.destination));
  }
  check_choice("--format", command.format, std::vector<std::string>{"checkpoint", "huggingface"});
  const checkpoint::Pool pool = checkpoint::parse_pool(command.pool);
  if (checkpoint::exists(command.destination)) {
    throw UsageError(fmt::format("{}: is there already; name a folder that is not", command.destination));
  }
  std::vector<std::string> skipped;
  const train::Model model = train::open_model(command.source, skipped);
  for (const std::string& line : skipped) fmt::print(stderr, "annulus: {}\n", line);
  if (model.as_checkpoint()) model.as_checkpoint()->verify();
  train::RunConfig from = config_of(model, command.source);
  from.model.resolve();
  from.model.validate();
  const train::RunConfig to = target_config(command, from, command.source);

  auto tensors = convert_tensors(model.source(), {from.model, to.model, pool, model.meta().seed});
  const auto changed = changes(command, model, from, to, tensors);
  const auto lost = dropped(model);
  const std::size_t num_tensors = tensors.size();
  const std::int64_t parameters = parameters_of(tensors);
  const checkpoint::Written written = write(command, model, to, changed, std::move(tensors));
  if (!command.json) {
    print_text(model, changed, lost, command, parameters, written);
    return 0;
  }
  const ordered_json out{{"read",
                          {{"path", model.path()},
                           {"format", format_of(model)},
                           {"step", model.meta().step},
                           {"tensors", model.tensors().size()},
                           {"bytes", model.bytes()}}},
                         {"changed", changed},
                         {"dropped", lost},
                         {"written",
                          {{"path", command.destination},
                           {"format", command.format},
                           {"tensors", num_tensors},
                           {"parameters", parameters},
                           {"bytes", written.bytes}}}};
  fmt::print("{}\n", out.dump());
  return 0;
}

}  // namespace annulus::tools
