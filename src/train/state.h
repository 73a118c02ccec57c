// What a checkpoint holds of an engine: this rank's shard of weights and optimiser state as slices, and the way back.
#pragma once

#include <vector>

#include "checkpoint/store.h"
#include "train/engine.h"

namespace annulus::train {

// "model" (weights, working type) and, when training, "optimizer/<slot>". Views into the engine's memory.
std::vector<checkpoint::Slice> checkpoint_slices(Engine& engine);

// Every tensor of the model must be in the source with the config's shape (CheckpointError); nothing is read.
void check_tensors(const checkpoint::TensorSource& from, Engine& engine);

// Reads this rank's shard and spreads the weights. Training starts from the masters where there are any, and from zero
// state (with a word in `notes`) for a slot the source lacks. Collective.
void restore(const checkpoint::TensorSource& from, Engine& engine, std::vector<std::string>& notes);

// Reads the weights alone; the optimiser starts from zero state. Collective.
void restore_weights(const checkpoint::TensorSource& from, Engine& engine);

// How the checkpoint writer fetches slices of this engine's device.
checkpoint::HostCopy host_copy(const ComputeDevice& device, Engine& engine);

}  // namespace annulus::train
