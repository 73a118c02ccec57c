#include "train/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace annulus::train {

Sampler::Sampler(const SamplingOptions& options, std::int64_t vocab_size)
    : options_(options),
      rng_(static_cast<std::uint64_t>(options.seed), "generate"),
      weights_(static_cast<std::size_t>(vocab_size)),
      ids_(static_cast<std::size_t>(vocab_size)) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    throw UsageError(fmt::format("--temperature {}: expected 0 (always the most probable token) or a positive number",
                                 options.temperature));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw UsageError(fmt::format("--top-p {}: expected a share above 0, up to 1 (all tokens)", options.top_p));
  }
}

std::int32_t Sampler::operator()(const TensorView& logits, std::int64_t index) {
  ANNULUS_CHECK(logits.numel() == static_cast<std::int64_t>(weights_.size()), "{} logits for {} tokens", logits.numel(),
                weights_.size());
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    weights_[i] = logits.dtype == DType::f64 ? logits.as<double>()[i] : static_cast<double>(logits.as<float>()[i]);
    if (!std::isfinite(weights_[i])) {
      throw DivergedError(fmt::format("the model's logit of token {} is {}; its weights are damaged", i, weights_[i]));
    }
  }
  const auto best = std::max_element(weights_.begin(), weights_.end());  // the first of equal ones
  if (options_.temperature == 0) return static_cast<std::int32_t>(best - weights_.begin());
  const double greatest = *best;
  for (double& w : weights_) w = std::exp((w - greatest) / options_.temperature);
  return draw(index);
}

std::int32_t Sampler::draw(std::int64_t index) {
  double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  std::iota(ids_.begin(), ids_.end(), 0);
  std::size_t kept = 0;  // at the end of ids_
  if (options_.top_p < 1) {
    const auto less = [&](std::int32_t a, std::int32_t b) {
      const double wa = weights_[static_cast<std::size_t>(a)], wb = weights_[static_cast<std::size_t>(b)];
      return wa != wb ? wa < wb : a > b;
    };
    const double wanted = options_.top_p * total;
    auto end = ids_.end();
    std::make_heap(ids_.begin(), end, less);
    for (total = 0; total < wanted && end != ids_.begin(); --end) {
      std::pop_heap(ids_.begin(), end, less);
      total += weights_[static_cast<std::size_t>(*(end - 1))];
      ++kept;
    }
  } else {
    kept = ids_.size();
  }
  double left = rng_.uniform(static_cast<std::uint64_t>(index)) * total;
  std::int32_t last = ids_.back();
  for (std::size_t i = ids_.size(); i-- > ids_.size() - kept;) {
    const double w = weights_[static_cast<std::size_t>(ids_[i])];
    if (w == 0) continue;
    last = ids_[i];
    if (left < w) break;
    left -= w;
  }
  return last;
}

}  // namespace annulus::train
