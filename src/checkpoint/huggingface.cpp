#include "checkpoint/huggingface.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/hash.h"
#include "checkpoint/piece.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/strict_json.h"
#include "model/transformer.h"

namespace annulus::checkpoint {
namespace {

constexpr const char* kConfigName = "config.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr std::int64_t kMaxConfig = std::int64_t{1} << 24, kMaxIndex = std::int64_t{1} << 27;

std::string strip_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

std::vector<std::string> safetensors_of(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// What the file's tensors must be to be used, for the message about one that has no place.
std::string why_no_place(const std::string& name, const model::ModelConfig& m) {
  if (name.ends_with("o_proj.bias")) return "o_proj has no bias in this program";
  if (name.ends_with("_proj.bias") && !m.attention_bias) return "config.json says that there are no biases";
  if (name.ends_with("_norm.weight") && !m.qk_norm) return "this family has no norms of queries and keys";
  return "the model of config.json has none of that name";
}

}  // namespace

struct HuggingFaceFolder::Files {
  struct Place {
    std::size_t file;
    const SafetensorsEntry* entry;
  };
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, Place, std::less<>> tensors;

  explicit Files(const std::string& folder);
  const Place& at(std::string_view tensor) const { return tensors.find(tensor)->second; }
  void read(std::string_view tensor, std::int64_t begin, const TensorView& out) const {
    const Place& place = at(tensor);
    files[place.file]->read(*place.entry, begin, out);
  }

