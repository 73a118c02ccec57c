#include "model/config.h"

#include <fmt/core.h>

#include <algorithm>

#include "core/config_check.h"

namespace annulus::model {

namespace {

// Positions, token ids and rows are int32 in the kernels.
constexpr std::int64_t kMaxSize = INT32_MAX;
constexpr std::int64_t kMaxHeadDim = 256;  // the largest of the kernels' buckets 64, 128, 256

std::string divisors_of(std::int64_t n) {
  std::string text;
  int listed = 0;
  for (std::int64_t d = 1; d <= n && listed < 16; ++d) {
    if (n % d != 0) continue;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", d);
    ++listed;
  }
  return text;
}

void validate_heads(const ModelConfig& c) {
  check_range("model.num_attention_heads", c.num_attention_heads, 1, 1 << 16);
  check_range("model.num_key_value_heads", c.num_key_value_heads, 1, 1 << 16);
  if (c.num_attention_heads % c.num_key_value_heads != 0) {
    fail_key("model.num_key_value_heads", fmt::format("{}", c.num_key_value_heads),
             fmt::format("a divisor of model.num_attention_heads = {}", c.num_attention_heads),
             fmt::format("these fit: {}", divisors_of(c.num_attention_heads)));
  }
  if (c.head_dim == 0) {  // resolve() could not derive it
    const std::int64_t below = c.hidden_size / c.num_attention_heads * c.num_attention_heads;
    fail_key("model.hidden_size", fmt::format("{}", c.hidden_size),
             fmt::format("a multiple of model.num_attention_heads = {}", c.num_attention_heads),
             fmt::format("{}{} would fit, or set model.head_dim", below > 0 ? fmt::format("{} or ", below) : "",
                         below + c.num_attention_heads));
  }
  check_range("model.head_dim", c.head_dim, 2, kMaxHeadDim);
  if (c.head_dim % 2 != 0) {
    fail_key("model.head_dim", fmt::format("{}", c.head_dim), "an even number, since RoPE rotates pairs",
             fmt::format("{} or {} would fit (0: hidden_size / num_attention_heads)", c.head_dim - 1, c.head_dim + 1));
  }
}

void validate_rope(const ModelConfig& c) {
  const RopeScaling& s = c.rope_scaling;
  check_range("model.rope_theta", c.rope_theta, 0, Low::open);
  check_choice("model.rope_scaling.rope_type", s.rope_type,
               std::vector<std::string>{"default", "linear", "llama3", "yarn"});
  check_range("model.rope_scaling.factor", s.factor, 1, Low::closed);
  check_range("model.rope_scaling.original_max_position_embeddings", s.original_max_position_embeddings, 0, kMaxSize);
  check_range("model.rope_scaling.low_freq_factor", s.low_freq_factor, 0, Low::open);
  check_range("model.rope_scaling.beta_slow", s.beta_slow, 0, Low::open);
  check_range("model.rope_scaling.attention_factor", s.attention_factor, 0, Low::closed);
  if (!(s.high_freq_factor > s.low_freq_factor)) {
    fail_key("model.rope_scaling.high_freq_factor", fmt::format("{}", s.high_freq_factor),
             fmt::format("more than low_freq_factor = {}", s.low_freq_factor));
  }
  if (!(s.beta_fast > s.beta_slow)) {
    fail_key("model.rope_scaling.beta_fast", fmt::format("{}", s.beta_fast),
             fmt::format("more than beta_slow = {}", s.beta_slow));
  }
  if ((s.rope_type == "llama3" || s.rope_type == "yarn") && s.original_max_position_embeddings == 0) {
    fail_key("model.rope_scaling.original_max_position_embeddings", "0",
             fmt::format("the length the model was trained with before scaling, since rope_type = \"{}\"", s.rope_type),
             "set it, for example to 8192");
  }
}

void check_divides(const char* key, std::int64_t value, const char* other, std::int64_t multiple) {
  if (multiple % value != 0) {
    fail_key(key, fmt::format("{}", value), fmt::format("a divisor of {} = {}", other, multiple),
             fmt::format("these fit: {}", divisors_of(multiple)));
  }
}

// Lists and tiles take memory by these, used or not; beyond them nothing is sparse any more.
constexpr std::int64_t kMaxSelectBlock = 4096, kMaxSelectCount = 1024;

void validate_nsa(const NsaConfig& n) {
  check_choice("model.nsa.kv", n.kv, std::vector<std::string>{"per_branch", "shared"});
  check_choice("model.nsa.compression", n.compression, std::vector<std::string>{"mlp", "mean"});
  check_choice("model.nsa.rope", n.rope, std::vector<std::string>{"after", "before"});
  check_range("model.nsa.block", n.block, 1, kMaxSize);
  check_range("model.nsa.stride", n.stride, 1, kMaxSize);
  check_range("model.nsa.hidden", n.hidden, 0, kMaxSize);
  check_range("model.nsa.select_block", n.select_block, 1, kMaxSelectBlock);
  check_range("model.nsa.select_count", n.select_count, 1, kMaxSelectCount);
  check_range("model.nsa.init_blocks", n.init_blocks, 0, kMaxSize);
  check_range("model.nsa.local_blocks", n.local_blocks, 1, kMaxSize);
  check_range("model.nsa.window", n.window, 1, kMaxSize);
  if (n.block > n.select_block) {
    fail_key("model.nsa.block", fmt::format("{}", n.block),
             fmt::format("at most model.nsa.select_block = {}", n.select_block),
             "shorten block or lengthen select_block");
  }
  check_divides("model.nsa.stride", n.stride, "model.nsa.block", n.block);
  check_divides("model.nsa.stride", n.stride, "model.nsa.select_block", n.select_block);
  if (n.select_count < n.init_blocks + n.local_blocks) {
    fail_key("model.nsa.select_count", fmt::format("{}", n.select_count),
             fmt::format("at least init_blocks + local_blocks = {}, which it contains", n.init_blocks + n.local_blocks),
             "raise it, or lower model.nsa.init_blocks or model.nsa.local_blocks");
  }
}

}  // namespace

attention::NsaShape NsaConfig::shape() const {
  return {.block = block,
          .stride = stride,
          .select_block = select_block,
          .select_count = select_count,
          .init_blocks = init_blocks,
          .local_blocks = local_blocks,
          .window = window};
}

void ModelConfig::resolve() {
  if (num_key_value_heads == 0) num_key_value_heads = num_attention_heads;
  if (head_dim == 0 && num_attention_heads > 0 && hidden_size % num_attention_heads == 0) {
    head_dim = hidden_size / num_attention_heads;
  }
  if (nsa.hidden == 0) nsa.hidden = head_dim;
}

void ModelConfig::validate() const {
  check_range("model.vocab_size", vocab_size, 1, kMaxSize);
  check_range("model.hidden_size", hidden_size, 1, kMaxSize);
  check_range("model.intermediate_size", intermediate_size, 1, kMaxSize);
  check_range("model.num_hidden_layers", num_hidden_layers, 1, 1 << 16);
  check_range("model.rms_norm_eps", rms_norm_eps, 0, Low::open, 1);
  check_range("model.sliding_window", sliding_window, 0, kMaxSize);
  validate_heads(*this);
  validate_rope(*this);
  validate_nsa(nsa);  // its defaults always pass, so that this judges what somebody wrote even if no layer is NSA
  if (attention.empty()) {
    fail_key("model.attention", "[]", "\"dense\", \"nsa\" or a list of these that the layers repeat");
  }
  if (static_cast<std::int64_t>(attention.size()) > num_hidden_layers) {
    fail_key("model.attention", fmt::format("a list of {} kinds", attention.size()),
             fmt::format("at most model.num_hidden_layers = {} of them", num_hidden_layers),
             "shorten the list: layer i takes entry i mod its length");
  }
}

bool ModelConfig::has_nsa() const {
  return std::find(attention.begin(), attention.end(), AttentionKind::nsa) != attention.end();
}

}  // namespace annulus::model
