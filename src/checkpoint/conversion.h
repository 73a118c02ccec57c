// Conversion of a model to another shape of itself (spec/checkpoint.md): fewer key/value heads (arXiv 2305.13245),
// dense attention to native sparse attention. The tensors of the result are computed one at a time, when they are
// written.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "model/config.h"

namespace annulus::checkpoint {

// How consecutive heads of keys and values become one: their mean, the first of them, or fresh weights (the paper's
// ablations; random: those that a run with this seed would start from, biases 0).
enum class Pool { mean, first, random };
Pool parse_pool(const std::string& name);  // UsageError

// A sparse layer made from a dense one: every branch's K and V projections are copies of the dense ones, compression
// starts as the mean (w2 = 0), and the gates start as constants that add up to 1, since their weights are 0. Selection
// is dense attention while S <= select_count · select_block, so it gets the most; docs/conversion.md has other choices
// and their losses.
inline constexpr double kGateStart[3] = {0.1, 0.8, 0.1};  // compressed, selected, window

struct Conversion {
  model::ModelConfig from, to;  // resolved; `to` differs in num_key_value_heads, attention, nsa and sliding_window only
  Pool pool = Pool::mean;
  std::uint64_t seed = 0;  // of fresh weights
};

// The tensors of `to`, in the model's order, in the source's types (f32 for f16); `fill` reads the source, which is
// kept. Values come from source->weights_group(). CheckpointError where the source lacks a tensor, has it in another
// shape, or has one of group "model" that no tensor of the result is made from. ConfigError where `to` cannot be had
// from `from`.
std::vector<Slice> convert_tensors(std::shared_ptr<const TensorSource> source, const Conversion& conversion);

}  // namespace annulus::checkpoint
