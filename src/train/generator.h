// Generator: one sequence's cache (Transformer::Cache) with its memory; takes tokens, gives the next one's logits. On
// the CPU; not collective.
#pragma once

#include <cstdint>
#include <span>

#include "train/engine.h"

namespace annulus::train {

// Works on the engine's weights and device; the engine must outlive it. Memory is planned and taken by the constructor:
// append() allocates none.
class Generator {
 public:
  // For sequences of up to `capacity` tokens; the prompt is taken `max_rows` tokens at a time. ConfigError where the
  // host's memory cannot hold them.
  Generator(Engine& engine, std::int64_t capacity, std::int64_t max_rows);
  Generator(const Generator&) = delete;

  // The sequence goes on with these tokens: the logits [1, V] of the last one, until the next call.
  TensorView append(std::span<const std::int32_t> tokens);
  void clear() { cache_.length = 0; }  // another sequence
  std::int64_t length() const { return cache_.length; }
  std::int64_t capacity() const { return cache_.sizes.capacity; }
  std::int64_t cache_bytes() const { return kv_.planned_bytes(); }  // of keys and values, all layers
  std::int64_t planned_bytes() const;

 private:
  void plan();

  Engine& engine_;
  Context ctx_;
  Arena kv_, activations_, scratch_;
  model::Transformer::Cache cache_;
};

}  // namespace annulus::train
