// A folder of data files for one test, removed with it; and a check of what an error says.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace annulus::data::testing {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "annulus-data-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  std::string write(const std::string& name, std::string_view content) const {
    const std::string path = *this / name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
    return path;
  }

 private:
  std::string path_;
};

// An llm.c token file; `count` < 0: the number of tokens.
template <class Token>
std::string token_file(std::uint32_t magic, std::uint32_t version, const std::vector<Token>& tokens,
                       std::int64_t count = -1) {
  std::string bytes(1024, '\0');
  const std::uint32_t header[3] = {magic, version, static_cast<std::uint32_t>(count < 0 ? std::ssize(tokens) : count)};
  std::memcpy(bytes.data(), header, sizeof(header));
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
  return bytes;
}
inline std::string token_file_u16(const std::vector<std::uint16_t>& tokens) { return token_file(20240520, 1, tokens); }
inline std::string token_file_u32(const std::vector<std::uint32_t>& tokens) { return token_file(20240801, 7, tokens); }

// `action` throws ErrorType, whose message has every part.
template <class ErrorType, class Action>
void expect_error(const Action& action, const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const ErrorType& error) {
    for (const auto& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << "'" << part << "' not in: " << error.what();
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error; expected one with '" << (parts.empty() ? "" : parts[0]) << "'";
}

}  // namespace annulus::data::testing
