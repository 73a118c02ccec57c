// The file system part of the protocol: names, fsync, atomic rename, the list of a run folder. Failures are
// CheckpointErrors with the path and the system's reason.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::checkpoint {

struct RunEntry {
  enum class Kind { committed, unfinished, trash } kind;
  std::int64_t step = 0;
  std::string name;
};
// Folders of a run folder that the store made, newest step first; files, symbolic links and other names are not ours.
// Empty where the folder does not exist.
std::vector<RunEntry> list_run(const std::string& run_dir);

// An open file; closed with it. `flags` as open()'s.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags, mode_t mode = 0);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  void write(std::string_view text);
  void read_at(std::int64_t offset, void* out, std::size_t bytes) const;  // all of them
  void sync();
  void close();  // and learns what the file system kept for now

 private:
  std::string path_;
  int fd_;
};

void make_folders(const std::string& path);      // like mkdir -p
void sync_file(const std::string& path);         // fsync, also of a folder
std::string parent_of(const std::string& path);  // "." for a bare name
// Writes and syncs; calls `half` when half of it is written.
void write_file(const std::string& path, std::string_view text, const std::function<void()>& half = nullptr);
std::string read_file(const std::string& path, std::int64_t max_bytes);
// Size of a regular file; CheckpointError for anything else (a symbolic link is not followed).
std::int64_t file_size(const std::string& path);
bool exists(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
// The same where `to` must not be there: CheckpointError if it is. Syncs the parent.
void rename_to_new(const std::string& from, const std::string& to);
// Renames folder `from` to `to` and syncs the parent. A folder that `to` already is, is exchanged for it in one step
// where the file system can, and left under `displaced`.
void commit_rename(const std::string& from, const std::string& to, const std::string& displaced);
void clear_folder(const std::string& path);  // deletes everything in it
// Deletes a folder with everything in it; `between` after each file. False if something is left.
bool delete_tree(const std::string& path, const std::function<void()>& between = nullptr);

}  // namespace annulus::checkpoint
