#include "checkpoint/exchange.h"

#include <algorithm>

namespace annulus::checkpoint {
namespace {

TensorView bytes_of(std::string& text) {
  return host_view(reinterpret_cast<std::uint8_t*>(text.data()), {static_cast<std::int64_t>(text.size())});
}

}  // namespace

std::vector<std::string> gather_texts(parallel::Communicator& world, const std::string& text) {
  Context ctx;
  const auto ranks = static_cast<std::size_t>(world.size());
  std::vector<std::int64_t> sizes(ranks);
  auto size = static_cast<std::int64_t>(text.size());
  world.wait(ctx, world.all_gather(ctx, host_view(&size, {1}), host_view(sizes.data(), {world.size()})));
  const auto longest =
      static_cast<std::size_t>(std::max<std::int64_t>(1, *std::max_element(sizes.begin(), sizes.end())));
  std::string own = text, all(longest * ranks, '\0');
  own.resize(longest);
  world.wait(ctx, world.all_gather(ctx, bytes_of(own), bytes_of(all)));
  std::vector<std::string> out;
  for (std::size_t r = 0; r < ranks; ++r) out.push_back(all.substr(r * longest, static_cast<std::size_t>(sizes[r])));
  return out;
}

std::string broadcast_text(parallel::Communicator& world, const std::string& text) {
  Context ctx;
  auto size = static_cast<std::int64_t>(text.size());
  world.wait(ctx, world.broadcast(ctx, host_view(&size, {1}), 0));
  std::string out = world.rank() == 0 ? text : std::string(static_cast<std::size_t>(size), '\0');
  if (size > 0) world.wait(ctx, world.broadcast(ctx, bytes_of(out), 0));
  return out;
}

std::int64_t reduce_max(parallel::Communicator& world, std::int64_t value) {
  Context ctx;
  world.wait(ctx, world.all_reduce(ctx, host_view(&value, {1}), parallel::ReduceOp::max));
  return value;
}

void agree(parallel::Communicator& world, const std::function<void()>& work) {
  std::string message;
  bool failed = false;
  try {
    work();
  } catch (const std::exception& e) {
    failed = true;
    message = e.what();
  }
  if (reduce_max(world, failed ? 1 : 0) == 0) return;
  const auto texts = gather_texts(world, failed ? "!" + message : "");
  const auto first = std::find_if(texts.begin(), texts.end(), [](const std::string& t) { return !t.empty(); });
  throw CheckpointError(first->substr(1));
}

}  // namespace annulus::checkpoint