 private:
  void open(const std::string& path);
  void check_index(const std::string& path, const std::vector<std::pair<std::string, std::string>>& index) const;
};

void HuggingFaceFolder::Files::open(const std::string& path) {
  files.push_back(std::make_unique<SafetensorsFile>(path));
  for (const SafetensorsEntry& entry : files.back()->entries()) {
    const auto [other, fresh] = tensors.try_emplace(entry.name, Place{files.size() - 1, &entry});
    if (!fresh) {
      throw CheckpointError(
          fmt::format("{}: tensor {} is in {} too", path, quote_name(entry.name), files[other->second.file]->path()));
    }
  }
}

void HuggingFaceFolder::Files::check_index(const std::string& path,
                                           const std::vector<std::pair<std::string, std::string>>& index) const {
  const std::string folder = parent_of(path);
  for (const auto& [tensor, file] : index) {
    const auto place = tensors.find(tensor);
    if (place == tensors.end() || files[place->second.file]->path() != folder + "/" + file) {
      throw CheckpointError(fmt::format("{}: tensor {} is not in {}", path, quote_name(tensor), file));
    }
  }
  if (index.size() == tensors.size()) return;
  for (const auto& [tensor, place] : tensors) {  // sorted, as the index is
    if (!std::binary_search(index.begin(), index.end(), std::pair(tensor, std::string()),
                            [](const auto& a, const auto& b) { return a.first < b.first; })) {
      throw CheckpointError(
          fmt::format("{}: tensor {} of {} is not listed", path, quote_name(tensor), files[place.file]->path()));
    }
  }
}

HuggingFaceFolder::Files::Files(const std::string& folder) {
  const std::string single = folder + "/" + kSingleName, index_path = folder + "/" + kIndexName;
  if (exists(single)) {
    open(single);
  } else if (exists(index_path)) {
    const auto index = parse_safetensors_index(read_file(index_path, kMaxIndex), index_path);
    std::vector<std::string> names;
    for (const auto& [tensor, file] : index) names.push_back(file);
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    for (const std::string& name : names) open(folder + "/" + name);
    check_index(index_path, index);
  } else {
    for (const std::string& name : safetensors_of(folder)) open(folder + "/" + name);
  }
  if (files.empty()) {
    throw CheckpointError(
        fmt::format("{}: no {}, {} or other .safetensors file; older formats (.bin, .pt) are not read", folder,
                    kSingleName, kIndexName));
  }
}

bool is_huggingface(const std::string& path) { return exists(strip_slashes(path) + "/" + kConfigName); }

HuggingFaceFolder::HuggingFaceFolder(const std::string& path) : path_(strip_slashes(path)) {
  const std::string config_path = path_ + "/" + kConfigName, text = read_file(config_path, kMaxConfig);
  config_ = parse_huggingface_config(text, config_path);
  config_hash_ = hash_of(text.data(), text.size());
  files_ = std::make_unique<Files>(path_);

  const model::ModelConfig& m = config_.model;
  std::map<std::string, bool> wanted;  // whether it was found
  model::Transformer model(m);
  model.visit_parameters([&](model::Parameter& p) {
    wanted.emplace(p.name, true);
    const auto found = files_->tensors.find(p.name);
    if (found == files_->tensors.end()) {
      throw CheckpointError(fmt::format(
          "{}: tensor {} {} is wanted, not found{}", path_, p.name, p.shape.str(),
          p.name == kHead ? "; config.json says tie_word_embeddings = false (true is the embedding as output matrix)"
                          : ""));
    }
    const SafetensorsEntry& entry = *found->second.entry;
    if (entry.shape != p.shape) {
      throw CheckpointError(fmt::format("{}: tensor {}: config.json makes it {}, found {}",
                                        files_->files[found->second.file]->path(), p.name, p.shape.str(),
                                        entry.shape.str()));
    }
    tensors_.push_back({"model", p.name, entry.dtype, entry.shape});
  });
  std::sort(tensors_.begin(), tensors_.end(), [](auto& a, auto& b) { return a.tensor < b.tensor; });
  for (const auto& [name, place] : files_->tensors) {
    if (wanted.contains(name)) continue;
    if (name == kHead && m.tie_word_embeddings) {
      check_tied_head();
    } else if (!name.ends_with(".rotary_emb.inv_freq")) {
      throw CheckpointError(fmt::format("{}: tensor {} {} has no place: {}", files_->files[place.file]->path(),
                                        quote_name(name), place.entry->shape.str(), why_no_place(name, m)));
    }
    ignored_.push_back(name);
  }
}

HuggingFaceFolder::~HuggingFaceFolder() = default;

// Some files carry the tied matrix twice. If the two differ, one of config and file is wrong.
void HuggingFaceFolder::check_tied_head() const {
  const SafetensorsEntry &head = *files_->at(kHead).entry, &embedding = *files_->at(kEmbedding).entry;
  bool equal = head.shape == embedding.shape && head.dtype == embedding.dtype;
  const std::int64_t step = std::int64_t{1} << 20, count = head.shape.numel();
  const auto element = static_cast<std::int64_t>(size_of(head.dtype));
  std::vector<char> a, b;
  for (std::int64_t at = 0; equal && at < count; at += step) {
    const std::int64_t n = std::min(step, count - at);
    a.resize(static_cast<std::size_t>(n * element));
    b.resize(a.size());
    files_->read(kHead, at, {a.data(), head.dtype, DeviceKind::cpu, {n}});
    files_->read(kEmbedding, at, {b.data(), head.dtype, DeviceKind::cpu, {n}});
    equal = a == b;
  }
  if (!equal) {
    throw CheckpointError(fmt::format(
        "{}: tensor {} differs from {}, though config.json says tie_word_embeddings = true: set it to false "
        "to use the tensor, or remove the tensor",
        path_, kHead, kEmbedding));
  }
}

void HuggingFaceFolder::read(std::string_view group, std::string_view tensor, std::int64_t begin,
                             TensorView out) const {
  if (!find(group, tensor)) {
    throw CheckpointError(fmt::format("{}: tensor {}/{} is wanted, not found", path_, group, tensor));
  }
  files_->read(tensor, begin, out);
}

DType HuggingFaceFolder::widest() const {
  DType widest = DType::bf16;
  for (const TensorInfo& t : tensors_) {
    if (t.dtype == DType::f64) return DType::f64;
    if (t.dtype != DType::bf16) widest = DType::f32;
  }
  return widest;
}

std::string HuggingFaceFolder::digest() const {
  std::string text = config_hash_;
  for (const TensorInfo& t : tensors_) text += fmt::format("\n{} {} {}", t.tensor, t.shape.str(), name_of(t.dtype));
  return hash_of(text.data(), text.size());
}

}  // namespace annulus::checkpoint
