#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/folder.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/new_folder.h"
#include "checkpoint/safetensors.h"

namespace annulus::checkpoint {
namespace {

// Consecutive tensors, so that no file passes the limit unless a single tensor does.
std::vector<std::vector<const Slice*>> spread(const std::vector<Slice>& tensors, std::int64_t max_bytes) {
  std::vector<std::vector<const Slice*>> files(1);
  std::int64_t bytes = 0;
  for (const Slice& t : tensors) {
    if (bytes > 0 && bytes + t.data.bytes() > max_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(&t);
    bytes += t.data.bytes();
  }
  return files;
}

void write_files(const HuggingFaceOutput& output, const std::string& folder, Written& written) {
  const auto files = spread(output.tensors, output.max_file_bytes);
  nlohmann::ordered_json weight_map;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    written.bytes += write_safetensors(folder + "/" + name, files[i]);
    for (const Slice* t : files[i]) {
      weight_map[t->tensor] = name;
      total += t->data.bytes();
    }
  }
  written.files = static_cast<std::int64_t>(files.size());
  if (files.size() == 1) return;
  const nlohmann::ordered_json index{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  write_file(folder + "/model.safetensors.index.json", index.dump(2) + "\n");
}

DType stored_type(const std::vector<Slice>& tensors) {
  DType widest = DType::bf16;
  for (const Slice& t : tensors) {
    if (size_of(t.data.dtype) > size_of(widest)) widest = t.data.dtype;
  }
  return widest;
}

}  // namespace

std::vector<std::string> companions_of(const std::string& folder) {
  std::vector<std::string> out;
  for (const char* name :
       {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"}) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(folder + "/" + name, ignored)) out.push_back(folder + "/" + name);
  }
  return out;
}

Written write_huggingface(const HuggingFaceOutput& output) {
  const std::string config = to_huggingface_json(output.config, stored_type(output.tensors));
  NewFolder out(output.folder);
  Written written;
  write_files(output, out.tmp(), written);
  for (const std::string& from : output.companions) {
    const std::string to = out.tmp() + "/" + std::filesystem::path(from).filename().string();
    constexpr std::int64_t kMaxCompanion = std::int64_t{1} << 30;
    write_file(to, read_file(from, kMaxCompanion));
  }
  write_file(out.tmp() + "/config.json", config);
  sync_file(out.tmp());
  out.commit();
  return written;
}

}  // namespace annulus::checkpoint
