// A folder that appears under its name whole or not at all: it is filled as <path>.tmp and renamed. Not collective.
#pragma once

#include <string>

namespace annulus::checkpoint {

class NewFolder {
 public:
  // Makes the temporary folder and locks it, so that two processes never fill the same; what an ended process left in
  // it is deleted. CheckpointError where `path` is there already, or another process is at it.
  explicit NewFolder(std::string path);
  ~NewFolder();  // deletes what was not committed
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& path() const { return path_; }
  const std::string& tmp() const { return tmp_; }
  void commit();  // the rename; CheckpointError where `path` has appeared meanwhile

 private:
  std::string path_, tmp_;
  int file_ = -1;  // the locked folder
  bool done_ = false;
};

}  // namespace annulus::checkpoint
