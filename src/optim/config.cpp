#include "optim/config.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "core/config_check.h"
#include "core/error.h"

namespace annulus::optim {

namespace {

void check_beta(const char* key, double beta) {
  if (!(beta >= 0 && beta < 1)) fail_key(key, fmt::format("{}", beta), "0 <= beta < 1");
}

}  // namespace

void OptimizerConfig::validate() const {
  check_choice("optimizer.type", type, std::vector<std::string>{"adamw"});
  check_range("optimizer.lr", lr, 0, Low::open);
  check_beta("optimizer.beta1", beta1);
  check_beta("optimizer.beta2", beta2);
  check_range("optimizer.eps", eps, 0, Low::open);
  check_range("optimizer.weight_decay", weight_decay, 0, Low::closed);
  check_range("optimizer.grad_clip", grad_clip, 0, Low::closed);
  if (lr * weight_decay >= 1) {
    fail_key("optimizer.weight_decay", fmt::format("{}", weight_decay),
             fmt::format(
                 "weight_decay · lr < 1, since every step multiplies weights by 1 − lr · weight_decay (lr = {})", lr));
  }
}

void ScheduleConfig::validate(std::int64_t steps) const {
  check_choice("schedule.type", type, std::vector<std::string>{"cosine", "linear", "constant", "wsd"});
  check_range("schedule.warmup_steps", warmup_steps, 0);
  check_range("schedule.min_ratio", min_ratio, 0, Low::closed, 1);
  check_range("schedule.decay_steps", decay_steps, 0);
  if (warmup_steps > steps) {
    fail_key("schedule.warmup_steps", fmt::format("{}", warmup_steps), fmt::format("at most train.steps = {}", steps),
             "shorten the warm-up or lengthen the run");
  }
  if (type != "wsd") return;
  if (decay_steps == 0) {
    fail_key("schedule.decay_steps", "0", "the number of last steps that decay, since schedule.type = \"wsd\"",
             fmt::format("set it, for example to {}", std::max<std::int64_t>(1, (steps - warmup_steps) / 5)));
  }
  if (decay_steps > steps - warmup_steps) {
    fail_key("schedule.decay_steps", fmt::format("{}", decay_steps),
             fmt::format("at most train.steps − schedule.warmup_steps = {}", steps - warmup_steps),
             "shorten the decay or the warm-up, or lengthen the run");
  }
}

double learning_rate(const ScheduleConfig& schedule, double lr, std::int64_t step, std::int64_t steps) {
  // Progress through `count` steps that begin at `first`: 0 at the first, 1 at the last.
  const auto progress = [](std::int64_t s, std::int64_t first, std::int64_t count) {
    return std::min(1.0, static_cast<double>(s - first) / static_cast<double>(std::max<std::int64_t>(1, count - 1)));
  };
  const std::int64_t s = std::min(step, steps - 1);  // beyond the end the last value holds
  const std::int64_t warmup = schedule.warmup_steps;
  if (s < warmup) return lr * static_cast<double>(s + 1) / static_cast<double>(warmup);
  const double r = schedule.min_ratio;
  if (schedule.type == "constant") return lr;
  if (schedule.type == "wsd") {
    const std::int64_t decay_from = steps - schedule.decay_steps;
    if (s < decay_from) return lr;
    return lr * (r + (1 - r) * (1 - std::sqrt(progress(s, decay_from, schedule.decay_steps))));
  }
  const double u = progress(s, warmup, steps - warmup);
  if (schedule.type == "linear") return lr * (1 - (1 - r) * u);
  ANNULUS_CHECK(schedule.type == "cosine", "unknown schedule {}", schedule.type);
  return lr * (r + (1 - r) * (1 + std::cos(std::numbers::pi * u)) / 2);
}

}  // namespace annulus::optim
