#include "train/plan.h"

#include <algorithm>

#include "train/peak.h"
#include "train/session.h"

namespace annulus::train {
namespace {

// What a plan assumes of a device. GPU figures: an H200 and NVLink as measured by the project (docs/performance.md).
struct Assumed {
  std::string name;
  double flops;            // reached in a training step
  double attention_flops;  // reached by attention
  double link;             // bytes/s one way between ring neighbours
};

Assumed assumed(const RunConfig& config) {
  if (config.parallel.device == "cuda")
    return {"H200: 989 TFLOP/s peak, 50% reached; 250 GB/s a link", 0.5 * 989e12, 500e12, 250e9};
  Context ctx;
  const double peak = measured_peak_flops(ctx, DType::f32, cpu_allocator());
  return {
      fmt::format("this machine's cores: {:.0f} GFLOP/s matrix peak per rank, 50% reached; 4 GB/s a link", peak * 1e-9),
      0.5 * peak, 0.5 * peak, 4e9};
}

double mib(double bytes) { return bytes / (1 << 20); }

}  // namespace

int run_plan(const RunConfig& config, int ranks) {
  const bool gpu = config.parallel.device == "cuda";
  ComputeDevice device;  // no device is touched: the arenas only count
  device.kind = gpu ? DeviceKind::cuda : DeviceKind::cpu;
  const auto mesh = parallel::Mesh::planned({{"data", config.parallel.data}, {"sequence", config.parallel.sequence}});
  const EngineOptions options = engine_options(config, /*training=*/true);
  Engine engine(device, *mesh, options);
  engine.plan();

  const auto& m = config.model;
  const double tokens = static_cast<double>(config.train.global_batch * config.train.sequence_length);
  const double step_flops =
      static_cast<double>(config.train.global_batch) * engine.model().training_flops(config.train.sequence_length);
  fmt::print("{} parameters; {} ranks ({}): data {} x sequence {}, {}; {}\n", engine.model().num_parameters(), ranks,
             config.parallel.device, config.parallel.data, config.parallel.sequence, config.parallel.layout,
             config.train.precision);
  fmt::print("{} tokens per step in {} micro-batches per replica; {} tokens of a sequence per rank\n\n", tokens,
             config.train.global_batch / (config.parallel.data * config.train.micro_batch),
             engine.layout().local_tokens());

  fmt::print("memory per rank\n");
  for (const Arena* arena : engine.arenas()) {
    fmt::print("  {:<12} {:>12.1f} MiB\n", arena->name(), mib(static_cast<double>(arena->planned_bytes())));
  }
  fmt::print("  {:<12} {:>12.1f} MiB\n\n", "total", mib(static_cast<double>(engine.planned_bytes())));

  const Assumed a = assumed(config);
  const int sequence = config.parallel.sequence;
  const bool has_dense =
      std::find(m.attention.begin(), m.attention.end(), model::AttentionKind::dense) != m.attention.end();
  if (sequence > 1 && has_dense) {
    const double local = static_cast<double>(options.batch * engine.layout().local_tokens());
    const double kv = 2 * local * static_cast<double>(m.num_key_value_heads * m.head_dim) *
                      static_cast<double>(size_of(options.dtype));
    const double pairs = static_cast<double>(options.batch) * static_cast<double>(config.train.sequence_length) *
                         static_cast<double>(config.train.sequence_length) / 2 /
                         (static_cast<double>(sequence) * sequence);
    const double hop_seconds = 4 * pairs * static_cast<double>(m.num_attention_heads * m.head_dim) / a.attention_flops;
    fmt::print(
        "ring, a full causal dense layer: {} hops of {:.2f} MiB forward; a hop computes {:.3f} ms and sends for {:.3f} "
        "ms: {}\n\n",
        sequence - 1, mib(kv), 1e3 * hop_seconds, 1e3 * kv / a.link,
        kv / a.link <= hop_seconds ? "hidden"
                                   : "NOT hidden; longer sequences or fewer ranks per sequence would hide it");
  }
  if (sequence > 1 && m.has_nsa()) {
    const double row = 2 * static_cast<double>(options.batch * m.num_key_value_heads * m.head_dim) *
                       static_cast<double>(size_of(options.dtype));
    const double local = static_cast<double>(engine.layout().local_tokens());
    fmt::print(
        "an NSA layer forward, sent by a rank: {:.2f} MiB of compressed K, V to all others, {} hops of {:.2f} MiB of "
        "K, V "
        "for the selection, {:.2f} MiB of rows beside chunks\n\n",
        mib(row * local / static_cast<double>(m.nsa.stride)), sequence - 1, mib(row * local),
        mib(row * 2 * static_cast<double>(m.nsa.window - 1 + m.nsa.block - m.nsa.stride)));
  }
  const double seconds = step_flops / (a.flops * ranks);
  fmt::print("time, assuming {}:\n  {:.3g} TFLOP per step, {:.3g} s, {:.4g} tokens/s; {} steps in {:.3g} h\n", a.name,
             step_flops * 1e-12, seconds, tokens / seconds, config.train.steps,
             seconds * static_cast<double>(config.train.steps) / 3600);
  return 0;
}

}  // namespace annulus::train
