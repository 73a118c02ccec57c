#include "checkpoint/huggingface_config.h"

#include <algorithm>
#include <array>
#include <set>

#include "checkpoint/huggingface_family.h"
#include "checkpoint/strict_json.h"
#include "core/error.h"

namespace annulus::checkpoint {
namespace {

using nlohmann::json;

// Fields of all families that do not change the forward of a text model in evaluation.
constexpr std::array kNeutral{"annulus_tokenizer",
                              "architectures",
                              "attention_dropout",
                              "attn_implementation",
                              "bos_token_id",
                              "bad_words_ids",
                              "begin_suppress_tokens",
                              "cache_implementation",
                              "chunk_size_feed_forward",
                              "cross_attention_hidden_size",
                              "decoder_start_token_id",
                              "diversity_penalty",
                              "do_sample",
                              "dtype",
                              "early_stopping",
                              "encoder_no_repeat_ngram_size",
                              "eos_token_id",
                              "exponential_decay_length_penalty",
                              "finetuning_task",
                              "forced_bos_token_id",
                              "forced_eos_token_id",
                              "hidden_dropout",
                              "id2label",
                              "initializer_range",
                              "label2id",
                              "length_penalty",
                              "max_length",
                              "max_position_embeddings",
                              "min_length",
                              "model_type",
                              "no_repeat_ngram_size",
                              "num_beam_groups",
                              "num_beams",
                              "num_return_sequences",
                              "output_attentions",
                              "output_hidden_states",
                              "output_scores",
                              "pad_token_id",
                              "prefix",
                              "pretraining_tp",
                              "problem_type",
                              "repetition_penalty",
                              "return_dict",
                              "return_dict_in_generate",
                              "sep_token_id",
                              "suppress_tokens",
                              "task_specific_params",
                              "temperature",
                              "tf_legacy_loss",
                              "tokenizer_class",
                              "top_k",
                              "top_p",
                              "torch_dtype",
                              "transformers_version",
                              "typical_p",
                              "unk_token_id",
                              "use_bfloat16",
                              "use_cache"};

// The fields of an object, each taken once; what nobody took is judged at the end.
class Fields {
 public:
  Fields(const json& object, std::string where, std::string prefix = "")
      : object_(object), where_(std::move(where)), prefix_(std::move(prefix)) {
    if (!object_.is_object()) {
      throw CheckpointError(fmt::format("{}: {} is not an object", where_, prefix_.empty() ? "it" : prefix_));
    }
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw CheckpointError(fmt::format("{}: \"{}{}\" {}", where_, prefix_, key, what));
  }
  // Null where the field is absent or null.
  const json* take(const std::string& key) {
    taken_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool has(const std::string& key) const { return object_.contains(key); }
  std::string shown(const std::string& key) const {
    const std::string text = object_.at(key).dump(-1, ' ', true);
    return text.size() <= 80 ? text : text.substr(0, 80) + "…";
  }

  std::int64_t integer(const std::string& key) {  // required
    const json* value = take(key);
    if (!value) fail(key, "is missing; it must say how large the model is");
    return whole(key, *value);
  }
  std::int64_t integer_or(const std::string& key, std::int64_t otherwise) {
    const json* value = take(key);
    return value ? whole(key, *value) : otherwise;
  }
  double number_or(const std::string& key, double otherwise) {
    const json* value = take(key);
    if (!value) return otherwise;
    if (!value->is_number()) fail(key, fmt::format("is {}; expected a number", shown(key)));
    return value->get<double>();
  }
  bool boolean_or(const std::string& key, bool otherwise) {
    const json* value = take(key);
    if (!value) return otherwise;
    if (!value->is_boolean()) fail(key, fmt::format("is {}; expected true or false", shown(key)));
    return value->get<bool>();
  }
  std::string text_or(const std::string& key, const std::string& otherwise) {
    const json* value = take(key);
    if (!value) return otherwise;
    if (!value->is_string()) fail(key, fmt::format("is {}; expected a string", shown(key)));
    return value->get<std::string>();
  }
  // Supported with this one value only.
  template <class T>
  void only(const std::string& key, const T& value, const char* what) {
    const json* found = take(key);
    if (found && *found != json(value)) fail(key, fmt::format("is {}; {}", shown(key), what));
  }

  void finish() const {
    for (const auto& [key, value] : object_.items()) {
      const bool neutral = prefix_.empty() &&
                           (key.starts_with('_') || std::find(kNeutral.begin(), kNeutral.end(), key) != kNeutral.end());
      if (neutral || taken_.contains(key) || value.is_null() || value == json(false)) continue;
      throw CheckpointError(
          fmt::format("{}: field {} = {} is not known, and it might change what the model computes; remove it if it "
                      "does not",
                      where_, quote_name(prefix_ + key), shown(key)));
    }
  }

 private:
  std::int64_t whole(const std::string& key, const json& value) const {
    const bool fits =
        value.is_number_integer() &&
        (!value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX));
    if (!fits) fail(key, fmt::format("is {}; expected an integer", shown(key)));
    return value.get<std::int64_t>();
  }

