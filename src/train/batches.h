// BatchLoader: the micro-batches of one step. Every rank runs through the same order of samples and reads those of its
// own replica; ranks of a replica compare a hash of what they read before it is used. Collective over the mesh's host
// axes.
#pragma once

#include <vector>

#include "data/dataset.h"
#include "parallel/mesh.h"
#include "train/engine.h"

namespace annulus::train {

class BatchLoader {
 public:
  // global_batch = data · micro_batch · (micro-batches per step). Sample j of a step goes to micro-batch j / (data ·
  // micro_batch) of replica (j / micro_batch) mod data.
  BatchLoader(const data::TrainingData& data, parallel::Mesh& mesh, std::int64_t global_batch, std::int64_t micro_batch,
              std::int64_t sequence_length, std::vector<std::int64_t> position);

  void next();  // draws and reads the next global batch
  std::int64_t num_micro_batches() const { return num_micro_; }
  Sequences micro_batch(std::int64_t i) const;
  std::int64_t num_targets() const { return targets_; }                     // of all replicas
  const std::vector<std::int64_t>& position() const { return position_; }   // samples taken of every source
  const std::vector<data::SampleRef>& samples() const { return samples_; }  // of the whole global batch, in order

 private:
  void read_own();

  const data::TrainingData& data_;
  parallel::Mesh& mesh_;
  std::int64_t global_batch_, micro_batch_size_, sequence_length_, num_micro_;
  std::vector<std::int64_t> position_;
  std::vector<data::SampleRef> samples_;
  std::vector<std::int32_t> tokens_, target_, start_;  // [num_micro, micro_batch, S]
  std::int64_t targets_ = 0;
};

}  // namespace annulus::train
