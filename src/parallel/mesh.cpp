#include "parallel/mesh.h"

#include <algorithm>

namespace annulus::parallel {
namespace {

// All ways to write n as an ordered product of `factors` sizes, as "a x b", at most `limit` of them.
void factorizations(int n, std::size_t factors, const std::string& prefix, std::size_t limit,
                    std::vector<std::string>& out) {
  if (out.size() >= limit) return;
  if (factors == 1) {
    out.push_back(prefix + std::to_string(n));
    return;
  }
  for (int f = 1; f <= n; ++f) {
    if (n % f == 0) factorizations(n / f, factors - 1, fmt::format("{}{} x ", prefix, f), limit, out);
  }
}

void check_product(const std::vector<Axis>& axes, int world) {
  ANNULUS_CHECK(!axes.empty(), "a mesh has at least one axis");
  std::int64_t product = 1;
  std::string names, sizes;
  for (const Axis& a : axes) {
    product = a.size < 1 || product > world ? 0 : product * a.size;
    names += (names.empty() ? "" : " x ") + a.name;
    sizes += (sizes.empty() ? "" : " x ") + std::to_string(a.size);
  }
  if (product == world) return;
  std::vector<std::string> fits;
  factorizations(world, axes.size(), "", 16, fits);
  std::string list;
  for (const auto& f : fits) list += (list.empty() ? "" : ", ") + f;
  throw ConfigError(
      fmt::format("the mesh {} = {} does not fill the {} rank{} that were started. What fits {} {}: {} (or start "
                  "another number of ranks)",
                  names, sizes, world, world == 1 ? "" : "s", world, world == 1 ? "rank" : "ranks", list));
}

}  // namespace

Mesh::Mesh(Communicator& world, std::vector<Axis> axes, const DeviceCommunicatorFactory& device_factory)
    : world_(&world), axes_(std::move(axes)), coordinates_(axes_.size()) {
  check_product(axes_, world.size());
  int rest = world.rank();
  for (std::size_t i = axes_.size(); i-- > 0;) {
    coordinates_[i] = rest % axes_[i].size;
    rest /= axes_[i].size;
  }
  const auto on_device = [&](Communicator& host_ranks) {
    return device_factory ? device_factory(host_ranks) : host_ranks.split(0, host_ranks.rank());
  };
  device_world_ = on_device(world);
  int stride = world.size();
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    stride /= axes_[i].size;
    const int color = world.rank() - coordinates_[i] * stride;  // the first rank of those that differ in this axis only
    host_axes_.push_back(world.split(color, coordinates_[i]));
    device_axes_.push_back(on_device(*host_axes_.back()));
  }
  const bool has_sequence = std::any_of(axes_.begin(), axes_.end(), [](const Axis& a) { return a.name == "sequence"; });
  kv_ring_ = has_sequence ? on_device(host("sequence")) : make_self_communicator();
  dkv_ring_ = has_sequence ? on_device(host("sequence")) : make_self_communicator();
}

std::size_t Mesh::index_of(std::string_view axis) const {
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == axis) return i;
  }
  ANNULUS_CHECK(false, "the mesh has no axis {}", axis);
  return 0;
}

int Mesh::size(std::string_view axis) const { return axes_[index_of(axis)].size; }
int Mesh::coordinate(std::string_view axis) const { return coordinates_[index_of(axis)]; }
Communicator& Mesh::host(std::string_view axis) { return *host_axes_[index_of(axis)]; }
Communicator& Mesh::device(std::string_view axis) { return *device_axes_[index_of(axis)]; }

}  // namespace annulus::parallel
