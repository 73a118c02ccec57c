// The checkpoint store (spec/checkpoint.md): named tensors in flat slices, one HDF5 file per writing rank, a manifest
// that is written last, a rename that commits. Nothing in it depends on the number of ranks or on the device: a tensor
// is a flat row-major array, and any range of it can be read back whatever ranks wrote it.
//
//   run/step-00001000/shard-00000.h5 …  one per rank that had slices: a dataset per rectangular piece,
//   /group/tensor@begin,
//                                       attributes offset, global_shape, dtype; no filters, chunks of 1-4 MiB
//                     checkpoint.h5     every tensor whole, as virtual datasets over the shards: for people and h5py
//                     manifest.json     what is there, every file's size, every piece's XXH3-128
//   run/step-00001000.tmp               a save that runs, or one that was interrupted; never read
//   run/.trash-step-…                   a pruned checkpoint being deleted; never read
//   run/aside-step-00001000             a checkpoint newer than the one a run went on from (set_aside_newer); read by
//   path only
//
// Values are little-endian f32, f64 or bf16; bf16 is a 16-bit HDF5 float type, and HDF5 never converts. Everything that
// goes wrong with a checkpoint is a CheckpointError that names file, tensor, what was wanted and what was found.
// HDF5 files can be crafted to attack the library that reads them: the checks here refuse links, external and virtual
// storage, filters and wrong sizes, but open only files that you trust.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/tensor_source.h"
#include "core/arena.h"
#include "parallel/communicator.h"

namespace annulus::checkpoint {

// A contiguous flat range of a named tensor. The ranges of all ranks tile every tensor exactly once.
struct Slice {
  std::string group;       // "model", "optimizer/m", "optimizer/v", "optimizer/master"
  std::string tensor;      // "model.embed_tokens.weight"
  Shape global_shape;      // rank 1 or 2
  std::int64_t begin = 0;  // first element in the flat row-major tensor
  TensorView data;         // [count], f32, f64 or bf16; count may be 0
  // Of conversions, where data.data is null: writes the values into a view like `data` when their turn comes.
  std::function<void(const TensorView& out)> fill{};
};

// What the manifest says beside the slices. `ranks` is for information only.
struct Meta {
  std::int64_t step = 0, tokens_seen = 0, tokens_planned = 0;
  // TOML: the resolved run config, or of a model without a recipe only what it is (config.h, without_recipe).
  std::string config;
  std::string data_fingerprint;             // TrainingData::fingerprint()
  std::vector<std::int64_t> data_position;  // samples taken of every source
  std::uint64_t seed = 0;
  std::string precision = "fp32";
  int ranks = 1;
  std::string provenance;  // where it came from: conversions, source files
  bool operator==(const Meta&) const = default;
};

std::string step_name(std::int64_t step);  // "step-00001000"

// How slices come to the host. The default is memcpy from host memory into pageable memory; a GPU run gives pinned
// memory, a copy that may be asynchronous, and what waits for it.
struct HostCopy {
  Allocator allocator = cpu_allocator();
  std::function<void(const TensorView& from, void* to)> fetch;  // empty: memcpy; slices must lie on the host
  std::function<void()> wait;                                   // after the last fetch; may be empty
};

// State of a rank's save, ordered so that one MAX over ranks says what the job may do: done (1): all are done, finish()
// may commit; failed (3): some rank failed, finish() clears away; running (2): go on training; idle (0): no save
// anywhere.
enum Status : std::int64_t { kIdle = 0, kDone = 1, kRunning = 2, kFailed = 3 };

struct Outcome {
  bool ok = true;
  std::string message;  // one line for the log; on failure what went wrong, on which rank
  std::string path;     // the committed checkpoint
  std::int64_t step = 0, bytes = 0;
  double seconds = 0;  // from start() to the commit, rank 0's clock
};

// One per rank. One background thread does all HDF5 of this rank, hashes, fsyncs, and on rank 0 the commit and the
// deletion of pruned checkpoints; the main thread copies slices, exchanges records in finish(), and waits there for
// rank 0's commit (two small files and the fsyncs of files that already lie on disk).
//
// The trainer, every step, on every rank, in this order: status() goes into the step's host reduction with MAX; when
// the result is over(), finish(result); then start() where a save is due. A save that fails removes its folder, older
// checkpoints stay, and the next start() is free to try again.
class Writer {
 public:
  struct Options {
    std::string run_dir;  // made if missing
    int keep = 2;         // >= 2
    HostCopy copy;
  };

