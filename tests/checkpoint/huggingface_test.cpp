// config.json, index.json and folders: what is read, what is refused and by which name, and what is written.
#include "checkpoint/huggingface.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "fixture.h"
#include "model/transformer.h"

namespace annulus::checkpoint {
namespace {

using nlohmann::json;
using testing::TempFolder;

json llama() {
  return {{"model_type", "llama"},
          {"architectures", {"LlamaForCausalLM"}},
          {"vocab_size", 32},
          {"hidden_size", 8},
          {"intermediate_size", 12},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", true},
          {"max_position_embeddings", 64}};
}

json family(const std::string& type, const std::string& architecture) {
  json out = llama();
  out["model_type"] = type;
  out["architectures"] = {architecture};
  return out;
}
json mistral() { return family("mistral", "MistralForCausalLM"); }
json qwen2() { return family("qwen2", "Qwen2ForCausalLM"); }
json qwen3() { return family("qwen3", "Qwen3ForCausalLM"); }

json with(json base, const json& more) {
  base.update(more);
  return base;
}
json without(json base, const std::string& key) {
  base.erase(key);
  return base;
}

model::ModelConfig read(const json& config) { return parse_huggingface_config(config.dump(), "config.json").model; }

std::string complaint(const json& config) {
  try {
    (void)read(config);
    return "";
  } catch (const CheckpointError& e) {
    return e.what();
  }
}

TEST(HuggingFaceConfig, Families) {
  const auto l = read(llama());
  EXPECT_EQ(l.head_dim, 2);
  EXPECT_EQ(l.num_key_value_heads, 2);
  EXPECT_FALSE(l.qk_norm || l.attention_bias);
  EXPECT_TRUE(l.tie_word_embeddings);
  EXPECT_EQ(read(without(llama(), "num_key_value_heads")).num_key_value_heads, 4);
  EXPECT_EQ(read(with(llama(), {{"num_key_value_heads", nullptr}})).num_key_value_heads, 4);
  EXPECT_EQ(read(with(llama(), {{"head_dim", 6}})).head_dim, 6);
  EXPECT_TRUE(read(with(llama(), {{"attention_bias", true}})).attention_bias);
  EXPECT_EQ(read(without(llama(), "rms_norm_eps")).rms_norm_eps, 1e-6);
  EXPECT_FALSE(read(without(llama(), "tie_word_embeddings")).tie_word_embeddings);
  EXPECT_TRUE(read(qwen2()).attention_bias);
  EXPECT_TRUE(read(qwen3()).qk_norm);
  EXPECT_EQ(read(qwen3()).head_dim, 128) << "whatever hidden_size / heads is";
  EXPECT_FALSE(read(qwen3()).attention_bias);
}

TEST(HuggingFaceConfig, Windows) {
  EXPECT_EQ(read(mistral()).sliding_window, 4096) << "transformers' default";
  EXPECT_EQ(read(with(mistral(), {{"sliding_window", nullptr}})).sliding_window, 0);
  EXPECT_EQ(read(with(mistral(), {{"sliding_window", 7}})).sliding_window, 7);
  for (const json& base : {qwen2(), qwen3()}) {
    EXPECT_EQ(read(with(base, {{"sliding_window", 7}})).sliding_window, 0) << "use_sliding_window is false";
    const json used = with(base, {{"sliding_window", 7}, {"use_sliding_window", true}});
    EXPECT_EQ(read(used).sliding_window, 0) << "max_window_layers is 28: no layer has the window";
    EXPECT_EQ(read(with(used, {{"max_window_layers", 0}})).sliding_window, 7);
    EXPECT_EQ(read(with(used, {{"max_window_layers", 0}, {"sliding_window", nullptr}})).sliding_window, 0);
    EXPECT_EQ(read(with(used, {{"max_window_layers", 2}})).sliding_window, 0);
    EXPECT_NE(complaint(with(used, {{"max_window_layers", 1}})).find("\"max_window_layers\" is 1 of 2"),
              std::string::npos);
    EXPECT_EQ(read(with(used, {{"layer_types", {"sliding_attention", "sliding_attention"}}})).sliding_window, 7);
    EXPECT_EQ(read(with(used, {{"layer_types", {"full_attention", "full_attention"}}})).sliding_window, 0);
    EXPECT_NE(
        complaint(with(used, {{"layer_types", {"full_attention", "sliding_attention"}}})).find("\"layer_types\" mixes"),
        std::string::npos);
  }
}

TEST(HuggingFaceConfig, RopeOfBothGenerations) {
  const json llama3{{"rope_type", "llama3"},
                    {"factor", 8.0},
                    {"low_freq_factor", 1.0},
                    {"high_freq_factor", 4.0},
                    {"original_max_position_embeddings", 8192}};
  const auto old_style = read(with(llama(), {{"rope_theta", 5e5}, {"rope_scaling", llama3}}));
  EXPECT_EQ(old_style.rope_theta, 5e5);
  EXPECT_EQ(old_style.rope_scaling.rope_type, "llama3");
  EXPECT_EQ(old_style.rope_scaling.original_max_position_embeddings, 8192);
  const json parameters = with(llama3, {{"rope_theta", 5e5}});
  EXPECT_EQ(read(with(without(llama(), "rope_theta"), {{"rope_parameters", parameters}})), old_style);
  EXPECT_EQ(read(with(llama(), {{"rope_theta", 5e5}, {"rope_scaling", llama3}, {"rope_parameters", parameters}})),
            old_style);
  EXPECT_EQ(read(without(llama(), "rope_theta")).rope_theta, 10000);
  EXPECT_EQ(read(with(llama(), {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}})).rope_scaling.factor, 2);
  const auto yarn = read(with(llama(), {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}}})).rope_scaling;
  EXPECT_EQ(yarn.original_max_position_embeddings, 64) << "max_position_embeddings where nothing is said";
  EXPECT_EQ(yarn.beta_fast, 32);
  EXPECT_EQ(yarn.attention_factor, 0) << "derived";
}

