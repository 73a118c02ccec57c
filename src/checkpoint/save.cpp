#include "checkpoint/save.h"

#include <algorithm>

#include "checkpoint/fault.h"
#include "checkpoint/folder.h"
#include "checkpoint/hash.h"
#include "checkpoint/hdf5.h"
#include "parallel/heartbeat.h"

namespace annulus::checkpoint {
namespace {

// The part of a tensor's name that HDFView shows: whole tensors of all groups.
void write_virtual_file(const std::string& path, const Manifest& manifest) {
  hdf5::File file = hdf5::File::create(path);
  const std::vector<Piece>& p = manifest.pieces;
  for (std::size_t first = 0; first < p.size();) {
    std::size_t last = first + 1;
    while (last < p.size() && p[last].group == p[first].group && p[last].tensor == p[first].tensor) ++last;
    file.write_virtual(p, first, last);
    first = last;
  }
  file.write_attribute("step", std::to_string(manifest.meta.step));
  file.write_attribute("config", manifest.meta.config);
  file.close();
  sync_file(path);
}

}  // namespace

void check_slices(const std::vector<Slice>& slices) {
  for (const Slice& s : slices) {
    ANNULUS_CHECK(is_group_name(s.group), "\"{}\" is no name for a group of tensors", s.group);
    ANNULUS_CHECK(is_tensor_name(s.tensor), "\"{}\" is no name for a tensor", s.tensor);
    ANNULUS_CHECK(is_storable(s.data.dtype), "{}/{}: {} is not stored", s.group, s.tensor, name_of(s.data.dtype));
    const int rank = s.global_shape.rank();
    ANNULUS_CHECK((rank == 1 || rank == 2) && s.global_shape.numel() > 0, "{}/{}: shape {} is not stored", s.group,
                  s.tensor, s.global_shape.str());
    ANNULUS_CHECK(s.begin >= 0 && s.begin <= s.global_shape.numel() - s.data.numel(),
                  "{}/{} of shape {}: no range {}+{}", s.group, s.tensor, s.global_shape.str(), s.begin,
                  s.data.numel());
  }
}

ShardReport write_shard(const ShardJob& job) {
  const auto at = [&](const char* point) { reach(point, job.rank, job.step); };
  at("before_folder");
  ShardReport report;
  make_folders(job.folder);  // also where this rank has nothing to write: some rank must
  const std::string name = fmt::format("shard-{:05}.h5", job.rank), path = job.folder + "/" + name;
  if (std::all_of(job.slices.begin(), job.slices.end(), [](const Slice& s) { return s.data.numel() == 0; }))
    return report;

  const auto between = [&] {
    at("mid_datasets");
    parallel::Heartbeat::touch();  // the last save of a run is waited for, on whatever disk
    if (job.cancelled && job.cancelled()) throw CheckpointError(fmt::format("{}: given up", path));
  };
  hdf5::File file = hdf5::File::create(path);
  at("after_shard_create");
  for (const Slice& slice : job.slices) {
    std::vector<char> filled(slice.fill ? static_cast<std::size_t>(slice.data.bytes()) : 0);
    if (slice.fill) slice.fill({filled.data(), slice.data.dtype, DeviceKind::cpu, slice.data.shape});
    const char* data = slice.fill ? filled.data() : static_cast<const char*>(slice.data.data);
    for (const Rect& rect : cut(slice.begin, slice.data.numel(), columns_of(slice.global_shape))) {
      Piece piece{slice.group, slice.tensor, slice.data.dtype, slice.global_shape, rect, name, {}};
      piece.hash = hash_of(data, static_cast<std::size_t>(piece.bytes()));
      if (!report.pieces.empty()) between();
      file.write_piece(piece, data, between);
      if (report.pieces.empty()) at("after_first_dataset");
      data += piece.bytes();
      report.pieces.push_back(std::move(piece));
    }
  }
  at("before_shard_close");
  file.close();
  at("before_shard_fsync");
  sync_file(path);
  report.files.push_back({name, file_size(path)});
  at("after_shard");
  return report;
}

std::int64_t commit(const std::string& tmp, const std::function<void()>& rename, const Meta& meta,
                    std::vector<ShardReport> reports) {
  const auto at = [&](const char* point) { reach(point, 0, meta.step); };
  Manifest manifest{meta, {}, {}};
  for (ShardReport& report : reports) {
    std::move(report.files.begin(), report.files.end(), std::back_inserter(manifest.files));
    std::move(report.pieces.begin(), report.pieces.end(), std::back_inserter(manifest.pieces));
  }
  sort_pieces(manifest.pieces);
  check_tiling(manifest.pieces, tmp);
  // A writer whose files this host cannot see (another host's disk) would make a checkpoint that nobody can read.
  for (const ShardFile& f : manifest.files) {
    if (const auto found = file_size(tmp + "/" + f.name); found != f.bytes) {
      throw CheckpointError(
          fmt::format("{}/{}: its rank wrote {} bytes, rank 0 sees {}; is the run folder shared by all hosts?", tmp,
                      f.name, f.bytes, found));
    }
  }
  at("before_virtual_file");
  const std::string virtual_path = tmp + "/" + kVirtualName;
  write_virtual_file(virtual_path, manifest);
  manifest.files.push_back({kVirtualName, file_size(virtual_path)});
  at("after_virtual_file");

  at("before_manifest");
  const std::string text = to_text(manifest);
  write_file(tmp + "/" + kManifestName, text, [&] { at("mid_manifest"); });
  sync_file(tmp);
  at("after_manifest");
  rename();
  at("after_rename");

  std::int64_t bytes = static_cast<std::int64_t>(text.size());
  for (const ShardFile& f : manifest.files) bytes += f.bytes;
  return bytes;
}

std::vector<std::string> prune(const std::string& run_dir, std::int64_t step, int keep) {
  std::vector<std::string> trash;
  int whole = 0;
  for (const RunEntry& entry : list_run(run_dir)) {
    if (entry.kind != RunEntry::Kind::committed || entry.step > step) continue;
    const std::string path = run_dir + "/" + entry.name;
    if (whole < keep) {
      try {
        Checkpoint::open(path);
        ++whole;
      } catch (const CheckpointError&) {  // damaged: does not count, and may still be of use to somebody
      }
      continue;
    }
    const std::string moved = run_dir + "/.trash-" + entry.name;
    delete_tree(moved);
    rename_path(path, moved);
    trash.push_back(moved);
  }
  if (!trash.empty()) sync_file(run_dir);
  return trash;
}

}  // namespace annulus::checkpoint