  const json& object_;
  std::string where_, prefix_;
  std::set<std::string> taken_;
};

FamilyName read_family(Fields& in) {
  const std::string type = in.text_or("model_type", "");
  const auto found = std::find_if(kFamilies.begin(), kFamilies.end(), [&](auto& f) { return type == f.model_type; });
  if (found == kFamilies.end()) {
    in.fail("model_type", type.empty()
                              ? "is missing; read are llama, mistral, qwen2 and qwen3"
                              : fmt::format("is {}; read are llama, mistral, qwen2 and qwen3", quote_name(type)));
  }
  if (const json* names = in.take("architectures")) {
    if (*names != json::array({found->architecture})) {
      in.fail("architectures", fmt::format("is {}; read is [\"{}\"]", in.shown("architectures"), found->architecture));
    }
  }
  return *found;
}

model::RopeScaling read_scaling(Fields& in, std::int64_t max_positions) {
  model::RopeScaling s;
  const std::string legacy = in.text_or("type", ""),
                    type = in.text_or("rope_type", legacy.empty() ? "default" : legacy);
  if (!legacy.empty() && legacy != type)
    in.fail("type", fmt::format("and \"rope_type\" differ: {} and {}", legacy, type));
  s.rope_type = type;
  in.only("partial_rotary_factor", 1.0, "only whole heads are rotated here");
  if (type == "default") {
    for (const char* key : {"factor", "original_max_position_embeddings"}) (void)in.take(key);  // not used
    return s;
  }
  if (type != "linear" && type != "llama3" && type != "yarn") {
    in.fail("rope_type", fmt::format("is {}; supported are default, linear, llama3 and yarn", quote_name(type)));
  }
  if (!in.take("factor")) in.fail("factor", "is missing");
  s.factor = in.number_or("factor", 1);
  const std::int64_t original = in.integer_or("original_max_position_embeddings", 0);
  if (type == "llama3") {
    for (const char* key : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
      if (!in.take(key)) in.fail(key, "is missing");
    }
    s.original_max_position_embeddings = original;
    s.low_freq_factor = in.number_or("low_freq_factor", 1);
    s.high_freq_factor = in.number_or("high_freq_factor", 4);
  } else if (type == "yarn") {
    s.original_max_position_embeddings = original > 0 ? original : max_positions;
    s.beta_fast = in.number_or("beta_fast", s.beta_fast);
    s.beta_slow = in.number_or("beta_slow", s.beta_slow);
    in.only("truncate", true, "the ramp's ends are whole pairs here");
    if (in.take("attention_factor")) {
      s.attention_factor = in.number_or("attention_factor", 0);
      if (!(s.attention_factor > 0)) in.fail("attention_factor", "is not positive");
    }
  }
  return s;
}

double read_theta(Fields& in) {
  const double theta = in.number_or("rope_theta", 0);
  if (in.take("rope_theta") && !(theta > 0)) in.fail("rope_theta", fmt::format("is {}; expected more than 0", theta));
  return theta;
}

struct Rope {
  double theta = 0;  // 0: not said
  model::RopeScaling scaling;
};

Rope read_rope_object(const json& object, const char* name, std::int64_t max_positions, const std::string& where) {
  Fields in(object, where, std::string(name) + ".");
  const Rope rope{read_theta(in), read_scaling(in, max_positions)};
  in.finish();
  return rope;
}

void read_rope(Fields& in, HuggingFaceConfig& out, const std::string& where) {
  double theta = read_theta(in);
  bool scaled = false;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const json* object = in.take(name);
    if (!object) continue;
    const Rope rope = read_rope_object(*object, name, out.max_position_embeddings, where);
    if (scaled && !(rope.scaling == out.model.rope_scaling)) {
      in.fail(name, "and \"rope_scaling\" differ; keep the one that the model was trained with");
    }
    if (rope.theta != 0 && theta != 0 && rope.theta != theta) {
      in.fail(
          std::string(name) + ".rope_theta",
          fmt::format("is {}, another place says {}; keep the one that the model was trained with", rope.theta, theta));
    }
    if (rope.theta != 0) theta = rope.theta;
    out.model.rope_scaling = rope.scaling;
    scaled = true;
  }
  out.model.rope_theta = theta != 0 ? theta : 10000;  // every family's default
}

// Which layers see a window: none or all, since a ModelConfig has one window.
void read_window(Fields& in, Family family, model::ModelConfig& m) {
  const std::int64_t layers = m.num_hidden_layers;
  if (family == Family::llama) return;     // its fields are none of these: finish() refuses them
  constexpr std::int64_t kDefault = 4096;  // transformers' where the field is absent; null is none
  const bool none = in.has("sliding_window") && !in.take("sliding_window");
  const std::int64_t said = none ? 0 : in.integer_or("sliding_window", kDefault);
  std::int64_t window = 0, full = 0;  // layers below `full` see everything
  if (family == Family::mistral) {
    window = said;
  } else {
    window = in.boolean_or("use_sliding_window", false) ? said : 0;
    full = in.integer_or("max_window_layers", 28);
  }
  if (!none && said < 1) in.fail("sliding_window", fmt::format("is {}; expected at least 1, or null", said));
  if (const json* types = family == Family::mistral ? nullptr : in.take("layer_types")) {
    std::int64_t sliding = 0;
    if (!types->is_array() || static_cast<std::int64_t>(types->size()) != layers) {
      in.fail("layer_types", fmt::format("is not a list of {} kinds, one a layer", layers));
    }
    for (const json& type : *types) {
      if (type != "full_attention" && type != "sliding_attention") {
        in.fail("layer_types", fmt::format("holds {}; supported are \"full_attention\" and \"sliding_attention\"",
                                           type.dump(-1, ' ', true).substr(0, 80)));
      }
      sliding += type == "sliding_attention";
    }
    if (sliding > 0 && window == 0) in.fail("layer_types", "has \"sliding_attention\", and no window is in use");
    if (sliding > 0 && sliding < layers) {
      in.fail("layer_types", "mixes full and sliding attention: supported is one window in all layers, or none");
    }
    m.sliding_window = sliding > 0 ? window : 0;
    return;
  }
  if (window > 0 && full > 0 && full < layers) {
    in.fail("max_window_layers",
            fmt::format("is {} of {} layers, so that only the later ones have a window: supported is one window in all "
                        "layers, or none",
                        full, layers));
  }
  m.sliding_window = full < layers ? window : 0;
}

void read_heads(Fields& in, const FamilyName& family, model::ModelConfig& m) {
  m.num_attention_heads = in.integer("num_attention_heads");
  const bool said = in.has("num_key_value_heads");
  if (!said && family.family != Family::llama) {
    in.fail("num_key_value_heads",
            fmt::format("is missing, and {} has a default of its own for it", family.model_type));
  }
  m.num_key_value_heads = in.integer_or("num_key_value_heads", m.num_attention_heads);
  if (m.num_attention_heads < 1 || m.num_key_value_heads < 1)
    in.fail("num_attention_heads", "and num_key_value_heads must be at least 1");
  m.head_dim = in.integer_or("head_dim", family.family == Family::qwen3 ? 128 : 0);
  if (m.head_dim < 0) in.fail("head_dim", fmt::format("is {}; expected an even number", m.head_dim));
  m.qk_norm = family.family == Family::qwen3;
  const bool bias = in.boolean_or("attention_bias", false);
  m.attention_bias = family.family == Family::qwen2 || bias;  // Qwen2's is not a field
  if (bias && family.family == Family::mistral) in.fail("attention_bias", "is true, which Mistral does not have");
}

}  // namespace

