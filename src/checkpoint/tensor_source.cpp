#include "checkpoint/tensor_source.h"

#include <algorithm>
#include <utility>

namespace annulus::checkpoint {

const TensorInfo* TensorSource::find(std::string_view group, std::string_view tensor) const {
  const auto& all = tensors();
  const auto less = [](const TensorInfo& info, const std::pair<std::string_view, std::string_view>& key) {
    return std::pair<std::string_view, std::string_view>(info.group, info.tensor) < key;
  };
  const auto it = std::lower_bound(all.begin(), all.end(), std::pair(group, tensor), less);
  return it != all.end() && it->group == group && it->tensor == tensor ? &*it : nullptr;
}

const TensorInfo& TensorSource::require(std::string_view group, std::string_view tensor, const Shape& wanted) const {
  const TensorInfo* info = find(group, tensor);
  if (!info)
    throw CheckpointError(
        fmt::format("{}: tensor {}/{} of shape {} is wanted, not found", path(), group, tensor, wanted.str()));
  if (info->shape != wanted) {
    throw CheckpointError(fmt::format("{}: tensor {}/{}: wanted shape {}, found {}", path(), group, tensor,
                                      wanted.str(), info->shape.str()));
  }
  return *info;
}

std::int64_t TensorSource::bytes() const {
  std::int64_t sum = 0;
  for (const TensorInfo& info : tensors()) sum += info.bytes();
  return sum;
}

std::string TensorSource::weights_group() const {
  for (const TensorInfo& info : tensors()) {
    if (info.group == "optimizer/master") return info.group;
  }
  return "model";
}

}  // namespace annulus::checkpoint
