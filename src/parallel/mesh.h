// Mesh: the ranks of a run as a list of named axes, the last one fastest: world rank = data · sequence_size + sequence.
// Layers ask for an axis's communicator by name, so that another axis can join. Creation is collective over the world.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/communicator.h"

namespace annulus::parallel {

struct Axis {
  std::string name;
  int size = 1;
};

// Makes a communicator for tensors on the compute device over the same ranks as `host` (NCCL), or null for CPU runs.
using DeviceCommunicatorFactory = std::function<std::unique_ptr<Communicator>(Communicator& host)>;

class Mesh {
 public:
  // The product of the axes must be the world's size; otherwise a ConfigError says both and lists what fits.
  Mesh(Communicator& world, std::vector<Axis> axes, const DeviceCommunicatorFactory& device_factory = nullptr);

  // Rank 0 of a mesh of ranks that do not exist, for plans: its communicators have sizes and do nothing. Not
  // collective.
  static std::unique_ptr<Mesh> planned(std::vector<Axis> axes);

  const std::vector<Axis>& axes() const { return axes_; }
  int size(std::string_view axis) const;
  int coordinate(std::string_view axis) const;  // this rank's

  Communicator& world() { return *world_; }                // host data, all ranks
  Communicator& host(std::string_view axis);               // host data, the ranks that differ in this axis only
  Communicator& device_world() { return *device_world_; }  // tensors of the compute device (gradients, parameters)
  Communicator& device(std::string_view axis);
  Communicator& kv_ring() { return *kv_ring_; }    // axis "sequence", K and V going round
  Communicator& dkv_ring() { return *dkv_ring_; }  // axis "sequence", their gradients, in flight beside them

 private:
  Mesh() = default;
  std::size_t index_of(std::string_view axis) const;
  std::unique_ptr<Communicator> planned_world_;  // of planned() only
  Communicator* world_ = nullptr;
  std::vector<Axis> axes_;
  std::vector<int> coordinates_;
  std::vector<std::unique_ptr<Communicator>> host_axes_, device_axes_;
  std::unique_ptr<Communicator> device_world_, kv_ring_, dkv_ring_;
};

}  // namespace annulus::parallel
