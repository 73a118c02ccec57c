#include "train/open_model.h"

#include "checkpoint/exchange.h"

namespace annulus::train {
namespace {

checkpoint::Meta meta_of(const checkpoint::HuggingFaceFolder& folder) {
  RunConfig config;
  config.model = folder.config().model;
  config.data.tokenizer = folder.config().tokenizer;
  config.train.sequence_length = folder.config().max_position_embeddings;
  const DType widest = folder.widest();
  config.train.precision = widest == DType::f64 ? "fp64" : widest == DType::f32 ? "fp32" : "bf16";
  checkpoint::Meta meta;
  meta.config = without_recipe(config);
  meta.precision = config.train.precision;
  meta.provenance = "HuggingFace " + folder.path();
  return meta;
}

}  // namespace

Model::Model(std::shared_ptr<const checkpoint::Checkpoint> opened)
    : tensors_(opened), checkpoint_(opened.get()), meta_(opened->meta()) {}

Model::Model(std::shared_ptr<const checkpoint::HuggingFaceFolder> opened)
    : tensors_(opened), huggingface_(opened.get()), meta_(meta_of(*opened)) {}

checkpoint::Checkpoint open_checkpoint(parallel::Communicator& world, const std::string& path) {
  if (!checkpoint::is_checkpoint(path) && checkpoint::is_run_folder(path)) {
    std::vector<std::string> skipped;
    auto newest = checkpoint::find_newest_collective(world, path, skipped);
    if (world.rank() == 0) {
      for (const auto& line : skipped) fmt::print(stderr, "annulus: {}\n", line);
    }
    if (newest) return *newest;
    throw CheckpointError(fmt::format("{}: no checkpoint of this run folder is whole", path));
  }
  if (!checkpoint::is_checkpoint(path)) (void)checkpoint::resolve_model_path(path);  // says what is wrong with it
  return checkpoint::open_collective(world, path);
}

Model open_model(parallel::Communicator& world, const std::string& path) {
  if (checkpoint::is_checkpoint(path) || !checkpoint::is_huggingface(path)) {
    return std::make_shared<const checkpoint::Checkpoint>(open_checkpoint(world, path));
  }
  std::shared_ptr<const checkpoint::HuggingFaceFolder> folder;
  checkpoint::agree(world, [&] { folder = std::make_shared<const checkpoint::HuggingFaceFolder>(path); });
  const std::string digest = checkpoint::broadcast_text(world, folder->digest());
  checkpoint::agree(world, [&] {
    if (digest == folder->digest()) return;
    throw CheckpointError(fmt::format("{}: rank {} sees another model than rank 0; is the folder shared by all hosts?",
                                      path, world.rank()));
  });
  return folder;
}

Model open_model(const std::string& path, std::vector<std::string>& skipped) {
  if (!checkpoint::is_checkpoint(path) && checkpoint::is_huggingface(path)) {
    return std::make_shared<const checkpoint::HuggingFaceFolder>(path);
  }
  return std::make_shared<const checkpoint::Checkpoint>(
      checkpoint::Checkpoint::open(checkpoint::resolve_model_path(path, &skipped)));
}

RunConfig config_of(const Model& model, const std::string& path) {
  if (model.meta().config.empty()) {
    throw CheckpointError(
        fmt::format("{}: the checkpoint holds no run config; it was not written by a training run", path));
  }
  return parse_config(model.meta().config, model.path() + " (its config)", {});
}

}  // namespace annulus::train