HuggingFaceConfig parse_huggingface_config(const std::string& text, const std::string& where) {
  const json object = parse_strict_json(text, 8, where);
  Fields in(object, where);
  const FamilyName family = read_family(in);
  HuggingFaceConfig out;
  model::ModelConfig& m = out.model;
  m.vocab_size = in.integer("vocab_size");
  m.hidden_size = in.integer("hidden_size");
  m.intermediate_size = in.integer("intermediate_size");
  m.num_hidden_layers = in.integer("num_hidden_layers");
  out.max_position_embeddings = in.integer_or("max_position_embeddings", 2048);
  if (out.max_position_embeddings < 1) in.fail("max_position_embeddings", "must be at least 1");
  read_heads(in, family, m);
  m.rms_norm_eps = in.number_or("rms_norm_eps", 1e-6);
  m.tie_word_embeddings = in.boolean_or("tie_word_embeddings", false);
  read_rope(in, out, where);
  in.only("partial_rotary_factor", 1.0, "only whole heads are rotated here");
  read_window(in, family.family, m);
  if (const std::string act = in.text_or("hidden_act", "silu"); act != "silu" && act != "swish") {
    in.fail("hidden_act", fmt::format("is {}; supported is \"silu\"", quote_name(act)));
  }
  in.only("mlp_bias", false, "the MLP has no biases here");
  out.tokenizer = in.text_or("annulus_tokenizer", "none");
  if (out.tokenizer != "none" && out.tokenizer != "bytes") in.fail("annulus_tokenizer", "is neither none nor bytes");
  in.finish();
  try {
    m.resolve();
    m.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("{}: {}", where, error.what()));
  }
  return out;
}

}  // namespace annulus::checkpoint
