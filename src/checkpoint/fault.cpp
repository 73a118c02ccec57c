#include "checkpoint/fault.h"

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <mutex>

#include "core/error.h"

namespace annulus::checkpoint {
namespace {

struct Fault {
  std::string_view point;
  int rank = -1;  // any
  std::int64_t step = 0;
};

template <class T>
bool parse_number(std::string_view text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() && out >= 0;
}

bool parse_fault(std::string_view text, Fault& fault) {
  if (const auto at = text.find('@'); at != text.npos) {
    if (!parse_number(text.substr(at + 1), fault.step)) return false;
    text = text.substr(0, at);
  }
  if (const auto colon = text.find(':'); colon != text.npos) {
    if (!parse_number(text.substr(colon + 1), fault.rank)) return false;
    text = text.substr(0, colon);
  }
  fault.point = text;
  return std::find(kFaultPoints.begin(), kFaultPoints.end(), text) != kFaultPoints.end();
}

std::mutex hook_mutex;
std::function<void(std::string_view)> fault_hook;

}  // namespace

void set_fault_hook(std::function<void(std::string_view point)> hook) {
  const std::lock_guard lock(hook_mutex);
  fault_hook = std::move(hook);
}

void check_fault_environment() {
  const char* text = std::getenv("ANNULUS_FAULT");
  Fault fault;
  if (!text || parse_fault(text, fault)) return;
  std::string names;
  for (const auto name : kFaultPoints) names += fmt::format(" {}", name);
  throw UsageError(
      fmt::format("ANNULUS_FAULT=\"{}\" is not point[:rank][@step] with one of the points{}", text, names));
}

void reach(std::string_view point, int rank, std::int64_t step) {
  if (const char* text = std::getenv("ANNULUS_FAULT")) {
    Fault fault;
    if (parse_fault(text, fault) && fault.point == point && (fault.rank < 0 || fault.rank == rank) &&
        step >= fault.step) {
      std::raise(SIGKILL);
    }
  }
  std::function<void(std::string_view)> hook;
  {
    const std::lock_guard lock(hook_mutex);
    hook = fault_hook;
  }
  if (hook) hook(point);
}

}  // namespace annulus::checkpoint
