// Context: where and how an operation runs, and where the run stands. Every operation takes it first.
#pragma once

#include <string_view>

#include "core/arena.h"

namespace annulus {

namespace cuda {
struct Device;  // stream, cuBLASLt handle: core/cuda/device.h
}

enum class Phase : std::uint8_t { setup, data, forward, loss, backward, optimizer, evaluate, checkpoint, finished };

constexpr std::string_view name_of(Phase phase) {
  constexpr std::string_view kNames[] = {"setup",    "reading data", "forward",    "loss",
                                         "backward", "optimizer",    "evaluating", "saving a checkpoint",
                                         "finished"};
  return kNames[static_cast<int>(phase)];
}

struct Place {  // what the watchdog reports
  Phase phase = Phase::setup;
  int layer = -1;
  int hop = -1;
};

struct Context {
  DeviceKind device = DeviceKind::cpu;
  Arena* scratch = nullptr;      // stack for workspaces; used through Arena::Scope
  bool planning = false;         // dry run: operations and collectives return at once, arenas only count
  bool deterministic = true;     // fixed reduction orders; same ranks, same bits
  void (*progress)() = nullptr;  // CPU kernels call poll() between tiles: Open MPI moves messages only inside MPI calls
  cuda::Device* cuda = nullptr;  // set when device is cuda

  Place place;
  void (*on_place)(const Place&) = nullptr;  // the heartbeat

  void poll() const {  // from the main thread only
    if (progress) progress();
  }
  void at(Phase phase, int layer = -1, int hop = -1) {
    place = {phase, layer, hop};
    if (on_place && !planning) on_place(place);
  }
  void at_hop(int hop) { at(place.phase, place.layer, hop); }
};

}  // namespace annulus
