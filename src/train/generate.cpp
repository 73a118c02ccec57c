#include "train/generate.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/tokenizer.h"
#include "train/generator.h"
#include "train/session.h"
#include "train/state.h"

namespace annulus::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPrefillRows = 256;  // enough for the products' speed; windows keep as many rows to spare

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

std::vector<std::int32_t> parse_tokens(const std::string& list, std::int64_t vocab_size) {
  std::vector<std::int32_t> tokens;
  const char *at = list.data(), *const end = at + list.size();
  while (true) {
    std::int64_t token = 0;
    const auto [next, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (next != end && *next != ',')) {
      throw UsageError(fmt::format("--tokens {}: expected token ids with commas between, such as 1,2,3; \"{}\" is none",
                                   list, std::string(at, std::find(at, end, ','))));
    }
    if (token < 0 || token >= vocab_size) {
      throw UsageError(fmt::format("--tokens: {} is no token of this model; expected 0 to {}", token, vocab_size - 1));
    }
    tokens.push_back(static_cast<std::int32_t>(token));
    if (next == end) return tokens;
    at = next + 1;
  }
}

std::vector<std::int32_t> prompt_tokens(const GenerateOptions& options, const data::Tokenizer& tokenizer,
                                        std::int64_t vocab_size) {
  if (options.has_prompt == !options.tokens.empty()) {
    throw UsageError(options.has_prompt ? "--prompt and --tokens are two prompts; give one of them"
                                        : "no prompt; give --prompt TEXT, or --tokens 1,2,3");
  }
  if (!options.has_prompt) return parse_tokens(options.tokens, vocab_size);
  if (tokenizer.vocab_size() == 0) {
    throw UsageError("--prompt: this model was trained on token ids and has no tokenizer; give --tokens 1,2,3");
  }
  if (options.prompt.empty()) throw UsageError("--prompt is empty; give the text that is to be continued");
  std::vector<std::int32_t> tokens;
  if (const auto end = tokenizer.end_of_document()) tokens.push_back(*end);  // as every document in training
  for (const std::int32_t token : tokenizer.encode(options.prompt)) tokens.push_back(token);
  for (const std::int32_t token : tokens) {
    if (token >= vocab_size) throw UsageError(fmt::format("--prompt: token {} is beyond the vocabulary", token));
  }
  return tokens;
}

struct Generated {
  std::vector<std::int32_t> tokens;
  const char* stopped = "max_new";
  double prefill_seconds = 0, decode_seconds = 0;
  std::int64_t steps = 0;  // single tokens that the model took
};

// `emit` sees every token as it comes.
Generated generate(Generator& generator, Sampler& sampler, std::span<const std::int32_t> prompt, std::int64_t max_new,
                   std::optional<std::int32_t> end, const std::function<void(std::int32_t)>& emit) {
  Generated out;
  out.tokens.reserve(static_cast<std::size_t>(std::min(max_new, generator.capacity() + 1)));
  auto begin = Clock::now();
  TensorView logits = generator.append(prompt);
  out.prefill_seconds = seconds_since(begin);
  begin = Clock::now();
  while (true) {
    const std::int32_t token = sampler(logits, static_cast<std::int64_t>(out.tokens.size()));
    out.tokens.push_back(token);
    emit(token);
    if (end && token == *end) {
      out.stopped = "end_of_document";
      break;
    }
    if (static_cast<std::int64_t>(out.tokens.size()) == max_new) break;
    if (generator.length() == generator.capacity()) {
      out.stopped = "context";
      break;
    }
    logits = generator.append({&token, 1});
    ++out.steps;
  }
  out.decode_seconds = seconds_since(begin);
  return out;
}

