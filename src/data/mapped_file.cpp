#include "data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "core/error.h"

namespace annulus::data {
namespace {

constexpr std::size_t kSmallestMap = 64 << 10;

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

std::string_view read_all(int fd, std::size_t size, const std::string& path) {
  auto memory = std::make_unique<char[]>(size);
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = ::read(fd, memory.get() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw DataError(fmt::format("{}: cannot read: {}", path, std::strerror(errno)));
    if (n == 0) throw DataError(fmt::format("{}: became shorter while it was read", path));
    done += static_cast<std::size_t>(n);
  }
  return {memory.release(), size};
}

bool is_data_file(const std::filesystem::path& path) {
  const auto extension = path.extension();
  return extension == ".txt" || extension == ".jsonl" || extension == ".bin";
}

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: a pipe is refused below and not waited for.
  const Descriptor file{::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) throw DataError(fmt::format("{}: cannot open: {}", path_, std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.fd, &status) != 0) throw DataError(fmt::format("{}: cannot stat: {}", path_, std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) throw DataError(fmt::format("{}: not a regular file: it cannot be mapped", path_));
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) throw DataError(fmt::format("{}: empty file: remove it, or put a document into it", path_));
  if (size < kSmallestMap) {
    bytes_ = read_all(file.fd, size, path_);
    return;
  }
  void* map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd, 0);
  if (map == MAP_FAILED) {
    throw DataError(fmt::format("{}: cannot map its {} bytes: {}{}", path_, size, std::strerror(errno),
                                errno == ENOMEM ? ": join many files into .jsonl, or raise vm.max_map_count" : ""));
  }
  bytes_ = {static_cast<const char*>(map), size};
}

MappedFile::~MappedFile() {
  if (bytes_.size() < kSmallestMap) {
    delete[] bytes_.data();
  } else {
    ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
  }
}

std::vector<std::string> data_files(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    throw DataError(fmt::format("{}: no such file or folder: check the path (a relative one starts from {})", path,
                                fs::current_path(error).string()));
  }
  if (!fs::is_directory(status)) {
    if (is_data_file(path)) return {path};
    throw DataError(fmt::format(
        "{}: expected a .txt, .jsonl or .bin file or a folder of these: the extension says how to read it", path));
  }
  std::vector<std::string> files;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code gone;
    if (entry->path().filename().native().front() != '.' && is_data_file(entry->path()) && !entry->is_directory(gone)) {
      files.push_back(entry->path().string());
    }
  }
  if (error) throw DataError(fmt::format("{}: cannot list the folder: {}", path, error.message()));
  if (files.empty()) {
    throw DataError(fmt::format(
        "{}: no .txt, .jsonl or .bin file directly in this folder: name a folder that has some (inner folders are not "
        "searched)",
        path));
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace annulus::data
