// The frequencies of RoPE and their scalings.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "model/layers.h"

namespace annulus::model {
namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

// Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
double llama3(double f, const RopeScaling& s) {
  const double wavelength = kTwoPi / f;
  const double context = static_cast<double>(s.original_max_position_embeddings);
  if (wavelength < context / s.high_freq_factor) return f;
  if (wavelength > context / s.low_freq_factor) return f / s.factor;
  const double smooth = (context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1 - smooth) * f / s.factor + smooth * f;
}

// YaRN: pairs that turn more than beta_fast times over the original context are kept, those that turn less than
// beta_slow times are interpolated, with a linear ramp over the pairs between.
void yarn(std::vector<double>& inv_freq, const ModelConfig& config) {
  const RopeScaling& s = config.rope_scaling;
  const double dim = static_cast<double>(config.head_dim);
  auto pair_that_turns = [&](double turns) {
    return dim * std::log(static_cast<double>(s.original_max_position_embeddings) / (turns * kTwoPi)) /
           (2 * std::log(config.rope_theta));
  };
  const double low = std::max(std::floor(pair_that_turns(s.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_that_turns(s.beta_slow)), dim - 1);
  if (low == high) high += 0.001;  // as HuggingFace: no division by zero
  for (std::size_t j = 0; j < inv_freq.size(); ++j) {
    const double interpolated = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    inv_freq[j] *= (1 - interpolated) + interpolated / s.factor;
  }
}

}  // namespace

RopeFrequencies rope_frequencies(const ModelConfig& config) {
  const RopeScaling& s = config.rope_scaling;
  RopeFrequencies out;
  for (std::int64_t j = 0; j < config.head_dim / 2; ++j) {
    out.inv_freq.push_back(
        std::pow(config.rope_theta, -2.0 * static_cast<double>(j) / static_cast<double>(config.head_dim)));
  }
  if (s.rope_type == "linear") {
    for (double& f : out.inv_freq) f /= s.factor;
  } else if (s.rope_type == "llama3") {
    for (double& f : out.inv_freq) f = llama3(f, s);
  } else if (s.rope_type == "yarn") {
    yarn(out.inv_freq, config);
    out.magnitude = s.attention_factor > 0 ? s.attention_factor : s.factor > 1 ? 0.1 * std::log(s.factor) + 1 : 1;
  }
  return out;
}

}  // namespace annulus::model
