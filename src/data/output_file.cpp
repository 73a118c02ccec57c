#include "data/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace annulus::data {
namespace {

constexpr std::size_t kBuffer = std::size_t{1} << 20;

}  // namespace

OutputFile::OutputFile(std::string path, bool replace)
    : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_, ::getpid())) {
  struct stat info;
  if (::lstat(path_.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) throw UsageError(fmt::format("{} is a folder; name the file to write", path_));
    if (!replace) throw UsageError(fmt::format("{} exists; name another file, or replace it with --force", path_));
  }
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  if (!folder.empty() && !std::filesystem::exists(folder)) {
    throw DataError(fmt::format("{} cannot be written: there is no folder {}; make it first", path_, folder.string()));
  }
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("open");
}

OutputFile::~OutputFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void OutputFile::write(std::string_view text) {
  buffer_ += text;
  if (buffer_.size() >= kBuffer) flush();
}

void OutputFile::flush() {
  std::string_view rest = buffer_;
  while (!rest.empty()) {
    const ssize_t n = ::write(fd_, rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write");
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
  buffer_.clear();
}

void OutputFile::commit() {
  flush();
  if (::fsync(fd_) != 0) fail("fsync");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
  ::close(std::exchange(fd_, -1));
  // The name too is to outlive a power cut; where a folder cannot be synced the file itself is still whole.
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  (void)::fsync(fd);
  ::close(fd);
}

void OutputFile::fail(const char* call) const {
  const std::string why = std::strerror(errno);
  const bool older = ::access(path_.c_str(), F_OK) == 0;
  throw DataError(fmt::format("{} cannot be written: {}: {}; {}", path_, call, why,
                              older ? "the older file is as it was" : "nothing is left of it"));
}

}  // namespace annulus::data
