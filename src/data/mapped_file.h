// MappedFile: the bytes of one file, read-only. Mapped rather than copied, so that the ranks of a host share one copy
// in the page cache; a file below 64 KiB is read into memory, since a process has only about 65,000 maps and folders of
// short documents can hold more files than that. Files must not change while they are open (a shorter one ends the
// process with SIGBUS). Errors are DataErrors that name the path. Not collective.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace annulus::data {

class MappedFile {
 public:
  explicit MappedFile(std::string path);  // a regular file that is not empty
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  std::string_view bytes() const { return bytes_; }

 private:
  std::string path_;
  std::string_view bytes_;  // owned
};

// The data files that `path` names: itself, or the .txt, .jsonl and .bin files directly in the folder, sorted by name
// (bytewise; names that start with a dot and other extensions are passed over). DataError where there is none.
std::vector<std::string> data_files(const std::string& path);

}  // namespace annulus::data
