// Optimizer: updates this rank's shard of the flat parameter buffer (parallel/shards.h) and owns the shard's state,
// which the checkpoint stores under the slots' names. To add one: docs/adding_optimizer.md. Not collective.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/context.h"
#include "optim/config.h"

namespace annulus::optim {

struct Segment {  // a part of one parameter, in elements of the shard
  std::int64_t begin, count;
  bool decays;  // weight decay applies (tensors of two dimensions and more)
};

struct Slot {
  std::string name;  // "m", "v", "master"
  TensorView state;  // [shard] stat
};

struct Update {
  TensorView param;        // [shard], working type
  TensorView gradient;     // [shard], stat, already summed over ranks
  TensorView clip_factor;  // f64 [1]; not finite: the step is refused and nothing changes
  double lr = 0;
  std::int64_t step = 1;  // k, from 1
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // State for a shard of `size` elements of a run in `dtype`. Called twice (core/arena.h). Slots start at zero, but for
  // "master", which exists where the working type is narrower than its stat type and holds the weights.
  virtual void allocate(Arena& arena, DType dtype, std::int64_t size) = 0;
  virtual const std::vector<Slot>& slots() const = 0;
  virtual void step(Context& ctx, const std::vector<Segment>& segments, const Update& update) = 0;
};

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config);

}  // namespace annulus::optim
