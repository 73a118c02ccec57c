#include "train/state.h"

namespace annulus::train {
namespace {

// The shard's view of `own` that belongs to a parameter's part.
TensorView part_of(const TensorView& own, const model::ParameterStore& store, const model::ParameterStore::Part& part) {
  return own.rows(part.flat - store.shards().begin(), part.count);
}

std::vector<model::ParameterStore::Part> own_parts(const model::ParameterStore& store) {
  return store.parts(store.shards().begin(), store.shards().shard());
}

// Reads every part of a flat shard buffer through host memory of `read_as`, converting on the way.
void read_shard(const checkpoint::TensorSource& from, Engine& engine, const std::string& group, const TensorView& own) {
  auto& store = engine.store();
  std::vector<std::byte> staging;
  for (const auto& part : own_parts(store)) {
    const TensorView to = part_of(own, store, part);
    if (to.device == DeviceKind::cpu) {
      from.read(group, part.entry->name, part.begin, to);
      continue;
    }
    staging.resize(static_cast<std::size_t>(to.bytes()));
    const TensorView host{staging.data(), to.dtype, DeviceKind::cpu, to.shape};
    from.read(group, part.entry->name, part.begin, host);
    copy(engine.context(), host, to);
    synchronize(engine.context());
  }
}

}  // namespace

std::vector<checkpoint::Slice> checkpoint_slices(Engine& engine) {
  auto& store = engine.store();
  std::vector<checkpoint::Slice> slices;
  auto add = [&](const std::string& group, const TensorView& own) {
    for (const auto& part : own_parts(store)) {
      slices.push_back({group, part.entry->name, part.entry->shape, part.begin, part_of(own, store, part)});
    }
  };
  add("model", store.shards().own(store.values()));
  if (engine.options().training) {
    for (const auto& slot : engine.optimizer().slots()) add("optimizer/" + slot.name, slot.state);
  }
  return slices;
}

void check_tensors(const checkpoint::TensorSource& from, Engine& engine) {
  for (const auto& entry : engine.store().entries()) (void)from.require("model", entry.name, entry.shape);
  std::size_t found = 0;
  for (const auto& t : from.tensors()) found += t.group == "model";
  if (found == engine.store().entries().size()) return;
  for (const auto& t : from.tensors()) {
    if (t.group != "model") continue;
    bool known = false;
    for (const auto& entry : engine.store().entries()) known = known || entry.name == t.tensor;
    if (!known) {
      throw CheckpointError(
          fmt::format("{}: tensor {} {} has no place in the model of the config; use the checkpoint's own config",
                      from.path(), t.tensor, t.shape.str()));
    }
  }
}

void restore_weights(const checkpoint::TensorSource& from, Engine& engine) {
  check_tensors(from, engine);
  auto& store = engine.store();
  const std::string weights = from.weights_group();
  read_shard(from, engine, weights, store.shards().own(store.values()));
  if (engine.options().training) {
    for (const auto& slot : engine.optimizer().slots()) {
      if (slot.name == "master") read_shard(from, engine, weights, slot.state);
      else ops::fill(engine.context(), {.y = slot.state, .value = 0});
    }
  }
  engine.gather_weights();
}

void restore(const checkpoint::TensorSource& from, Engine& engine, std::vector<std::string>& notes) {
  restore_weights(from, engine);
  if (!engine.options().training) return;
  for (const auto& slot : engine.optimizer().slots()) {
    if (slot.name == "master") continue;
    const std::string group = "optimizer/" + slot.name;
    if (from.find(group, engine.store().entries().front().name)) {
      read_shard(from, engine, group, slot.state);
    } else {
      notes.push_back(fmt::format("{} holds no {}: it starts at zero", from.path(), group));
    }
  }
}

checkpoint::HostCopy host_copy(const ComputeDevice& device, Engine& engine) {
  if (device.kind == DeviceKind::cpu) return {};
  Context& ctx = engine.context();
  return {.allocator = device.host_allocator,
          .fetch =
              [&ctx](const TensorView& from, void* to) {
                copy(ctx, from, {to, from.dtype, DeviceKind::cpu, from.shape});
              },
          .wait = [&ctx] { synchronize(ctx); }};
}

}  // namespace annulus::train