// Each refused by the field's name, with exit code 4.
TEST(HuggingFaceConfig, WhatIsRefusedIsNamed) {
  const auto scaled = [](const json& scaling) { return with(llama(), {{"rope_scaling", scaling}}); };
  const std::vector<std::pair<json, std::string>> cases{
      {json::array(), "not an object"},
      {without(llama(), "model_type"), "\"model_type\" is missing"},
      {with(llama(), {{"model_type", "gemma"}}), "\"model_type\" is \"gemma\""},
      {with(llama(), {{"architectures", {"LlamaForSequenceClassification"}}}), "\"architectures\""},
      {without(llama(), "hidden_size"), "\"hidden_size\" is missing"},
      {with(llama(), {{"hidden_size", "8"}}), "\"hidden_size\" is \"8\"; expected an integer"},
      {with(llama(), {{"hidden_size", 8.5}}), "\"hidden_size\" is 8.5"},
      {with(llama(), {{"hidden_size", -8}}), "hidden_size"},
      {with(llama(), {{"vocab_size", 1ull << 40}}), "vocab_size"},
      {with(llama(), {{"num_attention_heads", 0}}), "\"num_attention_heads\""},
      {with(llama(), {{"num_attention_heads", 3}}), "num_key_value_heads"},
      {with(llama(), {{"head_dim", 3}}), "head_dim"},
      {without(qwen2(), "num_key_value_heads"), "\"num_key_value_heads\" is missing"},
      {with(llama(), {{"hidden_act", "gelu"}}), "\"hidden_act\" is \"gelu\""},
      {with(llama(), {{"mlp_bias", true}}), "\"mlp_bias\" is true"},
      {with(mistral(), {{"attention_bias", true}}), "\"attention_bias\""},
      {with(llama(), {{"partial_rotary_factor", 0.5}}), "\"partial_rotary_factor\" is 0.5"},
      {with(llama(), {{"sliding_window", 9}}), "\"sliding_window\" = 9 is not known"},
      {with(mistral(), {{"sliding_window", 0}}), "\"sliding_window\" is 0"},
      {with(mistral(), {{"layer_types", {"full_attention", "full_attention"}}}), "\"layer_types\""},
      {with(qwen2(), {{"layer_types", {"full_attention"}}}), "\"layer_types\" is not a list of 2"},
      {with(qwen2(), {{"layer_types", {"full_attention", "linear"}}}), "\"layer_types\" holds \"linear\""},
      {with(qwen2(), {{"layer_types", {"sliding_attention", "sliding_attention"}}}), "no window is in use"},
      {with(llama(), {{"quantization_config", {{"bits", 4}}}}), "\"quantization_config\""},
      {with(llama(), {{"attention_multiplier", 0.1}}), "\"attention_multiplier\" = 0.1 is not known"},
      {with(llama(), {{"rms_norm_eps", "tiny"}}), "\"rms_norm_eps\""},
      {with(llama(), {{"tie_word_embeddings", 1}}), "\"tie_word_embeddings\""},
      {with(llama(), {{"rope_theta", 0.0}}), "\"rope_theta\" is 0"},
      {with(llama(), {{"rope_theta", -1.0}}), "\"rope_theta\" is -1"},
      {with(llama(), {{"rope_scaling", 3}}), "rope_scaling. is not an object"},
      {scaled({{"rope_type", "dynamic"}, {"factor", 2.0}}), "\"rope_scaling.rope_type\" is \"dynamic\""},
      {scaled({{"rope_type", "longrope"}}), "\"rope_scaling.rope_type\" is \"longrope\""},
      {scaled({{"rope_type", "linear"}}), "\"rope_scaling.factor\" is missing"},
      {scaled({{"rope_type", "linear"}, {"type", "yarn"}, {"factor", 2.0}}), "\"rope_scaling.type\" and"},
      {scaled({{"rope_type", "linear"}, {"factor", 2.0}, {"mscale", 1.0}}), "\"rope_scaling.mscale\""},
      {scaled({{"rope_type", "linear"}, {"factor", 0.5}}), "rope_scaling.factor"},
      {scaled({{"rope_type", "llama3"}, {"factor", 2.0}}), "\"rope_scaling.low_freq_factor\" is missing"},
      {scaled({{"rope_type", "yarn"}, {"factor", 2.0}, {"truncate", false}}), "\"rope_scaling.truncate\" is false"},
      {scaled({{"rope_type", "yarn"}, {"factor", 2.0}, {"attention_factor", 0.0}}),
       "\"rope_scaling.attention_factor\""},
      {with(scaled({{"rope_type", "linear"}, {"factor", 2.0}}), {{"rope_parameters", {{"rope_type", "default"}}}}),
       "\"rope_parameters\" and \"rope_scaling\" differ"},
      {with(llama(), {{"rope_parameters", {{"rope_theta", 1e6}}}}), "\"rope_parameters.rope_theta\" is 1000000"},
      {with(llama(), {{"rope_parameters", {{"full_attention", {{"rope_theta", 1e6}}}}}}),
       "\"rope_parameters.full_attention\""},
  };
  for (const auto& [config, says] : cases) {
    const std::string said = complaint(config);
    EXPECT_NE(said.find(says), std::string::npos) << "wanted: " << says << "\nsaid: " << said;
    EXPECT_EQ(said.find("config.json"), 0u) << said;
  }
  EXPECT_THROW(parse_huggingface_config(R"({"model_type":"llama","model_type":"qwen2"})", "c"), CheckpointError);
  EXPECT_THROW(parse_huggingface_config(R"({"model_type":)", "c"), CheckpointError);
}

