// OutputFile: a new file that appears under its name whole or not at all. It is written beside that name, synced and
// renamed by commit(); without commit() nothing stays. Errors are DataErrors with the path and the system's reason (a
// full disk too). Not collective.
#pragma once

#include <string>
#include <string_view>

namespace annulus::data {

class OutputFile {
 public:
  // UsageError where `path` exists, unless `replace`; a folder never is replaced.
  OutputFile(std::string path, bool replace);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::string_view text);
  void commit();

 private:
  void flush();
  [[noreturn]] void fail(const char* call) const;

  std::string path_, temporary_, buffer_;
  int fd_ = -1;
};

}  // namespace annulus::data
