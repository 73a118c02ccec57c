// Sampler: the next token from logits: the greatest at temperature 0, else softmax(logits / temperature), with top_p <
// 1 cut to the most probable tokens that together reach top_p (nucleus sampling, arXiv 1904.09751; the token that
// crosses it belongs to them). Equal logits: the lower id first. A draw depends on (seed, index) and the logits alone.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rng.h"
#include "core/tensor.h"

namespace annulus::train {

struct SamplingOptions {
  double temperature = 0;
  double top_p = 1;
  std::int64_t seed = 0;
};

class Sampler {
 public:
  Sampler(const SamplingOptions& options, std::int64_t vocab_size);  // UsageError names the option
  // logits [1, V], f32 or f64 on the CPU; index: how many tokens were drawn before. DivergedError where a logit is not
  // finite. Allocates nothing.
  std::int32_t operator()(const TensorView& logits, std::int64_t index);

 private:
  std::int32_t draw(std::int64_t index);

  SamplingOptions options_;
  CounterRng rng_;
  std::vector<double> weights_;  // by token
  std::vector<std::int32_t> ids_;
};

}  // namespace annulus::train
