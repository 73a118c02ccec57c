// The cases of `annulus bench`; those of attention are in bench_attention.cpp.
#include "train/bench_run.h"

#include <algorithm>
#include <chrono>

#include "core/rng.h"
#include "train/peak.h"
#include "train/session.h"

namespace annulus::train {
namespace {

using Clock = std::chrono::steady_clock;

bool on_gpu(const BenchOptions& options) {
  return options.device == "cuda" || (options.device == "auto" && device_count(DeviceKind::cuda) > 0);
}

}  // namespace

BenchRun::BenchRun(const BenchOptions& options, parallel::MpiRuntime& runtime)
    : options_(options),
      runtime_(runtime),
      device_(make_compute_device(on_gpu(options) ? DeviceKind::cuda : DeviceKind::cpu, runtime.local_rank())),
      ctx_(make_device_context(device_)),
      scratch_("bench scratch", device_.kind, device_.allocator) {
  ctx_.scratch = &scratch_;
  if (device_.kind == DeviceKind::cpu) ctx_.progress = parallel::mpi_progress;
}

double BenchRun::time(const std::function<void()>& call) {
  call();
  std::vector<double> seconds;
  double total = 0;
  auto& world = runtime_.world();
  while (true) {
    world.barrier();
    const auto begin = Clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    total += seconds.back();
    std::int64_t more = seconds.size() < 3 || (total < 0.5 && seconds.size() < 200);
    world.wait(ctx_, world.all_reduce(ctx_, host_view(&more, {1}), parallel::ReduceOp::max));
    if (!more) break;
  }
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
  return seconds[seconds.size() / 2];
}

TensorView BenchRun::random(Arena& arena, const Shape& shape) {
  const TensorView t = arena.allocate("bench", DType::f32, shape);
  if (!t.data) return t;
  const CounterRng rng(1, "bench");
  float* x = t.as<float>();
#pragma omp parallel for
  for (std::int64_t i = 0; i < t.numel(); ++i) x[i] = static_cast<float>(rng.normal(static_cast<std::uint64_t>(i)));
  return t;
}

void BenchRun::ceilings() {
  const bool gpu = device_.kind == DeviceKind::cuda;
  peak_flops_ = measured_peak_flops(ctx_, gpu ? DType::bf16 : DType::f32, device_.allocator);
  Arena arena("copy", device_.kind, device_.allocator);
  TensorView from, to;
  for (int pass = 0; pass < 2; ++pass) {
    for (TensorView* t : {&from, &to}) {
      *t = gpu ? arena.allocate("bench", DType::f32, {std::int64_t{512} << 20})
               : random(arena, {std::int64_t{48} << 20});
    }
    if (pass == 0) arena.commit();
  }
  const auto run = [&] { ops::cast(ctx_, {.x = from, .y = to}); };
  bandwidth_ = 2.0 * static_cast<double>(from.bytes()) / (gpu ? 1e-3 * device_ms(run) : time(run));
}

void BenchRun::kernels() {
  constexpr std::int64_t kRows = 1024, kHidden = 768, kInner = 2048, kVocab = 50304, kChunk = 320;
  Arena arena("kernels", DeviceKind::cpu);
  TensorView x, y, z, inner[5], w_inner, w_hidden, rstd, d_w, logits, target, losses, adam[4], factor;
  const auto allocate = [&] {
    x = random(arena, {kRows, kHidden});
    y = random(arena, {kRows, kHidden});
    z = random(arena, {kRows, kHidden});
    for (auto& t : inner) t = random(arena, {kRows, kInner});
    w_inner = random(arena, {kInner, kHidden});
    w_hidden = random(arena, {kHidden});
    rstd = random(arena, {kRows});
    d_w = random(arena, {kHidden});
    logits = random(arena, {kChunk, kVocab});
    target = arena.allocate("target", DType::i32, {kChunk});
    losses = random(arena, {kChunk});
    for (auto& t : adam) t = random(arena, {std::int64_t{16} << 20});
    factor = arena.allocate("factor", DType::f64, {1});
  };
  allocate();
  arena.commit();
  allocate();
  factor.as<double>()[0] = 1;
  ops::fill(ctx_, {.y = adam[2], .value = 1});
  scratch_.allocate("workspaces", DType::u8, {std::int64_t{64} << 20});
  if (!scratch_.committed()) scratch_.commit();

  const auto gemm = [](double m, double n, double k) { return 2 * m * n * k; };
  const auto bytes_of = [](const TensorView& t, double times) { return times * static_cast<double>(t.bytes()); };
  measure("matmul", "x·Wᵀ 1024x768x2048", gemm(kRows, kInner, kHidden), 0,
          [&] { ops::matmul(ctx_, {.a = x, .b = w_inner, .c = inner[0], .transpose_b = true}); });
  measure("matmul_dx", "dy·W 1024x2048x768", gemm(kRows, kHidden, kInner), 0,
          [&] { ops::matmul(ctx_, {.a = inner[1], .b = w_inner, .c = y}); });
  measure("matmul_dw", "dyᵀ·x 2048x1024x768", gemm(kInner, kHidden, kRows), 0, [&] {
    ops::matmul(ctx_, {.a = inner[1], .b = x, .c = w_inner, .transpose_a = true, .mode = ops::GradMode::accumulate});
  });
  measure("rms_norm_forward", "1024x768", 0, bytes_of(x, 2),
          [&] { ops::rms_norm_forward(ctx_, {.x = x, .w = w_hidden, .y = y, .rstd = rstd}); });
  measure("rms_norm_backward", "1024x768", 0, bytes_of(x, 3),
          [&] { ops::rms_norm_backward(ctx_, {.d_y = y, .x = x, .w = w_hidden, .rstd = rstd, .d_x = z, .d_w = d_w}); });
  measure("swiglu_forward", "1024x2048", 0, bytes_of(inner[0], 3),
          [&] { ops::swiglu_forward(ctx_, {.gate = inner[0], .up = inner[1], .y = inner[2]}); });
  measure("swiglu_backward", "1024x2048", 0, bytes_of(inner[0], 5), [&] {
    ops::swiglu_backward(ctx_,
                         {.d_y = inner[2], .gate = inner[0], .up = inner[1], .d_gate = inner[3], .d_up = inner[4]});
  });
  measure("cross_entropy", "320x50304", 0, bytes_of(logits, 3),
          [&] { ops::cross_entropy(ctx_, {.logits = logits, .target = target, .loss = losses}); });
  measure("adamw", "16 Mi", 0, bytes_of(adam[0], 7), [&] {
    ops::adamw(ctx_, {.param = adam[0],
                      .master = {},
                      .m = adam[1],
                      .v = adam[2],
                      .grad = adam[3],
                      .clip_factor = factor,
                      .lr = 1e-4});
  });
}

void BenchRun::training_step(const std::string& name, const model::ModelConfig& model, std::int64_t tokens) {
  if (!wanted(name)) return;
  const int ranks = runtime_.world().size();
  RunConfig config;
  config.model = model;
  config.parallel.device = "cpu";
  config.parallel.data = 1;
  config.parallel.sequence = ranks;
  config.train.sequence_length = tokens;
  config.train.global_batch = 1;
  config.data.sources = {{"-", 1}};
  config.resolve_and_validate(ranks);
  Session session(config, runtime_, /*training=*/true);
  session.take_memory();
  auto& engine = session.engine();
  engine.initialize(0);
  std::vector<std::int32_t> token(static_cast<std::size_t>(tokens)), target(token.size()), start(token.size(), 0);
  const CounterRng rng(2, "bench tokens");
  for (std::size_t i = 0; i < token.size(); ++i) {
    token[i] = static_cast<std::int32_t>(rng.bits(i) % static_cast<std::uint64_t>(model.vocab_size));
    if (i > 0) target[i - 1] = token[i];
  }
  std::int64_t k = 0;
  const double seconds = time([&] {
    engine.zero_gradients();
    engine.load({token, target, start});
    engine.forward_backward(1 / static_cast<double>(tokens));
    (void)engine.optimizer_step(1e-4, 1.0, ++k);
  });
  const double flops = engine.model().training_flops(tokens) / ranks;
  results_.push_back({name,
                      fmt::format("{:.0f} M parameters, S {}, ranks {}",
                                  static_cast<double>(engine.model().num_parameters()) * 1e-6, tokens, ranks),
                      1e3 * seconds, flops, 0,
                      fmt::format("\"tokens_per_second\":{:.1f},\"mfu\":{:.4f},\"planned_mib\":{:.1f}",
                                  static_cast<double>(tokens) / seconds, flops / seconds / peak_flops_,
                                  static_cast<double>(engine.planned_bytes()) / (1 << 20))});
}

void BenchRun::print() const {
  if (runtime_.world().rank() != 0) return;
  if (options_.json) {
    std::string cases;
    for (const auto& r : results_) {
      const double rate = (r.flops > 0 ? r.flops : r.bytes) / (1e-3 * r.ms);
      cases += fmt::format("{}{{\"name\":\"{}\",\"shape\":\"{}\",\"ms\":{:.4f},\"{}\":{:.5g},\"fraction\":{:.4f}{}{}}}",
                           cases.empty() ? "" : ",", r.name, r.shape, r.ms, r.flops > 0 ? "tflops" : "gbps",
                           rate * (r.flops > 0 ? 1e-12 : 1e-9), rate / (r.flops > 0 ? peak_flops_ : bandwidth_),
                           r.extra.empty() ? "" : ",", r.extra);
    }
    fmt::print("{{\"peak_tflops\":{:.5g},\"copy_gbps\":{:.5g},\"ranks\":{},\"cases\":[{}]}}\n", peak_flops_ * 1e-12,
               bandwidth_ * 1e-9, runtime_.world().size(), cases);
    return;
  }
  fmt::print(
      "ceilings per rank: matrix product {:.1f} GFLOP/s, copy {:.1f} GB/s (read + write)\n\n{:<24} {:<44} {:>10} "
      "{:>16} {:>8}\n",
      peak_flops_ * 1e-9, bandwidth_ * 1e-9, "case", "shape", "ms", "per rank", "ceiling");
  for (const auto& r : results_) {
    const double rate = (r.flops > 0 ? r.flops : r.bytes) / (1e-3 * r.ms);
    fmt::print("{:<24} {:<44} {:>10.3f} {:>10.1f} {} {:>7.1f}%\n", r.name, r.shape, r.ms, rate * 1e-9,
               r.flops > 0 ? "GFLOP/s" : "GB/s   ", 100 * rate / (r.flops > 0 ? peak_flops_ : bandwidth_));
  }
}

namespace {

model::ModelConfig gpt2_like() {
  model::ModelConfig m;
  m.vocab_size = 50304;
  m.hidden_size = 768;
  m.intermediate_size = 2048;
  m.num_hidden_layers = 12;
  m.num_attention_heads = 12;
  return m;
}

}  // namespace

int run_bench(const BenchOptions& options, parallel::MpiRuntime& runtime) {
  set_threads(runtime);
  BenchRun bench(options, runtime);
  bench.ceilings();
  if (on_gpu(options)) {
    bench.gpu_attention();
    bench.print();
    return 0;
  }
  bench.kernels();
  bench.attention(4096, 12, 12, 64);
  bench.attention(4096, 12, 3, 64);
  bench.attention(4096, 8, 2, 128);
  bench.attention(65536, 1, 1, 64, "_64k");
  for (const std::int64_t tokens : {4096, 8192, 16384, 32768, 65536, 131072}) {
    const std::string length = fmt::format("{}k", tokens / 1024);
    if (tokens <= 32768) bench.attention(tokens, 8, 1, 64, "_nsa_" + length);  // the dense twin
    bench.nsa(tokens, 8, 1, 64, length + "_");
  }
  bench.training_step("train_step", gpt2_like(), 1024);
  model::ModelConfig small = gpt2_like();
  small.num_hidden_layers = 2;
  small.vocab_size = 257;
  bench.training_step("train_step_ring", small, 4096);
  bench.print();
  return 0;
}

}  // namespace annulus::train
