#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/error.h"
#include "loss_svg.h"

namespace annulus::tools {

namespace {

// Records of metrics.jsonl. A last line without its newline is one that is being written, or was when the run was
// killed.
LossCurves read_metrics(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw DataError(
        fmt::format("cannot read {}: {}; name a run folder or its metrics.jsonl", path, std::strerror(errno)));
  }
  LossCurves curves;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (file.eof()) break;
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object()) {
      throw DataError(
          fmt::format("{}:{}: not a JSON object; expected records as `annulus train` writes them", path, number));
    }
    const auto step = record.find("step"), loss = record.find("loss");
    if (step == record.end() || loss == record.end() || !step->is_number() || !loss->is_number()) continue;
    const LossPoint point{step->get<double>(), loss->get<double>()};
    (record.value("kind", "step") == "eval" ? curves.validation : curves.training).push_back(point);
  }
  if (curves.training.empty() && curves.validation.empty()) {
    throw DataError(fmt::format("{} holds no losses yet; expected records with step and loss", path));
  }
  return curves;
}

}  // namespace

int run_plot(const PlotCommand& command) {
  namespace fs = std::filesystem;
  const fs::path run = command.run;
  const fs::path metrics = fs::is_directory(run) ? run / "metrics.jsonl" : run;
  const LossCurves curves = read_metrics(metrics.string());
  const fs::path output = command.output.empty() ? metrics.parent_path() / "loss.svg" : fs::path(command.output);
  const fs::path folder = fs::absolute(metrics).parent_path();
  std::ofstream file(output, std::ios::binary);
  file << draw_loss_svg(folder.filename().string(), curves);
  file.close();
  if (!file) throw DataError(fmt::format("cannot write {}: {}", output.string(), std::strerror(errno)));
  fmt::print("{}\n", output.string());
  return 0;
}

}  // namespace annulus::tools
