#include "train/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <utility>

#include "train/session.h"
#include "train/state.h"

namespace annulus::train {
namespace {

std::size_t bucket_of(std::int64_t context) {  // 1 -> 0, 2 -> 1, 3 and 4 -> 2, …
  std::size_t bucket = 0;
  while ((std::int64_t{1} << bucket) < context) ++bucket;
  return bucket;
}

void all_reduce_sum(parallel::Communicator& world, std::span<double> values) {
  Context host;
  world.wait(host, world.all_reduce(host, host_view(values.data(), {static_cast<std::int64_t>(values.size())}),
                                    parallel::ReduceOp::sum));
}

}  // namespace

double Evaluation::perplexity() const { return std::exp(loss()); }

double Evaluation::bits_per_byte() const {
  return bytes > 0 ? loss_sum / (std::numbers::ln2 * static_cast<double>(bytes)) : -1;
}

Evaluation evaluate(Engine& engine, const data::ScoringData& documents, std::int64_t max_tokens,
                    AttentionWatch* watch) {
  const auto& options = engine.options();
  const std::int64_t length = options.sequence_length, batch = options.batch, local = engine.layout().local_tokens();
  auto& mesh = engine.mesh();
  const std::int64_t replicas = mesh.size("data"), own = mesh.coordinate("data");
  const int rank = mesh.coordinate("sequence");

  std::int64_t num_windows = 0, planned = 0;
  const auto& windows = documents.windows();
  while (num_windows < static_cast<std::int64_t>(windows.size()) && (max_tokens == 0 || planned < max_tokens)) {
    const auto& w = windows[static_cast<std::size_t>(num_windows++)];
    planned += w.length - w.score_from;
  }
  constexpr std::size_t kBuckets = 40;
  std::vector<double> sums(3 * kBuckets, 0.0);  // losses, targets, correct ones by bucket
  const auto size = static_cast<std::size_t>(batch * length);
  std::vector<std::int32_t> tokens(size), targets(size), start(size, 0);
  for (std::int64_t from = own * batch; from < num_windows; from += replicas * batch) {
    std::fill(targets.begin(), targets.end(), -1);
    std::fill(tokens.begin(), tokens.end(), 0);
    const std::int64_t count = std::min(batch, num_windows - from);
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(batch), 0);
    for (std::int64_t b = 0; b < count; ++b) {
      const auto at = static_cast<std::size_t>(b * length);
      lengths[static_cast<std::size_t>(b)] = windows[static_cast<std::size_t>(from + b)].length;
      documents.read(windows[static_cast<std::size_t>(from + b)],
                     {tokens.data() + at, static_cast<std::size_t>(length)},
                     {targets.data() + at, static_cast<std::size_t>(length)});
    }
    engine.load({tokens, targets, start});
    engine.context().at(Phase::evaluate);
    if (watch) watch->next_lengths(std::move(lengths));
    const auto losses = engine.losses();
    const auto correct = engine.correct();
    for (std::int64_t b = 0; b < count; ++b) {
      for (std::int64_t row = 0; row < local; ++row) {
        const std::int64_t t = engine.layout().global_index(rank, row);
        if (targets[static_cast<std::size_t>(b * length + t)] < 0) continue;
        const std::size_t bucket = bucket_of(t + 1);
        const auto at = static_cast<std::size_t>(b * local + row);
        sums[bucket] += losses[at];
        sums[kBuckets + bucket] += 1;
        sums[2 * kBuckets + bucket] += correct[at];
      }
    }
  }
  all_reduce_sum(mesh.world(), sums);

  Evaluation result;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    const PositionBucket bucket{std::int64_t{1} << i, sums[i], static_cast<std::int64_t>(sums[kBuckets + i]),
                                static_cast<std::int64_t>(sums[2 * kBuckets + i])};
    result.loss_sum += bucket.loss_sum;
    result.tokens += bucket.tokens;
    result.correct += bucket.correct;
    if (bucket.tokens > 0) result.by_position.push_back(bucket);
  }
  // With the byte tokenizer every scored target is a byte; else bytes are known for all documents together only.
  if (documents.num_bytes() > 0) {
    result.bytes = documents.num_targets() == documents.num_bytes() ? result.tokens
                   : result.tokens == documents.num_targets()       ? documents.num_bytes()
                                                                    : 0;
  }
  return result;
}

