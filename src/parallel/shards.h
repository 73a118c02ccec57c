// OptimizerShards (ZeRO-1, arXiv 1910.02054): all parameters lie in one flat buffer, padded to a multiple of the ranks;
// rank r owns elements [r · n, (r + 1) · n). Gradients are summed by one reduce-scatter a step, updated parameters
// return by one all-gather. Knows nothing of names: only of ranges.
#pragma once

#include <cstdint>

#include "parallel/communicator.h"

namespace annulus::parallel {

class OptimizerShards {
 public:
  // `elements`: sum of all parameters' padded sizes before rounding up to the ranks.
  OptimizerShards(std::int64_t elements, int rank, int ranks);

  std::int64_t total() const { return shard_ * ranks_; }  // length of the flat buffers
  std::int64_t shard() const { return shard_; }           // n, a multiple of 64
  std::int64_t begin() const { return shard_ * rank_; }
  std::int64_t end() const { return begin() + shard_; }

  TensorView own(const TensorView& flat) const;  // this rank's part of a flat [total] buffer
  // flat gradient [total] -> own(gradient) holds the sum over ranks; the rest is left undefined.
  void reduce_gradients(Context& ctx, Communicator& world, const TensorView& gradient) const;
  // own(parameters) of every rank -> everywhere.
  void gather_parameters(Context& ctx, Communicator& world, const TensorView& parameters) const;

 private:
  std::int64_t shard_;
  int rank_, ranks_;
};

}  // namespace annulus::parallel
