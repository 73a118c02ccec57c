#include "parallel/shards.h"

namespace annulus::parallel {
namespace {
constexpr std::int64_t kAlign = 64;  // elements: shards begin on a cache line and on a vector
}

OptimizerShards::OptimizerShards(std::int64_t elements, int rank, int ranks) : rank_(rank), ranks_(ranks) {
  ANNULUS_CHECK(elements >= 0 && ranks >= 1 && rank >= 0 && rank < ranks, "{} elements for rank {} of {}", elements,
                rank, ranks);
  const std::int64_t share = (elements + ranks - 1) / ranks;
  shard_ = (share + kAlign - 1) / kAlign * kAlign;
}

TensorView OptimizerShards::own(const TensorView& flat) const {
  ANNULUS_CHECK(flat.shape.rank() == 1 && flat.numel() == total(), "a flat buffer holds {} elements, got {}", total(),
                flat.shape.str());
  return flat.rows(begin(), shard_);
}

void OptimizerShards::reduce_gradients(Context& ctx, Communicator& world, const TensorView& gradient) const {
  ANNULUS_CHECK(world.rank() == rank_ && world.size() == ranks_, "shards of rank {} of {} on a communicator of {}",
                rank_, ranks_, world.size());
  if (ranks_ > 1) world.wait(ctx, world.reduce_scatter(ctx, gradient, own(gradient)));
}

void OptimizerShards::gather_parameters(Context& ctx, Communicator& world, const TensorView& parameters) const {
  ANNULUS_CHECK(world.rank() == rank_ && world.size() == ranks_, "shards of rank {} of {} on a communicator of {}",
                rank_, ranks_, world.size());
  if (ranks_ > 1) world.wait(ctx, world.all_gather(ctx, own(parameters), parameters));
}

}  // namespace annulus::parallel
