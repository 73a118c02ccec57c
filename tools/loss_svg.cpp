#include "loss_svg.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace annulus::tools {

namespace {

constexpr double kWidth = 860, kHeight = 460;
constexpr double kLeft = 64, kRight = 24, kTop = 44, kBottom = 52;

// A step of 1, 2 or 5 times a power of ten that cuts the range into at most `most` parts.
double nice_step(double range, int most) {
  const double raw = range / most;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double m : {1.0, 2.0, 5.0}) {
    if (m * power >= raw * (1 - 1e-9)) return m * power;
  }
  return 10 * power;
}

struct Axis {
  double low, high, step;
  double from, to;  // pixels of low and high
  double at(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

Axis make_axis(double low, double high, int most, double from, double to) {
  if (high - low < 1e-9 * std::max(1.0, std::abs(high))) high = low + std::max(1e-3, 0.1 * std::abs(low));
  const double step = nice_step(high - low, most);
  return {std::floor(low / step + 1e-9) * step, std::ceil(high / step - 1e-9) * step, step, from, to};
}

std::string label(double value, double step) {
  const int digits = std::clamp(static_cast<int>(-std::floor(std::log10(step) + 1e-9)), 0, 9);
  return fmt::format("{:.{}f}", std::abs(value) < step / 2 ? 0.0 : value, digits);
}

// Centred running mean over up to a fortieth of the curve; narrower at its start, where a wide one would smear the
// fall, and one-sided at its end.
std::vector<LossPoint> smooth(const std::vector<LossPoint>& points) {
  std::vector<double> sum(points.size() + 1);  // of the losses before i
  for (std::size_t i = 0; i < points.size(); ++i) sum[i + 1] = sum[i] + points[i].loss;
  std::vector<LossPoint> out;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t half = std::min(i / 10, points.size() / 80);
    const std::size_t begin = i - half, end = std::min(i + half + 1, points.size());
    out.push_back({points[i].step, (sum[end] - sum[begin]) / static_cast<double>(end - begin)});
  }
  return out;
}

// At most two points per pixel column, the lowest and the highest, so that long runs stay small files.
std::vector<LossPoint> thin(const std::vector<LossPoint>& points, const Axis& x) {
  std::vector<LossPoint> out;
  for (std::size_t i = 0; i < points.size();) {
    const auto column = std::floor(x.at(points[i].step));
    std::size_t low = i, high = i, end = i;
    for (; end < points.size() && std::floor(x.at(points[end].step)) == column; ++end) {
      if (points[end].loss < points[low].loss) low = end;
      if (points[end].loss > points[high].loss) high = end;
    }
    out.push_back(points[std::min(low, high)]);
    if (low != high) out.push_back(points[std::max(low, high)]);
    i = end;
  }
  return out;
}

std::string polyline(const std::vector<LossPoint>& points, const Axis& x, const Axis& y, const char* style) {
  std::string text = fmt::format("<polyline fill=\"none\" {} points=\"", style);
  for (const LossPoint& p : thin(points, x)) text += fmt::format("{:.1f},{:.1f} ", x.at(p.step), y.at(p.loss));
  return text + "\"/>\n";
}

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    }
  }
  return out;
}

std::string draw_axes(const Axis& x, const Axis& y) {
  std::string text;
  const auto count = [](const Axis& axis) { return static_cast<int>(std::lround((axis.high - axis.low) / axis.step)); };
  for (int i = 0; i <= count(y); ++i) {
    const double value = y.low + i * y.step;
    text += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#e4e7eb\"/>\n", kLeft,
                        kWidth - kRight, y.at(value), y.at(value));
    text += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 8, y.at(value) + 4,
                        label(value, y.step));
  }
  for (int i = 0; i <= count(x); ++i) {
    const double value = x.low + i * x.step;
    text += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x.at(value),
                        kHeight - kBottom + 18, label(value, x.step));
  }
  text += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>\n", (kLeft + kWidth - kRight) / 2,
                      kHeight - 12);
  text += fmt::format(
      "<text x=\"16\" y=\"{0}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {0})\">loss, nats per token</text>\n",
      (kTop + kHeight - kBottom) / 2);
  return text;
}

std::string draw_legend(const LossCurves& curves) {
  std::string text;
  double right = kWidth - kRight;
  const auto entry = [&](const char* swatch, const std::string& words) {
    const double width = 7.0 * static_cast<double>(words.size()) + 34;
    right -= width;
    text += fmt::format("<g transform=\"translate({:.0f} 24)\">{}<text x=\"28\" y=\"4\">{}</text></g>\n", right, swatch,
                        words);
  };
  if (!curves.validation.empty()) {
    entry("<circle cx=\"12\" cy=\"0\" r=\"4\" fill=\"#c2410c\"/>",
          fmt::format("validation {:.3f}", curves.validation.back().loss));
  }
  if (!curves.training.empty()) {
    entry("<line x1=\"2\" x2=\"22\" y1=\"0\" y2=\"0\" stroke=\"#1d4ed8\" stroke-width=\"2.2\"/>",
          fmt::format("training {:.3f}", smooth(curves.training).back().loss));
  }
  return text;
}

}  // namespace

std::string draw_loss_svg(const std::string& title, const LossCurves& curves) {
  double last = 10, low = HUGE_VAL, high = -HUGE_VAL;
  for (const auto* curve : {&curves.training, &curves.validation}) {
    for (const LossPoint& p : *curve) {
      last = std::max(last, p.step);
      low = std::min(low, p.loss);
      high = std::max(high, p.loss);
    }
  }
  const Axis x = make_axis(0, last, 10, kLeft, kWidth - kRight);
  const Axis y = make_axis(low, high, 8, kHeight - kBottom, kTop);

  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#374151\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"28\" font-size=\"15\" font-weight=\"bold\">{3}</text>\n",
      kWidth, kHeight, kLeft, escape(title));
  text += draw_axes(x, y) + draw_legend(curves);
  if (curves.training.size() == 1) {  // no line yet
    const LossPoint& p = curves.training.front();
    text += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"#1d4ed8\"/>\n", x.at(p.step), y.at(p.loss));
  }
  text += polyline(curves.training, x, y, "stroke=\"#93c5fd\" stroke-width=\"1\"");
  text += polyline(smooth(curves.training), x, y, "stroke=\"#1d4ed8\" stroke-width=\"2.2\" stroke-linejoin=\"round\"");
  for (const LossPoint& p : thin(curves.validation, x)) {
    text += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"#c2410c\"/>\n", x.at(p.step), y.at(p.loss));
  }
  return text + "</svg>\n";
}

}  // namespace annulus::tools
