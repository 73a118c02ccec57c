#include "train/config_fields.h"

#include <fmt/core.h>

#include <cmath>

namespace annulus::train {

namespace {

struct Entry {
  const char* name;
  Field::Value value;
  const char* meaning;
};

void append(std::vector<Field>& fields, const std::string& section, std::initializer_list<Entry> entries) {
  for (const Entry& entry : entries) fields.push_back({section + "." + entry.name, entry.value, entry.meaning});
}

void add_model(std::vector<Field>& fields, model::ModelConfig& m) {
  append(fields, "model",
         {{"vocab_size", &m.vocab_size, "Number of token ids. Tokenizer `bytes` needs 257."},
          {"hidden_size", &m.hidden_size, "Width of the residual stream."},
          {"intermediate_size", &m.intermediate_size, "Width inside the SwiGLU MLP."},
          {"num_hidden_layers", &m.num_hidden_layers, "Number of blocks."},
          {"num_attention_heads", &m.num_attention_heads, "Query heads."},
          {"num_key_value_heads", &m.num_key_value_heads,
           "Key/value heads, a divisor of the query heads (grouped-query attention). 0: as many as query heads."},
          {"head_dim", &m.head_dim, "Size of a head: even, at most 256. 0: hidden_size / num_attention_heads."},
          {"rms_norm_eps", &m.rms_norm_eps, "Added to the mean square in RMSNorm."},
          {"rope_theta", &m.rope_theta, "Base of the rotary frequencies."},
          {"tie_word_embeddings", &m.tie_word_embeddings, "Use the embedding as the output matrix too."},
          {"attention_bias", &m.attention_bias, "Biases on the q, k and v projections."},
          {"qk_norm", &m.qk_norm, "RMSNorm on queries and keys, per head (Qwen3)."},
          {"sliding_window", &m.sliding_window, "Dense layers see this many last tokens. 0: all."},
          {"attention", &m.attention,
           "Kind of every layer, `\"dense\"` or `\"nsa\"`, or a list that the layers repeat: layer i takes entry i mod "
           "its length."}});
  model::RopeScaling& s = m.rope_scaling;
  append(fields, "model.rope_scaling",
         {{"rope_type", &s.rope_type, "`default` (none), `linear`, `llama3` or `yarn`."},
          {"factor", &s.factor, "How much longer than the original length; at least 1."},
          {"low_freq_factor", &s.low_freq_factor, "llama3."},
          {"high_freq_factor", &s.high_freq_factor, "llama3."},
          {"original_max_position_embeddings", &s.original_max_position_embeddings,
           "llama3 and yarn: the length before scaling."},
          {"beta_fast", &s.beta_fast, "yarn."},
          {"beta_slow", &s.beta_slow, "yarn."},
          {"attention_factor", &s.attention_factor, "yarn: multiplies cos and sin. 0: 0.1·ln(factor) + 1."}});
  model::NsaConfig& n = m.nsa;
  append(fields, "model.nsa",
         {{"kv", &n.kv, "`per_branch`: each branch projects its own keys and values; `shared`: one pair."},
          {"compression", &n.compression, "`mlp`: the block's mean plus a learned correction; `mean`."},
          {"rope", &n.rope, "Rotate keys `after` or `before` compression."},
          {"block", &n.block, "Tokens per compression block; at most select_block."},
          {"stride", &n.stride, "Tokens between compression blocks; divides block and select_block."},
          {"hidden", &n.hidden, "Width inside the compression MLP. 0: head_dim."},
          {"select_block", &n.select_block, "Tokens per selection block, at most 4096."},
          {"select_count", &n.select_count, "Selected blocks per query, at most 1024, the forced ones among them."},
          {"init_blocks", &n.init_blocks, "Forced: first blocks of the document."},
          {"local_blocks", &n.local_blocks, "Forced: the query's own block and those before it."},
          {"window", &n.window, "Keys of the sliding-window branch, the query's own among them."}});
}

void add_run(std::vector<Field>& fields, RunConfig& c) {
  append(
      fields, "parallel",
      {{"sequence", &c.parallel.sequence, "Ranks that share a sequence (ring attention). 0: all that `data` leaves."},
       {"data", &c.parallel.data,
        "Replicas. 0: all ranks that `sequence` leaves; with both 0, sequence takes all ranks."},
       {"layout", &c.parallel.layout,
        "How a sequence is spread: `zigzag` (equal work for every rank) or `contiguous`."},
       {"device", &c.parallel.device, "`cpu`, `cuda`, or `auto`: cuda where the program and the machine have it."}});
  append(fields, "data",
         {{"sources", &c.data.sources,
           "Training files or folders (.txt, .jsonl, .bin): paths, or `{path = …, weight = …}` tables whose weights "
           "say how often a source is drawn."},
          {"validation", &c.data.validation, "Files or folders scored while training."},
          {"tokenizer", &c.data.tokenizer,
           "`bytes`: 256 bytes and an end-of-document token; `none`: the files hold token ids."}});
  append(fields, "train",
         {{"steps", &c.train.steps, "Optimiser steps of the whole run; a resumed run goes on to this."},
          {"global_batch", &c.train.global_batch,
           "Sequences per step, over all replicas; a multiple of data · micro_batch."},
          {"micro_batch", &c.train.micro_batch, "Sequences of a replica in one forward and backward."},
          {"sequence_length", &c.train.sequence_length,
           "Tokens per sequence; with P > 1 ranks per sequence a multiple of 2P, with sparse layers of 2P · "
           "select_block, and "
           "at least 2P · (window - 1)."},
          {"precision", &c.train.precision, "`fp32`, `bf16` (GPU only) or `fp64` (CPU only, for tests)."},
          {"recompute", &c.train.recompute,
           "What backward computes again to save memory: `none`, `keep_attention` (all but attention), `block` (all)."},
          {"deterministic", &c.train.deterministic, "Fixed orders of summation: same ranks, same bits."},
          {"seed", &c.train.seed, "Of weights and sample order; neither depends on the number of ranks."},
          {"watchdog_seconds", &c.train.watchdog_seconds,
           "A rank without progress for this long ends the job with exit code 6. 0: off."}});
  append(fields, "optimizer",
         {{"type", &c.optimizer.type, "`adamw`."},
          {"lr", &c.optimizer.lr, "Peak learning rate."},
          {"beta1", &c.optimizer.beta1, "Decay of the first moment."},
          {"beta2", &c.optimizer.beta2, "Decay of the second."},
          {"eps", &c.optimizer.eps, "Added to the root of the second moment."},
          {"weight_decay", &c.optimizer.weight_decay, "Decoupled; on tensors of two dimensions or more."},
          {"grad_clip", &c.optimizer.grad_clip, "Largest global gradient norm. 0: no clipping."}});
  append(fields, "schedule",
         {{"type", &c.schedule.type, "`cosine`, `linear`, `constant` or `wsd` (constant, then decay)."},
          {"warmup_steps", &c.schedule.warmup_steps, "Steps of linear warm-up."},
          {"min_ratio", &c.schedule.min_ratio, "The last learning rate as a share of the peak."},
          {"decay_steps", &c.schedule.decay_steps, "wsd: how many last steps decay."}});
  append(
      fields, "checkpoint",
      {{"dir", &c.checkpoint.dir, "The run's folder: checkpoints, metrics.jsonl and the resolved config.toml."},
       {"every", &c.checkpoint.every, "Steps between checkpoints. 0: only at the end."},
       {"keep", &c.checkpoint.keep, "Newest checkpoints kept, at least 2."},
       {"resume", &c.checkpoint.resume, "`auto` (the newest of dir that verifies), `none`, or a checkpoint's path."},
       {"init_from", &c.checkpoint.init_from,
        "A checkpoint, run folder or HuggingFace folder whose weights a new run starts with; empty: random weights."}});
  append(fields, "log",
         {{"every", &c.log.every, "Steps per progress line and metrics record."},
          {"bar", &c.log.bar, "A live bar where stdout is a terminal."},
          {"peak_tflops", &c.log.peak_tflops, "What MFU divides by, per rank. 0: measured at start."}});
  append(fields, "eval",
         {{"every", &c.eval.every, "Steps between scorings of data.validation. 0: only at the end, if there is any."},
          {"tokens", &c.eval.tokens, "Score at most this many tokens. 0: all."}});
}

struct Expected {
  std::string operator()(bool*) const { return "true or false"; }
  std::string operator()(int*) const { return "an integer"; }
  std::string operator()(std::int64_t*) const { return "an integer"; }
  std::string operator()(double*) const { return "a number"; }
  std::string operator()(std::string*) const { return "a string"; }
  std::string operator()(std::vector<std::string>*) const { return "a list of strings"; }
  std::string operator()(std::vector<data::SourceConfig>*) const {
    return "a list of paths or {path = \"…\", weight = 1.0} tables";
  }
  std::string operator()(std::vector<model::AttentionKind>*) const { return "\"dense\", \"nsa\" or a list of these"; }
};

template <class T, class Format>
std::string toml_list(const std::vector<T>& values, Format format) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) text += (i == 0 ? "" : ", ") + format(values[i]);
  return text + "]";
}