  // Collective over `world`, which outlives the writer and carries host data. Removes what interrupted saves and
  // prunings left in the run folder: choose the checkpoint to resume from (find_newest) first, since it tells of these.
  // Throws CheckpointError on every rank when rank 0 cannot use the folder; ConfigError when keep < 2; UsageError for
  // an ANNULUS_FAULT that names no point.
  Writer(parallel::Communicator& world, Options options);
  Writer(parallel::Communicator& world, std::string run_dir, int keep) : Writer(world, Options{run_dir, keep, {}}) {}
  ~Writer();  // abandons a running save; its .tmp folder is removed by the next Writer of the run folder
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Bytes of the host buffer for these slices; reserve() takes it now (else the first start() does). Not collective.
  static std::int64_t host_bytes(const std::vector<Slice>& slices);
  void reserve(const std::vector<Slice>& slices);

  // Copies the slices to the host and returns; the background thread goes on. Makes no collective call, yet every rank
  // calls it at the same step, and it answers the same on all: false, with a message, while an earlier save has not
  // been finished. A rank that cannot copy (no memory, another set of slices than the buffer was made for) counts as
  // failed.
  [[nodiscard]] bool start(const Meta& meta, const std::vector<Slice>& slices, std::string& message);

  std::int64_t status() const;  // this rank's Status
  static bool over(std::int64_t reduced_max) { return reduced_max == kDone || reduced_max == kFailed; }
  // Collective, on the MAX of all ranks' status() when it is over(). Commits (kDone) or clears away (kFailed). The
  // outcome is the same on all ranks. Does not throw for anything that the disk does.
  Outcome finish(std::int64_t reduced_max);
  // Collective: waits for a running save and finishes it; empty where none runs. For the last save of a run.
  std::optional<Outcome> wait_and_finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One process writes a whole checkpoint as `folder` (for conversion): same protocol, returns when committed. Not
// collective. The folder must not exist. Slices lie on the host and are not copied, or are filled in turn. Returns the
// bytes of all files.
std::int64_t write_folder(const std::string& folder, const Meta& meta, const std::vector<Slice>& slices);

// A committed checkpoint, opened to read. Copies share the open files. Reads are serialised by HDF5; not collective.
class Checkpoint : public TensorSource {
 public:
  // Reads the manifest and checks it (version, checksum, plain file names, pieces that tile every tensor exactly, no
  // file smaller than its pieces) and every file's size.
  static Checkpoint open(const std::string& path);

  const std::string& path() const override;
  const Meta& meta() const;
  const std::vector<TensorInfo>& tensors() const override;

  // Checks this share of the checkpoint, split by bytes: the structure of shards (hard links to groups and to exactly
  // the datasets of the manifest) and the hash of every piece.
  void verify(int part = 0, int parts = 1) const;

  // Every dataset is checked before it is read; hashes are verify()'s part.
  void read(std::string_view group, std::string_view tensor, std::int64_t begin, TensorView out) const override;

 private:
  friend Checkpoint open_collective(parallel::Communicator&, const std::string&);
  static Checkpoint from_manifest(const std::string& path, const std::string& text);
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The newest checkpoint of a run folder that verifies; empty if there is none. `skipped` says for each newer one, and
// for each save that was interrupted later, why it was passed over.
std::optional<Checkpoint> find_newest(const std::string& run_dir, std::vector<std::string>& skipped);

// Opens and verifies; the ranks share the work and agree: what fails on one is the same CheckpointError on all. Rank
// 0's manifest counts. Collective.
Checkpoint open_collective(parallel::Communicator& world, const std::string& path);
std::optional<Checkpoint> find_newest_collective(parallel::Communicator& world, const std::string& run_dir,
                                                 std::vector<std::string>& skipped);

// The checkpoint folder that `path` means: itself, or the newest of a run folder that verifies. CheckpointError if
// neither.
std::string resolve_model_path(const std::string& path, std::vector<std::string>* skipped = nullptr);
bool is_checkpoint(const std::string& path);     // a folder with a manifest.json
bool is_run_folder(const std::string& path);     // a folder with a step-… folder
bool has_committed(const std::string& run_dir);  // a folder with a step-… folder whose save was complete, whole or not

// Renames checkpoints newer than `step` to aside-step-…, so that a run which goes on from an older one is not overtaken
// by what it left; says what it moved. By rank 0 after choosing, before the Writer is made. Not collective.
std::vector<std::string> set_aside_newer(const std::string& run_dir, std::int64_t step);

}  // namespace annulus::checkpoint
