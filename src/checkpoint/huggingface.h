// HuggingFace folders: config.json beside *.safetensors. Parameters have the same names here (spec/model.md), so that a
// folder is a TensorSource of group "model". Files are read from the folder itself only: one model.safetensors, the
// plain names of model.safetensors.index.json, or without these all *.safetensors; no links. Not collective.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/huggingface_config.h"
#include "checkpoint/store.h"

namespace annulus::checkpoint {

bool is_huggingface(const std::string& path);  // a folder with a config.json

class HuggingFaceFolder : public TensorSource {
 public:
  // Reads config.json and every file's header, and checks that the model's tensors are there with their shapes and
  // that no tensor is left over. Only rotary_emb.inv_freq is ignored (old files), and a lm_head.weight beside
  // tie_word_embeddings that equals the embedding bit for bit. CheckpointError.
  explicit HuggingFaceFolder(const std::string& path);
  ~HuggingFaceFolder() override;

  const std::string& path() const override { return path_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  void read(std::string_view group, std::string_view tensor, std::int64_t begin, TensorView out) const override;

  const HuggingFaceConfig& config() const { return config_; }
  const std::vector<std::string>& ignored() const { return ignored_; }
  DType widest() const;        // of the tensors' types, f32 for f16
  std::string digest() const;  // of config.json and all headers: equal where two ranks see the same folder

 private:
  struct Files;
  void check_tied_head() const;

  std::string path_;
  HuggingFaceConfig config_;
  std::string config_hash_;
  std::unique_ptr<Files> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::string> ignored_;
};

struct HuggingFaceOutput {
  std::string folder;  // must not exist
  HuggingFaceConfig config;
  std::vector<Slice> tensors;                   // whole, group "model", in the model's order
  std::vector<std::string> companions;          // files copied beside them: tokenizers and the like
  std::int64_t max_file_bytes = 5'000'000'000;  // beyond it several files and an index
};
struct Written {
  std::int64_t files = 0, bytes = 0;  // of values and headers
};
// Written beside the final name, synced, renamed: whole or not there. ConfigError where no HuggingFace model is like
// this one, before anything is written.
Written write_huggingface(const HuggingFaceOutput& output);

// What a HuggingFace folder holds beside the model that still fits after a conversion.
std::vector<std::string> companions_of(const std::string& folder);

}  // namespace annulus::checkpoint