TEST(HuggingFaceConfig, NeutralFieldsAreRead) {
  EXPECT_EQ(read(with(llama(), {{"eos_token_id", {1, 2}},
                                {"pretraining_tp", 1},
                                {"_name_or_path", "x"},
                                {"torch_dtype", "float16"},
                                {"some_feature", false},
                                {"other", nullptr},
                                {"use_cache", true}})),
            read(llama()));
}

TEST(HuggingFaceConfig, WrittenIsReadAgain) {
  for (const json& config :
       {llama(), with(llama(), {{"head_dim", 6}}), mistral(), with(mistral(), {{"sliding_window", nullptr}}), qwen2(),
        qwen3(), with(qwen3(), {{"use_sliding_window", true}, {"sliding_window", 5}, {"max_window_layers", 0}}),
        with(llama(), {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}, {"attention_factor", 1.5}}}}),
        with(llama(), {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 4.0}}}})}) {
    const auto once = parse_huggingface_config(config.dump(), "c");
    const std::string text = to_huggingface_json(once, DType::bf16);
    const auto twice = parse_huggingface_config(text, "c");
    EXPECT_EQ(once.model, twice.model) << text;
    EXPECT_EQ(once.max_position_embeddings, twice.max_position_embeddings);
    // Each generation finds its fields without the other's.
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
      json half = json::parse(text);
      half.erase(key);
      if (std::string(key) == "rope_scaling") half.erase("rope_theta");
      EXPECT_EQ(read(half), once.model) << key;
    }
  }
  auto both = parse_huggingface_config(qwen3().dump(), "c");
  both.model.attention_bias = true;
  EXPECT_THROW(to_huggingface_json(both, DType::f32), ConfigError);
  auto sparse = parse_huggingface_config(llama().dump(), "c");
  sparse.model.attention = {model::AttentionKind::dense, model::AttentionKind::nsa};
  EXPECT_THROW(to_huggingface_json(sparse, DType::f32), ConfigError);
}

