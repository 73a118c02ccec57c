// What NSA layers do on data: how far their gates are open, and how many different blocks neighbouring queries select
// together (a kernel that loads the union once per group of queries reads so much).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention/nsa.h"
#include "train/engine.h"

namespace annulus::train {

struct NsaStatistics {  // of one layer
  std::int64_t layer = 0;
  double gate[3] = {0, 0, 0};  // mean of sigmoid(gate) over tokens and heads: compressed, selected, window
  double selected = 0;         // mean number of blocks of one query and KV head
  double union_4 = 0;          // mean number of different blocks of 4 (8) neighbouring queries of a KV head
  double union_8 = 0;
};

// Mean size of the union of the blocks of `group` consecutive rows: selected [T, Hkv, n] (−1: none) on the host. Whole
// groups of rows [0, rows) only; 0 if there is none.
struct UnionSum {
  double blocks = 0, groups = 0;
  void add(const std::int32_t* selected, std::int64_t rows, std::int64_t kv_heads, std::int64_t count,
           std::int64_t group);
  double mean() const { return groups > 0 ? blocks / groups : 0; }
};

// Shuts one branch's gate in every NSA layer: its output counts 0, and the model shows what it was worth. The weights
// of the gates are overwritten.
void close_gate(Engine& engine, attention::Branch branch);

// Watches the engine's forward passes for as long as it lives.
class AttentionWatch {
 public:
  explicit AttentionWatch(Engine& engine);
  ~AttentionWatch();
  AttentionWatch(const AttentionWatch&) = delete;

  // The next micro-batch holds so many tokens of every sequence; what follows them is padding.
  void next_lengths(std::vector<std::int64_t> lengths) { lengths_ = std::move(lengths); }
  std::vector<NsaStatistics> result();  // by layer, NSA layers only. Collective over the world

 private:
  struct Sums {
    double gate[3] = {0, 0, 0};
    double gates = 0;
    UnionSum one, four, eight;
  };
  void add(Context& ctx, std::int64_t layer, const model::AttentionLayer::View& view);

  Engine& engine_;
  std::vector<std::int64_t> lengths_;
  std::vector<Sums> sums_;  // by layer
};

}  // namespace annulus::train
