#include "train/batches.h"

#include <algorithm>

#include "parallel/agreement.h"

namespace annulus::train {

BatchLoader::BatchLoader(const data::TrainingData& data, parallel::Mesh& mesh, std::int64_t global_batch,
                         std::int64_t micro_batch, std::int64_t sequence_length, std::vector<std::int64_t> position)
    : data_(data),
      mesh_(mesh),
      global_batch_(global_batch),
      micro_batch_size_(micro_batch),
      sequence_length_(sequence_length),
      num_micro_(global_batch / (mesh.size("data") * micro_batch)),
      position_(std::move(position)) {
  if (position_.empty()) position_.assign(static_cast<std::size_t>(data.num_sources()), 0);
  ANNULUS_CHECK(num_micro_ * mesh.size("data") * micro_batch == global_batch, "a global batch of {} does not divide",
                global_batch);
  samples_.resize(static_cast<std::size_t>(global_batch));
  const auto size = static_cast<std::size_t>(num_micro_ * micro_batch * sequence_length);
  tokens_.resize(size);
  target_.resize(size);
  start_.resize(size);
}

void BatchLoader::next() {
  for (auto& sample : samples_) sample = data_.next(position_);
  read_own();
  Context host;
  if (mesh_.size("sequence") > 1) {
    parallel::check_equal(mesh_.host("sequence"), "batch that the ranks of a replica read",
                          std::as_bytes(std::span(tokens_)));
  }
  targets_ = std::count_if(target_.begin(), target_.end(), [](std::int32_t t) { return t >= 0; });
  auto& replicas = mesh_.host("data");
  replicas.wait(host, replicas.all_reduce(host, host_view(&targets_, {1}), parallel::ReduceOp::sum));
}

void BatchLoader::read_own() {
  const std::int64_t replicas = mesh_.size("data"), own = mesh_.coordinate("data");
  const auto length = static_cast<std::size_t>(sequence_length_);
  for (std::int64_t i = 0; i < num_micro_ * micro_batch_size_; ++i) {
    const std::int64_t micro = i / micro_batch_size_, in_micro = i % micro_batch_size_;
    const auto& ref = samples_[static_cast<std::size_t>((micro * replicas + own) * micro_batch_size_ + in_micro)];
    const std::size_t at = static_cast<std::size_t>(i) * length;
    data_.read(ref, {tokens_.data() + at, length}, {target_.data() + at, length}, {start_.data() + at, length});
  }
}

Sequences BatchLoader::micro_batch(std::int64_t i) const {
  const auto size = static_cast<std::size_t>(micro_batch_size_ * sequence_length_);
  const std::size_t at = static_cast<std::size_t>(i) * size;
  return {{tokens_.data() + at, size}, {target_.data() + at, size}, {start_.data() + at, size}};
}

}  // namespace annulus::train