TEST(HuggingFaceIndex, PlainNamesOfItsOwnFolderOnly) {
  const auto index = [](const json& map) {
    return json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump();
  };
  EXPECT_EQ(parse_safetensors_index(index({{"w", "model-00001-of-00001.safetensors"}}), "i").size(), 1u);
  for (const json& name :
       {json("../x.safetensors"), json("/etc/passwd"), json("/abs/x.safetensors"), json("a/b.safetensors"), json(".."),
        json(""), json("x.bin"), json(3), json("a\\..\\b.safetensors"), json(std::string("x\0.safetensors", 14))}) {
    try {
      (void)parse_safetensors_index(index({{"model.w", name}}), "index.json");
      ADD_FAILURE() << name;
    } catch (const CheckpointError& e) {
      EXPECT_NE(std::string(e.what()).find("index.json: tensor \"model.w\" is in"), std::string::npos) << e.what();
    }
  }
  for (const char* text :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})"}) {
    EXPECT_THROW(parse_safetensors_index(text, "i"), CheckpointError) << text;
  }
}

// A folder of that config's model with random weights; `change` edits the tensors before they are written.
struct Folder {
  using Tensors = std::vector<Slice>;
  explicit Folder(const json& config, const std::function<void(Folder&)>& change = nullptr) {
    std::ofstream(folder / "config.json") << config.dump();
    model::Transformer model(read(config));
    model.visit_parameters([&](model::Parameter& p) { add(p.name, p.shape); });
    if (change) change(*this);
    write("model.safetensors", tensors);
  }
  void add(const std::string& name, const Shape& shape, DType dtype = DType::f32) {
    memory.push_back(testing::values_of({"model", name, shape, dtype}, 3));
    tensors.push_back({"model", name, shape, 0, {memory.back().data(), dtype, DeviceKind::cpu, {shape.numel()}}});
  }
  Slice& at(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const Slice& s) { return s.tensor == name; });
  }
  void remove(const std::string& name) {
    std::erase_if(tensors, [&](const Slice& s) { return s.tensor == name; });
  }
  void write(const std::string& name, const Tensors& slices) const {
    std::vector<const Slice*> pointers;
    for (const Slice& s : slices) pointers.push_back(&s);
    write_safetensors(folder / name, pointers);
  }
  std::string complaint() const {
    try {
      (void)HuggingFaceFolder(folder.path());
      return "";
    } catch (const CheckpointError& e) {
      return e.what();
    }
  }
  TempFolder folder;
  std::vector<std::vector<std::uint8_t>> memory;
  Tensors tensors;
};

