#include "checkpoint/new_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "checkpoint/folder.h"
#include "core/error.h"

namespace annulus::checkpoint {
namespace {

bool is_still(int file, const std::string& path) {
  struct stat open_one, named_one;
  return ::fstat(file, &open_one) == 0 && ::lstat(path.c_str(), &named_one) == 0 &&
         open_one.st_dev == named_one.st_dev && open_one.st_ino == named_one.st_ino;
}

}  // namespace

NewFolder::NewFolder(std::string path) : path_(std::move(path)) {
  while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
  if (exists(path_)) throw CheckpointError(fmt::format("{}: is there already; name a folder that is not", path_));
  tmp_ = path_ + ".tmp";
  while (true) {
    make_folders(tmp_);
    file_ = ::open(tmp_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (file_ < 0 && errno == ENOENT) continue;  // it was renamed or deleted just now
    if (file_ < 0) {
      throw CheckpointError(fmt::format("{}: {} is written there first: {}; remove it, or name another folder", tmp_,
                                        path_, std::strerror(errno)));
    }
    const bool locked = ::flock(file_, LOCK_EX | LOCK_NB) == 0;
    if (!locked && errno == EWOULDBLOCK) {
      ::close(file_);
      throw CheckpointError(fmt::format(
          "{}: another process is writing {}; wait until it has ended, or name another folder", tmp_, path_));
    }
    if (is_still(file_, tmp_)) break;
    ::close(file_);
  }
  clear_folder(tmp_);
}

void NewFolder::commit() {
  rename_to_new(tmp_, path_);
  done_ = true;
}

NewFolder::~NewFolder() {
  if (!done_) delete_tree(tmp_);
  ::close(file_);
}

}  // namespace annulus::checkpoint