void print_json(const Generated& g, const data::Tokenizer& tokenizer, std::int64_t prompt, std::int64_t cache_bytes) {
  nlohmann::ordered_json out;
  const auto rate = [](std::int64_t tokens, double seconds) {
    return tokens > 0 && seconds > 0 ? nlohmann::ordered_json(static_cast<double>(tokens) / seconds) : nullptr;
  };
  out["tokens"] = g.tokens;
  out["text"] = tokenizer.vocab_size() > 0 ? nlohmann::ordered_json(tokenizer.decode(g.tokens)) : nullptr;
  out["stopped"] = g.stopped;
  out["prompt_tokens"] = prompt;
  out["prefill_tokens_per_second"] = rate(prompt, g.prefill_seconds);
  out["decode_tokens_per_second"] = rate(g.steps, g.decode_seconds);
  out["cache_bytes"] = cache_bytes;
  // A character that was cut, or bytes that are none, become U+FFFD: JSON is UTF-8.
  fmt::print("{}\n", out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace

int run_generation(const GenerateOptions& options, parallel::MpiRuntime& runtime) {
  auto& world = runtime.world();
  if (world.size() > 1) {
    throw UsageError(
        fmt::format("generate runs as one process; this is a job of {} ranks. Start it without mpirun", world.size()));
  }
  set_threads(runtime);
  const auto checkpoint = open_model(world, options.model);
  RunConfig config = config_of(checkpoint, options.model);
  if (!has_recipe(config)) config.data.sources = {{options.model}};  // a config names some
  const std::int64_t vocab_size = config.model.vocab_size;
  const auto tokenizer = data::make_tokenizer(config.data.tokenizer);
  const std::vector<std::int32_t> prompt = prompt_tokens(options, *tokenizer, vocab_size);
  Sampler sampler(options.sampling, vocab_size);
  const auto length = static_cast<std::int64_t>(prompt.size());
  const std::int64_t context = options.sequence_length > 0 ? options.sequence_length : config.train.sequence_length;
  if (length > context) {
    throw UsageError(fmt::format("the prompt has {} tokens and the context {}; shorten it, or give --sequence-length{}",
                                 length, context, options.sequence_length > 0 ? "" : " (it is the training length)"));
  }

  config.train.precision = config.train.precision == "fp64" ? "fp64" : "fp32";
  config.train.sequence_length = 1;  // the engine holds the weights; sequences lie in the generator
  config.train.micro_batch = config.train.global_batch = 1;
  config.checkpoint.resume = "none";
  config.parallel.device = "cpu";
  config.parallel.sequence = config.parallel.data = 1;
  config.resolve_and_validate(1);
  Session session(config, runtime, /*training=*/false);
  check_tensors(checkpoint, session.engine());
  session.take_memory();
  std::vector<std::string> notes;
  restore(checkpoint, session.engine(), notes);

  Generator generator(session.engine(), std::min(context, length + options.max_new - 1), kPrefillRows);
  const bool live = isatty(STDOUT_FILENO) != 0;
  const bool has_text = tokenizer->vocab_size() > 0;
  const Generated result =
      generate(generator, sampler, prompt, options.max_new, tokenizer->end_of_document(), [&](std::int32_t token) {
        if (options.json) return;
        fmt::print("{}", has_text ? tokenizer->decode({&token, 1}) : fmt::format("{} ", token));
        if (live) std::fflush(stdout);
      });
  if (options.json) {
    print_json(result, *tokenizer, length, generator.cache_bytes());
    return 0;
  }
  fmt::print("\n");
  std::fflush(stdout);
  fmt::print(stderr, "annulus: {} tokens of prompt at {:.1f} a second", length,
             static_cast<double>(length) / result.prefill_seconds);
  if (result.steps > 0) {
    fmt::print(stderr, ", then {:.1f} a second", static_cast<double>(result.steps) / result.decode_seconds);
  }
  fmt::print(stderr, "; cache {:.2f} MiB\n", static_cast<double>(generator.cache_bytes()) / (1 << 20));
  if (std::string_view(result.stopped) == "context") {
    fmt::print(stderr, "annulus: stopped: the context of {} tokens is full; --sequence-length takes more\n", context);
  }
  return 0;
}

}  // namespace annulus::train