void expect_says(const Folder& folder, const std::string& text) {
  const std::string said = folder.complaint();
  EXPECT_NE(said.find(text), std::string::npos) << "wanted: " << text << "\nsaid: " << said;
}

TEST(HuggingFaceFolder, TiedAndUntiedHeads) {
  const Shape head{32, 8};
  const json tied = llama(), untied = with(llama(), {{"tie_word_embeddings", false}});
  EXPECT_EQ(Folder(tied).complaint(), "");
  EXPECT_EQ(Folder(untied).complaint(), "");
  expect_says(Folder(untied, [](Folder& f) { f.remove("lm_head.weight"); }),
              "tensor lm_head.weight [32, 8] is wanted, not found; config.json says tie_word_embeddings = false");
  expect_says(Folder(tied, [&](Folder& f) { f.add("lm_head.weight", head); }),
              "tensor lm_head.weight differs from model.embed_tokens.weight");
  const Folder twice(tied, [&](Folder& f) {
    Slice copy = f.at("model.embed_tokens.weight");
    copy.tensor = "lm_head.weight";
    f.tensors.push_back(copy);
  });
  EXPECT_EQ(twice.complaint(), "");
  const HuggingFaceFolder opened(twice.folder.path());
  EXPECT_EQ(opened.ignored(), std::vector<std::string>{"lm_head.weight"});
  EXPECT_EQ(opened.find("model", "lm_head.weight"), nullptr);
}

TEST(HuggingFaceFolder, EveryTensorIsUsedOrNamed) {
  const std::string q = "model.layers.1.self_attn.q_proj.";
  expect_says(Folder(llama(), [&](Folder& f) { f.add(q + "bias", {8}); }),
              "tensor \"" + q + "bias\" [8] has no place: config.json says that there are no biases");
  expect_says(Folder(llama(), [](Folder& f) { f.add("model.layers.0.self_attn.o_proj.bias", {8}); }),
              "o_proj.bias\" [8] has no place: o_proj has no bias");
  expect_says(Folder(with(llama(), {{"attention_bias", true}}),
                     [](Folder& f) { f.add("model.layers.0.self_attn.o_proj.bias", {8}); }),
              "o_proj has no bias");
  expect_says(Folder(llama(), [](Folder& f) { f.add("model.layers.0.self_attn.q_norm.weight", {2}); }),
              "has no norms of queries and keys");
  expect_says(Folder(llama(), [](Folder& f) { f.add("model.layers.2.input_layernorm.weight", {8}); }),
              "model.layers.2.input_layernorm.weight\" [8] has no place");
  expect_says(Folder(qwen2(), [&](Folder& f) { f.remove(q + "bias"); }),
              "tensor " + q + "bias [8] is wanted, not found");
  expect_says(Folder(llama(), [&](Folder& f) { f.remove("model.norm.weight"); }),
              "tensor model.norm.weight [8] is wanted, not found");
  const Folder old(llama(), [](Folder& f) { f.add("model.layers.0.self_attn.rotary_emb.inv_freq", {1}); });
  EXPECT_EQ(HuggingFaceFolder(old.folder.path()).ignored().size(), 1u);
}

// Heads that a wrong division by the other head count would still fit are told apart by shape.
TEST(HuggingFaceFolder, ShapesAreTheConfigs) {
  const std::string k = "model.layers.0.self_attn.k_proj.weight";
  expect_says(Folder(llama(),
                     [&](Folder& f) {
                       f.remove(k);
                       f.add(k, {8, 8});
                     }),
              "tensor " + k + ": config.json makes it [4, 8], found [8, 8]");
  expect_says(Folder(llama(),
                     [&](Folder& f) {
                       f.remove(k);
                       f.add(k, {8, 4});
                     }),
              "tensor " + k + ": config.json makes it [4, 8], found [8, 4]");
  expect_says(Folder(llama(), [&](Folder& f) { f.at("model.embed_tokens.weight").tensor = "embed_tokens.weight"; }),
              "model.embed_tokens.weight");
}

