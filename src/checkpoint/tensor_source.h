// TensorSource: the named tensors of a model on a disk, read in ranges: a checkpoint (store.h) or a HuggingFace folder
// (huggingface.h). A tensor is a flat row-major array. Whatever is wrong with what is read is a CheckpointError that
// names file, tensor, what was wanted and what was found. Not collective.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace annulus::checkpoint {

struct TensorInfo {
  std::string group;   // "model", "optimizer/m", "optimizer/v", "optimizer/master"
  std::string tensor;  // "model.embed_tokens.weight"
  DType dtype = DType::f32;
  Shape shape;
  std::int64_t bytes() const { return shape.numel() * static_cast<std::int64_t>(size_of(dtype)); }
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  virtual const std::string& path() const = 0;
  virtual const std::vector<TensorInfo>& tensors() const = 0;  // by group, then name
  // Reads the flat range [begin, begin + out.numel()) into host memory, converting to f32, f64 or bf16 (to nearest
  // even) where `out` has another type than the tensor.
  virtual void read(std::string_view group, std::string_view tensor, std::int64_t begin, TensorView out) const = 0;

  const TensorInfo* find(std::string_view group, std::string_view tensor) const;  // null: not there
  // The tensor, whose shape must be `wanted`: the check against the config, to be made before memory is taken.
  const TensorInfo& require(std::string_view group, std::string_view tensor, const Shape& wanted) const;
  std::int64_t bytes() const;  // of all tensors' values
  // The group that holds the weights at their best: the optimiser's masters where there are any, else "model".
  std::string weights_group() const;

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource& operator=(const TensorSource&) = default;
};

}  // namespace annulus::checkpoint
