// `annulus bench` on a GPU: the dense attention kernels in bf16, timed by the device itself.
#include <algorithm>
#include <cmath>

#include "attention/band.h"
#include "core/rng.h"
#include "ops/ops.h"
#include "train/bench_run.h"

namespace annulus::train {
namespace {

struct AttentionCase {
  std::int64_t heads, kv_heads, dim, tokens;
  std::int64_t window = 0;    // tokens that a query sees; 0: all before it
  std::int64_t document = 0;  // longest of the packed documents; 0: one
};

constexpr std::int64_t k4k = 4096;
constexpr AttentionCase kCases[] = {
    {32, 8, 128, k4k},     {32, 8, 128, 2 * k4k},       {32, 8, 128, 4 * k4k},
    {32, 8, 128, 8 * k4k}, {32, 8, 128, 16 * k4k},      {32, 8, 128, 32 * k4k},
    {64, 8, 128, k4k},     {64, 8, 128, 2 * k4k},       {64, 8, 128, 4 * k4k},
    {64, 8, 128, 8 * k4k}, {64, 8, 128, 16 * k4k},      {64, 8, 128, 32 * k4k},
    {32, 8, 64, 2 * k4k},  {32, 8, 64, 8 * k4k},        {32, 32, 128, 8 * k4k},
    {32, 1, 128, 8 * k4k}, {32, 8, 128, 16 * k4k, k4k}, {32, 8, 128, 16 * k4k, 0, 2 * k4k},
};

// First and last key of every query.
void set_bounds(const AttentionCase& c, std::vector<std::int32_t>& first, std::vector<std::int32_t>& last) {
  const CounterRng rng(3, "bench documents");
  std::int64_t begin = 0, end = c.document > 0 ? 0 : c.tokens;
  for (std::int64_t t = 0, document = 0; t < c.tokens; ++t) {
    if (t == end) {  // from a quarter of the longest up
      begin = t;
      end += c.document / 4 + static_cast<std::int64_t>(rng.bits(static_cast<std::uint64_t>(document++)) %
                                                        static_cast<std::uint64_t>(c.document * 3 / 4));
    }
    first.push_back(static_cast<std::int32_t>(c.window > 0 ? std::max(begin, t - c.window + 1) : begin));
    last.push_back(static_cast<std::int32_t>(t));
  }
}

// FLOPs of a forward call: 2·S²·D·Hq under the causal triangle; for other bands of the tiles of 128 x 128 that hold a
// visible pair.
double forward_flops(const AttentionCase& c, const std::vector<std::int32_t>& first) {
  const double s = static_cast<double>(c.tokens), per_pair = static_cast<double>(c.dim * c.heads);
  if (c.window == 0 && c.document == 0) return 2 * s * s * per_pair;
  double tiles = 0;
  for (std::int64_t t = 0; t < c.tokens; t += 128) {
    tiles += static_cast<double>(t / 128 - first[static_cast<std::size_t>(t)] / 128 + 1);
  }
  return 4 * 128 * 128 * tiles * per_pair;
}

std::string band_name(const AttentionCase& c) {
  return c.window > 0 ? fmt::format("window {}", c.window) : c.document > 0 ? "documents 2-8k" : "causal";
}

}  // namespace

double BenchRun::device_ms(const std::function<void()>& call) {
  constexpr int kWarm = 3, kMost = 60;
  std::vector<double> ms;
  double total = 0;
  for (int i = 0; i < kWarm + kMost && (i < kWarm + 5 || total < 500); ++i) {
    Fence begin, end;
    begin.set(ctx_);
    call();
    end.set(ctx_);
    end.wait();
    if (i < kWarm) continue;
    ms.push_back(end.milliseconds_since(begin));
    total += ms.back();
  }
  std::nth_element(ms.begin(), ms.begin() + static_cast<std::ptrdiff_t>(ms.size() / 2), ms.end());
  return ms[ms.size() / 2];
}

// Random normal in bf16: a block of values over and over, of a length that shares no factor with a row's.
void BenchRun::fill_random(const TensorView& t) {
  const std::int64_t block = std::min<std::int64_t>(t.numel(), 4194301);
  std::vector<BFloat16> values(static_cast<std::size_t>(block));
  const CounterRng rng(1, "bench");
#pragma omp parallel for
  for (std::int64_t i = 0; i < block; ++i) {
    values[static_cast<std::size_t>(i)] = to_bfloat16(static_cast<float>(rng.normal(static_cast<std::uint64_t>(i))));
  }
  for (std::int64_t at = 0; at < t.numel(); at += block) {
    const std::int64_t n = std::min(block, t.numel() - at);
    copy(ctx_, {values.data(), DType::bf16, DeviceKind::cpu, {n}},
         {static_cast<BFloat16*>(t.data) + at, DType::bf16, t.device, {n}});
    synchronize(ctx_);
  }
}

void BenchRun::gpu_attention() {
  for (const AttentionCase& c : kCases) {
    const std::string shape = fmt::format("{}/{} D {} S {} {}", c.heads, c.kv_heads, c.dim, c.tokens, band_name(c));
    const auto runs = [&](const char* name) { return wanted(fmt::format("{} {}", name, shape)); };
    if (!runs("attention_forward") && !runs("attention_backward") && !runs("attention_backward_unordered")) continue;
    Arena arena("attention", ctx_.device, device_.allocator);
    TensorView q, k, v, first, last, o, lse, out, d_o, delta, d_q, d_k, d_v;
    for (int pass = 0; pass < 2; ++pass) {
      const Shape rows{1, c.tokens, c.heads, c.dim}, kv{1, c.tokens, c.kv_heads, c.dim};
      for (TensorView* t : {&q, &out, &d_o}) *t = arena.allocate("rows", DType::bf16, rows);
      for (TensorView* t : {&k, &v}) *t = arena.allocate("keys", DType::bf16, kv);
      for (TensorView* t : {&o, &d_q}) *t = arena.allocate("sums", DType::f32, rows);
      for (TensorView* t : {&d_k, &d_v}) *t = arena.allocate("sums", DType::f32, kv);
      for (TensorView* t : {&lse, &delta}) *t = arena.allocate("statistics", DType::f32, {1, c.heads, c.tokens});
      for (TensorView* t : {&first, &last}) *t = arena.allocate("bounds", DType::i32, {1, c.tokens});
      if (pass == 0) arena.commit();
    }
    for (const TensorView& t : {q, k, v, d_o}) fill_random(t);
    std::vector<std::int32_t> first_keys, last_keys;
    set_bounds(c, first_keys, last_keys);
    copy(ctx_, {first_keys.data(), DType::i32, DeviceKind::cpu, {1, c.tokens}}, first);
    copy(ctx_, {last_keys.data(), DType::i32, DeviceKind::cpu, {1, c.tokens}}, last);
    const double flops = forward_flops(c, first_keys), scale = 1 / std::sqrt(static_cast<double>(c.dim));
    const auto add = [&](const char* name, double times, const std::function<void()>& call) {
      results_.push_back({name, shape, device_ms(call), times * flops, 0, {}});
    };
    const auto forward = [&] {
      attention::band_forward(ctx_, {.q = q,
                                     .k = k,
                                     .v = v,
                                     .first = first,
                                     .last = last,
                                     .o = o,
                                     .lse = lse,
                                     .has_state = false,
                                     .out = out,
                                     .scale = scale});
    };
    const auto backward = [&](bool ordered) {  // gradients from zero, as the first use of a layer's step
      for (const TensorView& t : {d_q, d_k, d_v}) ops::fill(ctx_, {.y = t});
      attention::band_delta(ctx_, {.d_o = d_o, .o = out, .delta = delta});
      attention::band_backward(ctx_, {.q = q,
                                      .k = k,
                                      .v = v,
                                      .first = first,
                                      .last = last,
                                      .d_o = d_o,
                                      .lse = lse,
                                      .delta = delta,
                                      .d_q = d_q,
                                      .d_k = d_k,
                                      .d_v = d_v,
                                      .scale = scale,
                                      .ordered = ordered});
    };
    forward();
    if (runs("attention_forward")) add("attention_forward", 1, forward);
    if (runs("attention_backward")) add("attention_backward", 2.5, [&] { backward(true); });
    if (runs("attention_backward_unordered")) {
      add("attention_backward_unordered", 2.5, [&] { backward(false); });
    }
  }
}

}  // namespace annulus::train
