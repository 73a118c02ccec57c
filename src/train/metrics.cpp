#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace annulus::train {
namespace {

std::string with_thousands(double value) {
  std::string digits = fmt::format("{:.0f}", value), out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

// The step a record belongs to; −1 if the line is none of ours.
std::int64_t step_of(const std::string& line) {
  const char* at = std::strstr(line.c_str(), "\"step\":");
  return at && !line.empty() && line.back() == '}' ? std::atoll(at + 7) : -1;
}

[[noreturn]] void fail(const std::string& path) {
  throw CheckpointError(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
}

// Keeps records up to `step`; the old file stays until the new one is whole.
void cut_back(const std::string& path, std::int64_t step) {
  std::ifstream in(path);
  if (!in) return;
  const std::string tmp = path + ".tmp";
  {
    std::ofstream out(tmp);
    for (std::string line; std::getline(in, line);) {
      const std::int64_t at = step_of(line);
      if (at >= 0 && at <= step) out << line << '\n';
    }
    out.flush();
    if (!out) fail(tmp);
  }
  if (std::rename(tmp.c_str(), path.c_str()) != 0) fail(path);
}

std::string target_of_stdout(const std::string& process) {
  std::error_code error;
  return std::filesystem::read_symlink(fmt::format("/proc/{}/fd/1", process), error).string();
}

std::string parent_of(const std::string& process) {
  std::ifstream status(fmt::format("/proc/{}/status", process));
  for (std::string word; status >> word;) {
    if (word == "PPid:" && status >> word) return word;
  }
  return "";
}

// mpirun gives its ranks a terminal of its own making: what counts is where mpirun itself writes to, the first process
// above this one, and above wrappers such as timeout, whose output is another.
bool writes_to_terminal() {
  if (!isatty(STDOUT_FILENO)) return false;
  if (!std::getenv("OMPI_COMM_WORLD_SIZE")) return true;
  const std::string own = target_of_stdout("self");
  std::string process = parent_of("self");
  while (!process.empty() && target_of_stdout(process) == own) process = parent_of(process);
  return !process.empty() && target_of_stdout(process).starts_with("/dev/");
}

std::string number(double x) { return std::isfinite(x) ? fmt::format("{:.9g}", x) : "null"; }
std::string exact(double x) { return std::isfinite(x) ? fmt::format("{}", x) : "null"; }

}  // namespace

std::string format_duration(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds);
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m", (s + 30) / 60);
  return fmt::format("{}h {:02}m", s / 3600, s % 3600 / 60);
}

std::string format_step(const StepRecord& r, double seconds_per_step) {
  return fmt::format(
      "step {}/{} | loss {:.4f} | grad norm {:.2f} | lr {:.1e} | {} tok/s | mfu {:.1f}%{} | {:.1f} GiB | eta {}",
      r.step, r.steps, r.loss, r.grad_norm, r.lr, with_thousands(r.tokens_per_second), 100 * r.mfu,
      r.dense_mfu > 0 ? fmt::format(" (as dense {:.1f}%)", 100 * r.dense_mfu) : "", r.memory_gib,
      format_duration(seconds_per_step * static_cast<double>(r.steps - r.step)));
}

Metrics::Metrics(const std::string& path, std::int64_t resumed_step, bool bar)
    : path_(path), bar_(bar && writes_to_terminal()) {
  cut_back(path, resumed_step);
  file_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) fail(path);
  size_ = static_cast<std::int64_t>(std::filesystem::file_size(path));
}

Metrics::~Metrics() {
  if (bar_drawn_) std::fputc('\n', stdout);
  ::close(file_);
}

void Metrics::event(const std::string& json) {
  const std::string line = json + "\n";
  const auto written = ::write(file_, line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) {
    size_ += written;
    return;
  }
  const std::string why = written < 0 ? std::strerror(errno) : "no space left";
  // Half a record would spoil the file.
  if (::ftruncate(file_, size_) != 0 || warned_) return;
  warned_ = true;
  clear_bar();
  fmt::print(stderr, "annulus: warning: {}: cannot be written: {}; records are left out\n", path_, why);
}

void Metrics::step(const StepRecord& r) {
  event(fmt::format(R"({{"kind":"step","step":{},"loss":{},"grad_norm":{},"lr":{},"seconds":{},"tokens_per_second":{},)"
                    R"("mfu":{},{}"tokens_seen":{}}})",
                    r.step, exact(r.loss), exact(r.grad_norm), number(r.lr), number(r.seconds),
                    number(r.tokens_per_second), number(r.mfu),
                    r.dense_mfu > 0 ? fmt::format("\"dense_equivalent_mfu\":{},", number(r.dense_mfu)) : "",
                    r.tokens_seen));
  smoothed_seconds_ = smoothed_seconds_ == 0 ? r.seconds : 0.9 * smoothed_seconds_ + 0.1 * r.seconds;
  const std::string line = format_step(r, smoothed_seconds_);
  if (!bar_) {
    fmt::print("{}\n", line);
  } else {
    constexpr std::int64_t kWidth = 24;
    const auto done = static_cast<std::size_t>(r.steps > 0 ? kWidth * r.step / r.steps : kWidth);
    fmt::print("\r\033[K[{}{}] {}", std::string(done, '='), std::string(kWidth - done, ' '), line);
    bar_drawn_ = true;
  }
  std::fflush(stdout);
}

void Metrics::clear_bar() {
  if (bar_drawn_) fmt::print("\r\033[K");
  bar_drawn_ = false;
}

void Metrics::eval(const EvalRecord& r) {
  event(fmt::format(R"({{"kind":"eval","step":{},"loss":{},"bits_per_byte":{},"tokens":{}}})", r.step, exact(r.loss),
                    r.bits_per_byte < 0 ? "null" : number(r.bits_per_byte), r.tokens));
  note(r.bits_per_byte < 0 ? fmt::format("eval {} | loss {:.4f} | {} tokens", r.step, r.loss,
                                         with_thousands(static_cast<double>(r.tokens)))
                           : fmt::format("eval {} | loss {:.4f} | {:.4f} bits per byte | {} tokens", r.step, r.loss,
                                         r.bits_per_byte, with_thousands(static_cast<double>(r.tokens))));
}

void Metrics::note(const std::string& text) {
  clear_bar();
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

}  // namespace annulus::train