std::string toml_number(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x < 0 ? "-inf" : "inf";
  const std::string text = fmt::format("{}", x);  // shortest that reads back equal
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

struct ToToml {
  std::string operator()(const bool* x) const { return *x ? "true" : "false"; }
  std::string operator()(const int* x) const { return fmt::format("{}", *x); }
  std::string operator()(const std::int64_t* x) const { return fmt::format("{}", *x); }
  std::string operator()(const double* x) const { return toml_number(*x); }
  std::string operator()(const std::string* x) const { return toml_string(*x); }
  std::string operator()(const std::vector<std::string>* x) const { return toml_list(*x, toml_string); }
  std::string operator()(const std::vector<data::SourceConfig>* x) const {
    return toml_list(*x, [](const data::SourceConfig& s) {
      return fmt::format("{{path = {}, weight = {}}}", toml_string(s.path), toml_number(s.weight));
    });
  }
  std::string operator()(const std::vector<model::AttentionKind>* x) const {
    const auto one = [](model::AttentionKind kind) { return toml_string(kAttentionNames[static_cast<int>(kind)]); };
    return x->size() == 1 ? one(x->front()) : toml_list(*x, one);
  }
};

}  // namespace

std::string Field::expected() const { return std::visit(Expected{}, value); }
std::string Field::value_toml() const { return std::visit(ToToml{}, value); }