TEST(HuggingFaceFolder, FilesOfAnIndex) {
  const auto sharded = [](const std::function<void(json&, Folder&)>& change) {
    auto folder = std::make_unique<Folder>(llama());
    Folder& f = *folder;
    std::filesystem::remove(f.folder / "model.safetensors");
    const auto middle = f.tensors.begin() + 5;
    f.write("a.safetensors", {f.tensors.begin(), middle});
    f.write("b.safetensors", {middle, f.tensors.end()});
    json map;
    for (auto t = f.tensors.begin(); t != f.tensors.end(); ++t)
      map[t->tensor] = t < middle ? "a.safetensors" : "b.safetensors";
    if (change) change(map, f);
    if (!map.is_null()) std::ofstream(f.folder / "model.safetensors.index.json") << json{{"weight_map", map}}.dump();
    return folder;
  };
  EXPECT_EQ(sharded(nullptr)->complaint(), "");
  EXPECT_EQ(sharded([](json& map, Folder&) { map = nullptr; })->complaint(), "")
      << "without an index all files are read";
  expect_says(*sharded([](json& map, Folder&) { map["model.norm.weight"] = "a.safetensors"; }),
              "index.json: tensor \"model.norm.weight\" is not in a.safetensors");
  expect_says(*sharded([](json& map, Folder&) { map["model.other"] = "a.safetensors"; }),
              "tensor \"model.other\" is not in a.safetensors");
  expect_says(*sharded([](json& map, Folder&) { map.erase("model.norm.weight"); }), "tensor \"model.norm.weight\" of ");
  expect_says(*sharded([](json& map, Folder&) { map["model.norm.weight"] = "../b.safetensors"; }),
              "tensor \"model.norm.weight\" is in \"../b.safetensors\"");
  expect_says(*sharded([](json& map, Folder&) { map["model.norm.weight"] = "c.safetensors"; }),
              "c.safetensors: is not there");
  expect_says(*sharded([](json& map, Folder& f) {
    map["model.norm.weight"] = "c.safetensors";
    std::filesystem::create_symlink("/etc/passwd", f.folder / "c.safetensors");
  }),
              "c.safetensors: not a regular file");
  expect_says(*sharded([](json& map, Folder& f) {
    f.write("c.safetensors", {f.at("model.norm.weight")});
    map = nullptr;
  }),
              "tensor \"model.norm.weight\" is in ");
  const Folder nothing(llama());
  std::filesystem::remove(nothing.folder / "model.safetensors");
  expect_says(nothing, "no model.safetensors, model.safetensors.index.json or other .safetensors file");
}

TEST(HuggingFaceFolder, NothingIsLeftUnderAFinalName) {
  Folder source(llama());
  const HuggingFaceFolder opened(source.folder.path());
  const TempFolder out;
  HuggingFaceOutput output{
      .folder = out / "dst", .config = opened.config(), .tensors = source.tensors, .companions = {}};
  output.tensors.back().data.data = nullptr;
  output.tensors.back().fill = [](const TensorView&) { throw CheckpointError("the source broke"); };
  EXPECT_THROW(write_huggingface(output), CheckpointError);
  EXPECT_TRUE(std::filesystem::is_empty(out.path()));
  output.config.model.attention = {model::AttentionKind::nsa};
  EXPECT_THROW(write_huggingface(output), ConfigError);
  EXPECT_TRUE(std::filesystem::is_empty(out.path()));
  output.config = opened.config();
  output.tensors = source.tensors;
  output.max_file_bytes = 500;
  const Written written = write_huggingface(output);
  EXPECT_GT(written.files, 3);
  EXPECT_THROW(write_huggingface(output), CheckpointError) << "what is there is not written over";
  const HuggingFaceFolder back(out / "dst");
  for (const Slice& s : source.tensors) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(s.data.bytes()));
    back.read("model", s.tensor, 0, {bytes.data(), s.data.dtype, DeviceKind::cpu, s.data.shape});
    EXPECT_EQ(std::memcmp(bytes.data(), s.data.data, bytes.size()), 0) << s.tensor;
  }
}

}  // namespace
}  // namespace annulus::checkpoint
