// RunLock: one run at a time in a run folder. Held by rank 0 for as long as the process lives, however it ends: an
// flock on the file .lock in the folder. Not collective.
#pragma once

#include <string>

namespace annulus::checkpoint {

class RunLock {
 public:
  // Makes the folder if it is missing. Waits a few seconds for ranks that are just being killed; then ConfigError that
  // names who holds it. CheckpointError where nothing can be written. A file system without locks is taken as free.
  explicit RunLock(const std::string& run_dir);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace annulus::checkpoint
