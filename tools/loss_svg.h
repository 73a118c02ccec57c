// A loss curve as an SVG picture: training losses thin, their running mean bold, validation losses as dots. Plain text,
// no file. Points are in order of step.
#pragma once

#include <string>
#include <vector>

namespace annulus::tools {

struct LossPoint {
  double step = 0, loss = 0;  // loss in nats per token
};

struct LossCurves {
  std::vector<LossPoint> training, validation;
};

std::string draw_loss_svg(const std::string& title, const LossCurves& curves);

}  // namespace annulus::tools