std::vector<Field> config_fields(RunConfig& config) {
  std::vector<Field> fields;
  add_model(fields, config.model);
  add_run(fields, config);
  return fields;
}

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04X}", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

namespace {

template <class Wanted>
std::string write_fields(const RunConfig& config, const Wanted& wanted) {
  RunConfig copy = config;
  std::string text, section;
  for (const Field& field : config_fields(copy)) {
    if (!wanted(field)) continue;
    if (field.section() != section) {
      text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", field.section());
      section = field.section();
    }
    text += fmt::format("{} = {}\n", field.name(), field.value_toml());
  }
  return text;
}

}  // namespace

std::string to_toml(const RunConfig& config) {
  return write_fields(config, [](const Field&) { return true; });
}

std::string without_recipe(const RunConfig& config) {
  return write_fields(config, [](const Field& f) {
    return f.key.starts_with("model.") || f.key == "data.tokenizer" || f.key == "train.sequence_length" ||
           f.key == "train.precision";
  });
}

std::string config_docs() {
  RunConfig defaults;
  std::string section;
  std::string text =
      "# Configuration keys\n\n"
      "Written by `annulus config-docs` from the table in src/train/config_fields.cpp; a test compares the two.\n"
      "A run is one TOML file; `--set section.key=value` overrides it.  Architecture keys have HuggingFace's names.\n";
  for (const Field& field : config_fields(defaults)) {
    if (field.section() != section) {
      section = field.section();
      text += fmt::format("\n## [{}]\n| key | value | default | meaning |\n|---|---|---|---|\n", section);
    }
    text += fmt::format("| {} | {} | `{}` | {} |\n", field.name(), field.expected(), field.value_toml(), field.meaning);
  }
  return text;
}

std::vector<std::string> model_differences(RunConfig before, RunConfig now) {
  const auto old_fields = config_fields(before), fields = config_fields(now);
  std::vector<std::string> out;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (!fields[i].key.starts_with("model.")) continue;
    const std::string was = old_fields[i].value_toml(), is = fields[i].value_toml();
    if (was != is) out.push_back(fmt::format("{} was {} and is {}", fields[i].key, was, is));
  }
  return out;
}

}  // namespace annulus::train
