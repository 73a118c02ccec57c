// OptimizerConfig and ScheduleConfig (spec/model.md, Optimiser). validate() throws ConfigError naming the key.
#pragma once

#include <cstdint>
#include <string>

namespace annulus::optim {

struct OptimizerConfig {
  std::string type = "adamw";
  double lr = 3e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  double grad_clip = 1.0;  // 0: no clipping
  void validate() const;
  bool operator==(const OptimizerConfig&) const = default;
};

struct ScheduleConfig {
  std::string type = "cosine";  // cosine, linear, constant, wsd
  std::int64_t warmup_steps = 0;
  double min_ratio = 0.1;
  std::int64_t decay_steps = 0;  // wsd: the last steps, which decay
  void validate(std::int64_t steps) const;
  bool operator==(const ScheduleConfig&) const = default;
};

// The learning rate of step s (from 0) of N; from step N on, that of N − 1.
double learning_rate(const ScheduleConfig& schedule, double lr, std::int64_t step, std::int64_t steps);

}  // namespace annulus::optim
