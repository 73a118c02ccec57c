#include "checkpoint/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "checkpoint/folder.h"
#include "core/error.h"

namespace annulus::checkpoint {
namespace {

constexpr auto kPatience = std::chrono::seconds(3);

std::string own_name() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return fmt::format("process {} on {}", ::getpid(), host);
}

std::string holder(int file) {
  char text[300];
  const ssize_t n = ::pread(file, text, sizeof text, 0);
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : "unknown";
}

}  // namespace

RunLock::RunLock(const std::string& run_dir) {
  make_folders(run_dir);
  const std::string path = run_dir + "/.lock";
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) {
    throw CheckpointError(
        fmt::format("{}: nothing can be written into the run folder: {}; choose another "
                    "checkpoint.dir, or make this one writable",
                    run_dir, std::strerror(errno)));
  }
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return;  // no locks here
    if (std::chrono::steady_clock::now() > deadline) {
      const std::string who = holder(file_);
      ::close(file_);
      throw ConfigError(
          fmt::format("{}: another run uses this folder ({}); wait for its end, or choose another "
                      "checkpoint.dir",
                      run_dir, who));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::string name = own_name();  // for messages only, so that a full disk does not matter
  if (::ftruncate(file_, 0) == 0 && ::pwrite(file_, name.data(), name.size(), 0) < 0) return;
}

RunLock::~RunLock() { ::close(file_); }

}  // namespace annulus::checkpoint
