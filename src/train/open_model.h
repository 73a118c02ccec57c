// What MODEL on a command line means: a checkpoint folder, a run folder (its newest checkpoint that verifies), or a
// HuggingFace folder; all three are tensors and a Meta from here on. CheckpointError for anything else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/huggingface.h"
#include "checkpoint/store.h"
#include "train/config.h"

namespace annulus::train {

class Model : public checkpoint::TensorSource {
 public:
  Model(std::shared_ptr<const checkpoint::Checkpoint> opened);         // NOLINT: a checkpoint is a model
  Model(std::shared_ptr<const checkpoint::HuggingFaceFolder> opened);  // NOLINT

  const std::string& path() const override { return tensors_->path(); }
  const std::vector<checkpoint::TensorInfo>& tensors() const override { return tensors_->tensors(); }
  void read(std::string_view group, std::string_view tensor, std::int64_t begin, TensorView out) const override {
    tensors_->read(group, tensor, begin, out);
  }

  // Of a HuggingFace folder: what its conversion would say, a config without a recipe.
  const checkpoint::Meta& meta() const { return meta_; }
  std::shared_ptr<const checkpoint::TensorSource> source() const { return tensors_; }
  // One of the two is not null.
  const checkpoint::Checkpoint* as_checkpoint() const { return checkpoint_; }
  const checkpoint::HuggingFaceFolder* as_huggingface() const { return huggingface_; }

 private:
  std::shared_ptr<const checkpoint::TensorSource> tensors_;
  const checkpoint::Checkpoint* checkpoint_ = nullptr;
  const checkpoint::HuggingFaceFolder* huggingface_ = nullptr;
  checkpoint::Meta meta_;
};

// All ranks open it together; checkpoints are verified. Collective.
Model open_model(parallel::Communicator& world, const std::string& path);
// This process alone; a checkpoint that was named itself is not verified. `skipped`: newer ones of a run folder.
Model open_model(const std::string& path, std::vector<std::string>& skipped);
// A checkpoint or a run folder's newest, verified by all ranks: what training goes on from. Collective.
checkpoint::Checkpoint open_checkpoint(parallel::Communicator& world, const std::string& path);

// The config inside, not resolved: the recipe of the run that made the model, or for a model without one (has_recipe)
// its architecture, tokenizer and longest sequence, the rest defaults. CheckpointError if there is none.
RunConfig config_of(const Model& model, const std::string& path);
// Whether a run can go on with it: it names what the model was trained on.
inline bool has_recipe(const RunConfig& config) { return !config.data.sources.empty(); }

}  // namespace annulus::train
