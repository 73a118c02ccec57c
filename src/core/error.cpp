#include "core/error.h"

#include <cstring>

namespace annulus::detail {

void fail_check(const char* condition, const char* file, int line, const std::string& message) {
  const char* source = std::strstr(file, "/src/");  // the path inside the project, not the builder's folders
  throw Error(fmt::format("{} (check `{}` failed at {}:{})", message, condition, source ? source + 1 : file, line));
}

}  // namespace annulus::detail
