// Fingerprint: XXH3-128 over fields and file contents, the same on every host and for any paths.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace annulus::data {

class Fingerprint {
 public:
  void add(std::string_view text);
  void add(std::int64_t number);
  // Size and content. Of a file above 256 MiB: its first and last 64 MiB, and 1,024 blocks of 64 KiB spread evenly
  // between, so that a resume of a run on terabytes does not read them all; a change that misses all of these is not
  // seen.
  void add_file(std::string_view bytes);

  std::string hex() const;  // 32 digits

 private:
  std::string fields_;  // each with a tag and, where its length varies, its length
};

}  // namespace annulus::data
