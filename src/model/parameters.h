// ParameterStore: lays all parameters of a model, in the order they are visited, into flat buffers that the optimiser
// shards (parallel/shards.h), and initialises them. Every parameter starts at a multiple of 64 elements.
#pragma once

#include <string>
#include <vector>

#include "model/transformer.h"
#include "parallel/shards.h"

namespace annulus::model {

class ParameterStore {
 public:
  struct Entry {
    std::string name;
    Shape shape;
    Init init;
    bool decays;
    std::int64_t offset;  // in the flat buffers
    std::int64_t count;
  };

  ParameterStore(Transformer& model, int rank, int ranks);

  const std::vector<Entry>& entries() const { return entries_; }
  const parallel::OptimizerShards& shards() const { return shards_; }

  // Flat buffers: values [total] of `dtype`, gradients [total] of stat_type(dtype). Sets the parameters' views. Called
  // twice.
  void allocate_values(Arena& arena, DType dtype);
  void allocate_gradients(Arena& arena);
  const TensorView& values() const { return values_; }
  const TensorView& gradients() const { return gradients_; }

  // Initial weights (spec/model.md, Initialisation), keyed by (seed, name, element): writes elements [begin, begin + n)
  // of the flat buffer, as values of stat type, into host memory; padding is 0.
  void initial_values(std::uint64_t seed, std::int64_t begin, std::span<float> out) const;
  void initial_values(std::uint64_t seed, std::int64_t begin, std::span<double> out) const;

  // The parts of parameters in [begin, begin + count) of the flat buffers.
  struct Part {
    const Entry* entry;
    std::int64_t begin;  // first element, in the parameter
    std::int64_t flat;   // first element, in the flat buffers
    std::int64_t count;
  };
  std::vector<Part> parts(std::int64_t begin, std::int64_t count) const;

 private:
  Transformer& model_;
  double residual_std_;
  std::vector<Entry> entries_;
  parallel::OptimizerShards shards_;
  DType dtype_ = DType::f32;
  TensorView values_, gradients_;
};

}  // namespace annulus::model
