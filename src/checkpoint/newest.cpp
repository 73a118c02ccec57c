// Choosing a checkpoint: the newest of a run folder that verifies, alone or with all ranks.
#include "checkpoint/exchange.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"

namespace annulus::checkpoint {
namespace {

std::string strip_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

// Newest first: "c" and the name of a committed checkpoint, "u" and that of an unfinished save.
std::vector<std::string> candidates(const std::string& run_dir) {
  std::vector<std::string> out;
  for (const RunEntry& entry : list_run(run_dir)) {
    if (entry.kind != RunEntry::Kind::trash)
      out.push_back((entry.kind == RunEntry::Kind::committed ? "c" : "u") + entry.name);
  }
  return out;
}

template <class Open>
std::optional<Checkpoint> first_whole(const std::string& run_dir, const std::vector<std::string>& names,
                                      std::vector<std::string>& skipped, const Open& open_and_verify) {
  for (const std::string& candidate : names) {
    const std::string name = candidate.substr(1);
    if (candidate[0] == 'u') {
      skipped.push_back(fmt::format("{} skipped: the save was interrupted before it was complete", name));
      continue;
    }
    try {
      return open_and_verify(run_dir + "/" + name);
    } catch (const CheckpointError& e) {
      skipped.push_back(fmt::format("{} skipped: {}", name, e.what()));
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Checkpoint> find_newest(const std::string& run_dir, std::vector<std::string>& skipped) {
  const std::string dir = strip_slashes(run_dir);
  return first_whole(dir, candidates(dir), skipped, [](const std::string& path) {
    Checkpoint found = Checkpoint::open(path);
    found.verify();
    return found;
  });
}

Checkpoint open_collective(parallel::Communicator& world, const std::string& path) {
  const std::string folder = strip_slashes(path);
  std::string text;
  agree(world, [&] {
    if (world.rank() == 0) text = read_manifest(folder);
  });
  text = broadcast_text(world, text);
  Checkpoint out;
  agree(world, [&] {
    out = Checkpoint::from_manifest(folder, text);
    out.verify(world.rank(), world.size());
  });
  return out;
}

std::optional<Checkpoint> find_newest_collective(parallel::Communicator& world, const std::string& run_dir,
                                                 std::vector<std::string>& skipped) {
  const std::string dir = strip_slashes(run_dir);
  std::string lines;
  agree(world, [&] {
    if (world.rank() != 0) return;
    for (const std::string& name : candidates(dir)) lines += name + "\n";
  });
  lines = broadcast_text(world, lines);
  std::vector<std::string> names;
  for (std::size_t at = 0; at < lines.size();) {
    const auto end = lines.find('\n', at);
    names.push_back(lines.substr(at, end - at));
    at = end + 1;
  }
  return first_whole(dir, names, skipped, [&](const std::string& path) { return open_collective(world, path); });
}

bool is_checkpoint(const std::string& path) { return exists(strip_slashes(path) + "/" + kManifestName); }

bool is_run_folder(const std::string& path) {
  try {
    return !candidates(strip_slashes(path)).empty();
  } catch (const CheckpointError&) {
    return false;  // a file, or a folder that cannot be listed
  }
}

bool has_committed(const std::string& run_dir) {
  for (const std::string& candidate : candidates(strip_slashes(run_dir))) {
    if (candidate[0] == 'c') return true;
  }
  return false;
}

std::string resolve_model_path(const std::string& path, std::vector<std::string>* skipped) {
  if (is_checkpoint(path)) return strip_slashes(path);
  if (!is_run_folder(path)) {
    const std::string found = exists(strip_slashes(path) + "/config.json") ? "is a HuggingFace folder"
                              : exists(strip_slashes(path))                ? "is none"
                                                                           : "is not there";
    throw CheckpointError(fmt::format(
        "{}: {}; wanted a checkpoint (a folder with {}), a run folder (a folder with step-… folders) or, to read "
        "weights from, a HuggingFace folder (with a config.json)",
        path, found, kManifestName));
  }
  std::vector<std::string> why;
  const auto newest = find_newest(path, why);
  if (skipped) skipped->insert(skipped->end(), why.begin(), why.end());
  if (newest) return newest->path();
  std::string text;
  for (const std::string& line : why) text += "\n  " + line;
  throw CheckpointError(fmt::format("{}: no checkpoint of this run folder is whole:{}", path, text));
}

std::vector<std::string> set_aside_newer(const std::string& run_dir, std::int64_t step) {
  const std::string dir = strip_slashes(run_dir);
  std::vector<std::string> said;
  for (const RunEntry& entry : list_run(dir)) {
    if (entry.kind != RunEntry::Kind::committed || entry.step <= step) continue;
    std::string to = "aside-" + entry.name;
    for (int n = 1; exists(dir + "/" + to); ++n) to = fmt::format("aside-{}-{}", entry.name, n);
    rename_path(dir + "/" + entry.name, dir + "/" + to);
    said.push_back(fmt::format("{} is newer than step {}: renamed to {}", entry.name, step, to));
  }
  if (!said.empty()) sync_file(dir);
  return said;
}

}  // namespace annulus::checkpoint
