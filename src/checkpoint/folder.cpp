#include "checkpoint/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace annulus::checkpoint {
namespace {

[[noreturn]] void fail(const std::string& path, const char* call) {
  throw CheckpointError(fmt::format("{}: {}: {}", path, call, std::strerror(errno)));
}

// "step-00001000" -> 1000; -1 if the name is none of ours. Eight digits, more where the number needs them.
std::int64_t step_of(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return -1;
  name.remove_prefix(kPrefix.size());
  std::int64_t step = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool whole = error == std::errc() && end == name.data() + name.size() && name.size() >= 8;
  return whole && step >= 0 && (name.size() == 8 || name[0] != '0') ? step : -1;
}

bool is_folder(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

}  // namespace

Descriptor::Descriptor(const std::string& path, int flags, mode_t mode)
    : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
  if (fd_ < 0) fail(path_, "open");
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void Descriptor::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd_, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, "write");
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

void Descriptor::read_at(std::int64_t offset, void* out, std::size_t bytes) const {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = ::pread(fd_, static_cast<char*>(out) + done, bytes - done, offset + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, "read");
    if (n == 0) throw CheckpointError(fmt::format("{}: shrank while it was read", path_));
    done += static_cast<std::size_t>(n);
  }
}

void Descriptor::sync() {
  if (::fsync(fd_) != 0) fail(path_, "fsync");
}

void Descriptor::close() {
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) fail(path_, "close");
}

std::vector<RunEntry> list_run(const std::string& run_dir) {
  constexpr std::string_view kTmp = ".tmp", kTrash = ".trash-";
  std::vector<RunEntry> out;
  DIR* dir = ::opendir(run_dir.c_str());
  if (!dir) {
    if (errno == ENOENT) return out;
    if (errno == ENOTDIR) {
      throw CheckpointError(fmt::format("{}: a part of this path is a file; wanted a folder for the run", run_dir));
    }
    fail(run_dir, "opendir");
  }
  while (const dirent* entry = ::readdir(dir)) {
    const std::string_view name = entry->d_name;
    auto kind = RunEntry::Kind::committed;
    std::string_view core = name;
    if (core.starts_with(kTrash)) {
      kind = RunEntry::Kind::trash;
      core.remove_prefix(kTrash.size());
    } else if (core.ends_with(kTmp)) {
      kind = RunEntry::Kind::unfinished;
      core.remove_suffix(kTmp.size());
    }
    const std::int64_t step = step_of(core);
    if (step >= 0 && is_folder(run_dir + "/" + std::string(name))) out.push_back({kind, step, std::string(name)});
  }
  ::closedir(dir);
  std::sort(out.begin(), out.end(),
            [](const RunEntry& a, const RunEntry& b) { return a.step != b.step ? a.step > b.step : a.name > b.name; });
  return out;
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw CheckpointError(fmt::format("{}: the folder cannot be made: {}", path, error.message()));
}

void sync_file(const std::string& path) { Descriptor(path, O_RDONLY).sync(); }

std::string parent_of(const std::string& path) {
  auto p = std::filesystem::path(path);
  if (!p.has_filename()) p = p.parent_path();  // "run/" is run
  return p.has_parent_path() ? p.parent_path().string() : ".";
}

void write_file(const std::string& path, std::string_view text, const std::function<void()>& half) {
  Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  file.write(text.substr(0, text.size() / 2));
  if (half) half();
  file.write(text.substr(text.size() / 2));
  file.sync();
  file.close();
}

std::string read_file(const std::string& path, std::int64_t max_bytes) {
  const std::int64_t size = file_size(path);
  if (size > max_bytes) throw CheckpointError(fmt::format("{}: {} bytes; at most {} are read", path, size, max_bytes));
  std::string text(static_cast<std::size_t>(size), '\0');
  Descriptor(path, O_RDONLY | O_NOFOLLOW).read_at(0, text.data(), text.size());
  return text;
}

std::int64_t file_size(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) fail(path, "stat");
  if (!S_ISREG(info.st_mode)) throw CheckpointError(fmt::format("{}: not a regular file", path));
  return static_cast<std::int64_t>(info.st_size);
}

bool exists(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0;
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(from, ("rename to " + to).c_str());
}

void rename_to_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) != 0) {
    if (errno == EEXIST || exists(to)) {
      throw CheckpointError(fmt::format("{}: has appeared meanwhile; name a folder that is not there", to));
    }
    rename_path(from, to);  // a file system without the flag
  }
  sync_file(parent_of(to));
}

void commit_rename(const std::string& from, const std::string& to, const std::string& displaced) {
  if (exists(to)) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
      rename_path(from, displaced);
    } else {  // no exchange here: for a moment neither is in place, and older checkpoints must do
      rename_path(to, displaced);
      rename_path(from, to);
    }
  } else {
    rename_path(from, to);
  }
  sync_file(parent_of(to));
}

void clear_folder(const std::string& path) {
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(path, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    std::filesystem::remove_all(it->path(), error);
  }
  if (error) throw CheckpointError(fmt::format("{}: cannot be emptied: {}", path, error.message()));
}

bool delete_tree(const std::string& path, const std::function<void()>& between) {
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(path, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    std::error_code ignored;
    std::filesystem::remove_all(it->path(), ignored);
    if (between) between();
  }
  std::filesystem::remove_all(path, error);
  return !exists(path);
}

}  // namespace annulus::checkpoint
