// Schedules against values worked out by hand from spec/model.md, and what validate() refuses.
#include "optim/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "core/error.h"

namespace annulus::optim {
namespace {

struct Case {
  const char* type;
  std::int64_t steps, warmup, decay;
  std::int64_t step;
  double expected;  // of lr = 1, min_ratio = 0.1
};

// Every value is a short decimal or a textbook cosine: cos 45° = 0.70710678118654752, cos(2π/7) = 0.62348980185873353.
const Case kCases[] = {
    {"cosine", 10, 4, 0, 0, 0.25},
    {"cosine", 10, 4, 0, 3, 1.0},                                     // the last step of the warm-up has the whole rate
    {"cosine", 10, 2, 0, 2, 1.0},                                     // s = W: u = 0
    {"cosine", 10, 2, 0, 4, 0.1 + 0.45 * (1 + 0.62348980185873353)},  // u = 2/7
    {"cosine", 11, 2, 0, 4, 0.1 + 0.45 * (1 + 0.70710678118654752)},  // u = 1/4
    {"cosine", 11, 2, 0, 6, 0.55},                                    // u = 1/2
    {"cosine", 10, 2, 0, 9, 0.1},                                     // s = N − 1: u = 1
    {"cosine", 10, 2, 0, 10, 0.1},
    {"cosine", 10, 2, 0, 1000000, 0.1},
    {"cosine", 11, 0, 0, 0, 1.0},
    {"cosine", 11, 0, 0, 5, 0.55},
    {"cosine", 1, 0, 0, 0, 1.0},
    {"cosine", 1, 0, 0, 7, 1.0},  // beyond the end the last value holds, also where it is the first
    {"cosine", 1, 1, 0, 0, 1.0},
    {"cosine", 4, 3, 0, 3, 1.0},  // one step is left: u = 0
    {"cosine", 4, 3, 0, 4, 1.0},
    {"cosine", 4, 4, 0, 1, 0.5},  // W = N
    {"cosine", 4, 4, 0, 3, 1.0},
    {"cosine", 4, 4, 0, 9, 1.0},
    {"cosine", 4, 8, 0, 3, 0.5},  // W > N
    {"cosine", 4, 8, 0, 9, 0.5},
    {"linear", 12, 1, 0, 0, 1.0},
    {"linear", 12, 1, 0, 1, 1.0},
    {"linear", 12, 1, 0, 6, 0.55},
    {"linear", 12, 1, 0, 9, 0.28},
    {"linear", 12, 1, 0, 11, 0.1},
    {"linear", 12, 1, 0, 99, 0.1},
    {"constant", 10, 5, 0, 1, 0.4},
    {"constant", 10, 5, 0, 5, 1.0},
    {"constant", 10, 5, 0, 50, 1.0},
    {"wsd", 10, 2, 5, 0, 0.5},
    {"wsd", 10, 2, 5, 2, 1.0},
    {"wsd", 10, 2, 5, 4, 1.0},   // the last stable step
    {"wsd", 10, 2, 5, 5, 1.0},   // u' = 0
    {"wsd", 10, 2, 5, 6, 0.55},  // u' = 1/4
    {"wsd", 10, 2, 5, 9, 0.1},   // u' = 1
    {"wsd", 10, 2, 5, 44, 0.1},
    {"wsd", 10, 5, 5, 4, 1.0},
    {"wsd", 10, 5, 5, 6, 0.55},
    {"wsd", 10, 0, 10, 1, 0.1 + 0.9 * (1 - 1.0 / 3)},  // u' = 1/9
    {"wsd", 4, 0, 1, 3, 1.0},
    {"wsd", 4, 0, 1, 8, 1.0},
};

TEST(LearningRate, IsTheSpecifiedFunction) {
  for (const Case& c : kCases) {
    ScheduleConfig schedule;
    schedule.type = c.type;
    schedule.warmup_steps = c.warmup;
    schedule.decay_steps = c.decay;
    schedule.min_ratio = 0.1;
    // Five rounded operations of values up to 1.
    EXPECT_NEAR(learning_rate(schedule, 1.0, c.step, c.steps), c.expected, 1e-15)
        << c.type << " N " << c.steps << " W " << c.warmup << " decay " << c.decay << " step " << c.step;
    EXPECT_NEAR(learning_rate(schedule, 3e-4, c.step, c.steps), 3e-4 * c.expected, 3e-19);
  }
}

TEST(LearningRate, MinRatioZeroAndOne) {
  ScheduleConfig schedule;
  for (const char* type : {"cosine", "linear", "wsd"}) {
    schedule.type = type;
    schedule.decay_steps = 3;
    schedule.min_ratio = 0;
    EXPECT_NEAR(learning_rate(schedule, 2.0, 9, 10), 0.0, 1e-15) << type;
    schedule.min_ratio = 1;
    for (int s = 0; s < 12; ++s) EXPECT_NEAR(learning_rate(schedule, 2.0, s, 10), 2.0, 1e-15) << type << s;
  }
}

std::string refusal(const std::function<void()>& validate) {
  try {
    validate();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(OptimizerConfig, RefusesWhatCannotTrain) {
  struct Bad {
    std::function<void(OptimizerConfig&)> change;
    const char* message;
  };
  const Bad bad[] = {
      {[](auto& c) { c.type = "adam"; }, "optimizer.type = \"adam\": expected \"adamw\""},
      {[](auto& c) { c.lr = 0; }, "optimizer.lr = 0: expected a finite number > 0"},
      {[](auto& c) { c.lr = std::nan(""); }, "optimizer.lr = nan"},
      {[](auto& c) { c.beta1 = 1; }, "optimizer.beta1 = 1: expected 0 <= beta < 1"},
      {[](auto& c) { c.beta1 = -0.1; }, "optimizer.beta1 = -0.1"},
      {[](auto& c) { c.beta2 = std::nan(""); }, "optimizer.beta2 = nan"},
      {[](auto& c) { c.eps = 0; }, "optimizer.eps = 0"},
      {[](auto& c) { c.weight_decay = -1; }, "optimizer.weight_decay = -1"},
      {[](auto& c) {
         c.weight_decay = 1;
         c.lr = 1;
       },
       "optimizer.weight_decay = 1: expected weight_decay · lr < 1"},
      {[](auto& c) { c.grad_clip = -1; }, "optimizer.grad_clip = -1"},
  };
  EXPECT_EQ(refusal([] { OptimizerConfig{}.validate(); }), "accepted");
  for (const Bad& b : bad) {
    OptimizerConfig config;
    b.change(config);
    EXPECT_EQ(refusal([&] { config.validate(); }).find(b.message), 0u) << refusal([&] { config.validate(); });
  }
  OptimizerConfig edge;
  edge.beta1 = edge.beta2 = edge.weight_decay = edge.grad_clip = 0;
  EXPECT_EQ(refusal([&] { edge.validate(); }), "accepted");
}

TEST(ScheduleConfig, RefusesWhatDoesNotFitTheSteps) {
  struct Bad {
    ScheduleConfig config;
    const char* message;
  };
  const auto make = [](const char* type, std::int64_t warmup, double ratio, std::int64_t decay) {
    ScheduleConfig c;
    c.type = type;
    c.warmup_steps = warmup;
    c.min_ratio = ratio;
    c.decay_steps = decay;
    return c;
  };
  const Bad bad[] = {
      {make("cosin", 0, 0.1, 0), "schedule.type = \"cosin\": expected"},
      {make("cosine", -1, 0.1, 0), "schedule.warmup_steps = -1"},
      {make("cosine", 101, 0.1, 0), "schedule.warmup_steps = 101: expected at most train.steps = 100"},
      {make("cosine", 0, 1.5, 0), "schedule.min_ratio = 1.5"},
      {make("cosine", 0, -0.5, 0), "schedule.min_ratio = -0.5"},
      {make("cosine", 0, 0.1, -2), "schedule.decay_steps = -2"},
      {make("wsd", 0, 0.1, 0), "schedule.decay_steps = 0: expected the number of last steps that decay"},
      {make("wsd", 50, 0.1, 51),
       "schedule.decay_steps = 51: expected at most train.steps − schedule.warmup_steps = 50"},
  };
  for (const Bad& b : bad) {
    EXPECT_EQ(refusal([&] { b.config.validate(100); }).find(b.message), 0u) << refusal([&] { b.config.validate(100); });
  }
  for (const auto& good : {make("cosine", 100, 0, 0), make("wsd", 50, 1, 50), make("linear", 0, 0.1, 0)}) {
    EXPECT_EQ(refusal([&] { good.validate(100); }), "accepted");
  }
}

}  // namespace
}  // namespace annulus::optim