namespace {

std::string attention_json(const std::vector<NsaStatistics>& layers) {
  std::string out;
  for (const auto& s : layers) {
    out += fmt::format(
        "{}{{\"layer\":{},\"gate_compressed\":{:.6g},\"gate_selected\":{:.6g},\"gate_window\":{:.6g},\"blocks\":{:.6g},"
        "\"union_4\":{:.6g},\"union_8\":{:.6g}}}",
        out.empty() ? "" : ",", s.layer, s.gate[0], s.gate[1], s.gate[2], s.selected, s.union_4, s.union_8);
  }
  return fmt::format(",\"attention\":[{}]", out);
}

void print_attention(const std::vector<NsaStatistics>& layers) {
  fmt::print(
      "\nsparse layers: mean gates, and different blocks selected by 1, 4 and 8 neighbouring queries\n{:>6}  {:>10}  "
      "{:>8}  {:>6}  {:>7}  {:>7}  {:>7}\n",
      "layer", "compressed", "selected", "window", "1", "4", "8");
  for (const auto& s : layers) {
    fmt::print("{:>6}  {:>10.3f}  {:>8.3f}  {:>6.3f}  {:>7.2f}  {:>7.2f}  {:>7.2f}\n", s.layer, s.gate[0], s.gate[1],
               s.gate[2], s.selected, s.union_4, s.union_8);
  }
  if (layers.empty()) fmt::print("(this model has none)\n");
}

void print_result(const Evaluation& e, const std::vector<NsaStatistics>& layers, const EvaluateOptions& options,
                  std::int64_t window, std::int64_t stride) {
  auto optional = [](double x) { return x < 0 ? std::string("null") : fmt::format("{:.9g}", x); };
  if (options.json) {
    std::string buckets;
    for (const auto& b : e.by_position) {
      buckets += fmt::format("{}{{\"upto\":{},\"loss\":{:.9g},\"accuracy\":{:.9g},\"tokens\":{}}}",
                             buckets.empty() ? "" : ",", b.upto, b.loss(), b.accuracy(), b.tokens);
    }
    fmt::print(
        "{{\"loss\":{:.12g},\"perplexity\":{:.9g},\"bits_per_byte\":{},\"accuracy\":{:.9g},\"tokens\":{},"
        "\"window\":{},\"stride\":{},\"by_position\":[{}]{}}}\n",
        e.loss(), e.perplexity(), optional(e.bits_per_byte()), e.accuracy(), e.tokens, window, stride, buckets,
        (options.attention ? attention_json(layers) : "") +
            (options.without.empty() ? "" : fmt::format(",\"without\":[\"{}\"]", fmt::join(options.without, "\",\""))));
    return;
  }
  if (!options.without.empty()) fmt::print("without        {}\n", fmt::join(options.without, ", "));
  fmt::print("loss           {:.6f} nats per token\nperplexity     {:.4f}\n", e.loss(), e.perplexity());
  if (e.bytes > 0) fmt::print("bits per byte  {:.4f}\n", e.bits_per_byte());
  fmt::print("accuracy       {:.4f} of the targets have the greatest probability\n", e.accuracy());
  fmt::print("tokens scored  {}\nwindow {}, stride {}\n\n{:>10}  {:>8}  {:>8}  {:>10}\n", e.tokens, window, stride,
             "context <=", "loss", "accuracy", "tokens");
  for (const auto& b : e.by_position) {
    fmt::print("{:>10}  {:>8.4f}  {:>8.4f}  {:>10}\n", b.upto, b.loss(), b.accuracy(), b.tokens);
  }
  if (options.attention) print_attention(layers);
}

attention::Branch branch_named(const std::string& name) {
  if (name == "compressed") return attention::kCompressed;
  if (name == "selected") return attention::kSelected;
  if (name == "window") return attention::kWindow;
  throw ConfigError("--without " + name + ": expected compressed, selected or window");
}

}  // namespace

int run_evaluation(const EvaluateOptions& options, parallel::MpiRuntime& runtime) {
  set_threads(runtime);
  auto& world = runtime.world();
  const auto checkpoint = open_model(world, options.model);
  RunConfig config = config_of(checkpoint, options.model);
  if (!has_recipe(config)) {
    constexpr std::int64_t kLongestWindow = 4096;  // a model's own limit can be more than a host's memory
    config.train.sequence_length = std::min(config.train.sequence_length, kLongestWindow);
    config.data.sources = {{options.data.front()}};  // a config names some
  }
  if (options.sequence_length != 0) config.train.sequence_length = options.sequence_length;
  config.train.precision = !options.precision.empty()         ? options.precision
                           : config.train.precision == "fp64" ? "fp64"
                                                              : "fp32";
  config.checkpoint.resume = "none";
  config.parallel.device = "auto";  // not where it was trained
  // Ranks go where the run had them if they still fit; otherwise windows are shared out whole.
  if (config.parallel.sequence < 1 || world.size() % config.parallel.sequence != 0) config.parallel.sequence = 1;
  config.parallel.data = world.size() / config.parallel.sequence;
  // Short windows go together, up to 4,096 tokens.
  config.train.micro_batch =
      std::clamp<std::int64_t>(4096 / std::max<std::int64_t>(config.train.sequence_length, 1), 1, 32);
  config.train.global_batch = config.parallel.data * config.train.micro_batch;
  config.resolve_and_validate(world.size());

  const std::int64_t stride = options.stride == 0 ? config.train.sequence_length : options.stride;
  const data::ScoringData documents(options.data, config.data.tokenizer, config.model.vocab_size,
                                    config.train.sequence_length, stride);
  Session session(config, runtime, /*training=*/false);
  check_tensors(checkpoint, session.engine());
  session.take_memory();
  std::vector<std::string> notes;
  restore(checkpoint, session.engine(), notes);
  if (!options.without.empty() && !config.model.has_nsa()) {
    throw ConfigError(
        fmt::format("--without {}: the model has no sparse layer, so nothing to shut", options.without.front()));
  }
  for (const auto& branch : options.without) close_gate(session.engine(), branch_named(branch));
  std::optional<AttentionWatch> watch;
  if (options.attention) watch.emplace(session.engine());
  const Evaluation result = evaluate(session.engine(), documents, 0, watch ? &*watch : nullptr);
  const auto layers = watch ? watch->result() : std::vector<NsaStatistics>{};
  if (result.tokens == 0) throw DataError("the documents have no token to score; give longer ones");
  if (world.rank() == 0) print_result(result, layers, options, config.train.sequence_length, stride);
  return 0;
}

}  // namespace annulus::train
