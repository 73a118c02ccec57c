// The steps of a save, below Writer: check the slices, write one rank's shard, commit a folder whose shards are
// complete, prune. All on the calling thread; nothing collective.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/store.h"

namespace annulus::checkpoint {

// Names, types and ranges; Error if the caller's slices could not be stored.
void check_slices(const std::vector<Slice>& slices);

struct ShardJob {
  std::string folder;  // step-….tmp, made if missing
  int rank = 0;
  std::int64_t step = 0;
  std::vector<Slice> slices;        // on the host
  std::function<bool()> cancelled;  // asked between blocks; may be empty
};
// Hashes, writes, closes and fsyncs.
ShardReport write_shard(const ShardJob& job);

// Writes checkpoint.h5 and the manifest into `tmp`, syncs it and calls `rename`, which gives it its name. Returns the
// bytes of all files.
std::int64_t commit(const std::string& tmp, const std::function<void()>& rename, const Meta& meta,
                    std::vector<ShardReport> reports);

// Renames to .trash-… the checkpoints that `keep` newer whole ones (`step` and older) make superfluous, returns the new
// paths. Only checkpoints whose manifest and file sizes are right count as whole. Checkpoints newer than `step` are
// left.
std::vector<std::string> prune(const std::string& run_dir, std::int64_t step, int keep);

}  // namespace annulus::checkpoint
