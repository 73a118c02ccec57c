// Errors. Every failure is an exception derived from Error; main() maps it to the exit codes of the command line:
// 1 internal, 2 usage or config, 3 data, 4 checkpoint or model file, 5 diverged, 6 a rank hung or died, 75 stopped.
// A message says what, where, what was expected and what to do. No function here is collective.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#ifndef __CUDACC__  // nvcc rejects fmt 9 under C++20: device code passes ready strings
#include <fmt/core.h>
#endif

namespace annulus {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, int exit_code = 1) : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

struct UsageError : Error {
  explicit UsageError(const std::string& message) : Error(message, 2) {}
};
struct ConfigError : Error {
  explicit ConfigError(const std::string& message) : Error(message, 2) {}
};
struct DataError : Error {
  explicit DataError(const std::string& message) : Error(message, 3) {}
};
struct CheckpointError : Error {
  explicit CheckpointError(const std::string& message) : Error(message, 4) {}
};
struct DivergedError : Error {
  explicit DivergedError(const std::string& message) : Error(message, 5) {}
};
struct RankError : Error {
  explicit RankError(const std::string& message) : Error(message, 6) {}
};

namespace detail {
#ifdef __CUDACC__
inline std::string format_message(std::string message) { return message; }
#else
template <class... Args>
std::string format_message(fmt::format_string<Args...> text, Args&&... args) {
  return fmt::format(text, std::forward<Args>(args)...);
}
#endif
[[noreturn]] void fail_check(const char* condition, const char* file, int line, const std::string& message);
}  // namespace detail

}  // namespace annulus

// Internal invariants. In .cpp files the message is a fmt format string with arguments, in .cu files one std::string.
#define ANNULUS_CHECK(condition, ...)                                                                                \
  do {                                                                                                               \
    if (!(condition))                                                                                                \
      ::annulus::detail::fail_check(#condition, __FILE__, __LINE__, ::annulus::detail::format_message(__VA_ARGS__)); \
  } while (0)
