// Dense attention and its gradients through the ring on GPUs, a rank each, against naive code in fp64; also with one
// rank that is late.
// Skipped where there is no GPU for every rank; with one rank it is attention on one GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "attention/attention.h"
#include "attention/cuda/bands.h"
#include "core/cuda/device.h"
#include "core/rng.h"
#include "parallel/device_communicator.h"
#include "support/require_gpus.h"

namespace annulus::testing {
namespace {

struct Problem {
  BandSize size;
  DType dtype;
  BandLimits limits;
  std::vector<double> q, k, v, d_out;
};

std::vector<double> draw(std::int64_t n, DType dtype, const char* stream) {
  const CounterRng rng(3, stream);
  std::vector<double> out(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto x = static_cast<float>(rng.normal(i));
    out[i] = dtype == DType::bf16 ? to_float(to_bfloat16(x)) : x;
  }
  return out;
}

Problem make_problem(DType dtype, BandKind kind) {
  constexpr std::int64_t kTokens = 120;  // fits 1 to 6 ranks
  const BandSize size{2, kTokens, kTokens, 4, 2, 64};
  return {size,
          dtype,
          make_limits(kind, size),
          draw(size.q_numel(), dtype, "q"),
          draw(size.k_numel(), dtype, "k"),
          draw(size.k_numel(), dtype, "v"),
          draw(size.q_numel(), dtype, "d_out")};
}

struct Result {  // of this rank's rows
  std::vector<double> out, lse, d_q, d_kv;
  bool operator==(const Result&) const = default;
};

void late(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(40)); }

class Ring {
 public:
  Ring(const Problem& p, parallel::LayoutKind kind, parallel::Communicator& world)
      : p_(p),
        layout_(kind, p.size.queries, world.size()),
        device_(make_compute_device(DeviceKind::cuda, runtime().local_rank())),
        mesh_(world, {{"data", 1}, {"sequence", world.size()}}, parallel::device_communicators(device_)),
        ctx_(make_device_context(device_)),
        tensors_("tensors", DeviceKind::cuda, device_.allocator),
        scratch_("scratch", DeviceKind::cuda, device_.allocator) {
    ctx_.scratch = &scratch_;
    sequence_.layout = &layout_;
    sequence_.mesh = &mesh_;
    sequence_.batch = p.size.batch;
    sequence_.hops = attention::needed_hops(layout_, p.limits.first, p.size.batch);
    lay_out();
    ctx_.planning = true;
    attend();
    ctx_.planning = false;
    tensors_.commit();
    scratch_.commit();
    lay_out();
    upload();
  }

  Result run(bool delayed) {
    const auto poison = [&](const TensorView& x) {
      ANNULUS_CUDA_TRY(cudaMemsetAsync(x.data, 0xff, static_cast<std::size_t>(x.bytes()), ctx_.cuda->stream));
    };
    poison(args_.out);
    poison(args_.lse);
    poison(backward_.d_q);
    poison(backward_.d_kv);
    poison({scratch_base(), DType::u8, DeviceKind::cuda, {scratch_.planned_bytes()}});
    if (delayed) ANNULUS_CUDA_TRY(cudaLaunchHostFunc(ctx_.cuda->stream, late, nullptr));
    attend();
    return {download(args_.out), download(args_.lse), download(backward_.d_q), download(backward_.d_kv)};
  }

  // The entries of a [B, S, heads, D] tensor that this rank's rows hold, in its order.
  std::vector<double> own_rows(const std::vector<double>& x, std::int64_t width) const {
    std::vector<double> out;
    for (std::int64_t b = 0; b < p_.size.batch; ++b) {
      for (std::int64_t r = 0; r < layout_.local_tokens(); ++r) {
        const auto from = x.begin() + (b * layout_.tokens() + token(r)) * width;
        out.insert(out.end(), from, from + width);
      }
    }
    return out;
  }
  std::vector<double> own_lse(const std::vector<double>& x) const {  // [B, Hq, S]
    std::vector<double> out;
    for (std::int64_t row = 0; row < p_.size.batch * p_.size.query_heads; ++row) {
      for (std::int64_t r = 0; r < layout_.local_tokens(); ++r) {
        out.push_back(x[static_cast<std::size_t>(row * layout_.tokens() + token(r))]);
      }
    }
    return out;
  }

 private:
  void attend() {
    attention::dense_forward(ctx_, sequence_, args_);
    backward_.q = args_.q, backward_.kv = args_.kv, backward_.out = args_.out, backward_.lse = args_.lse;
    attention::dense_backward(ctx_, sequence_, backward_);
  }
  std::int64_t token(std::int64_t row) const { return layout_.global_index(mesh_.coordinate("sequence"), row); }
  void* scratch_base() {
    const Arena::Scope scope(scratch_);
    return scratch_.allocate("base", DType::u8, {scratch_.planned_bytes()}).data;
  }

  void lay_out() {
    const BandSize& s = p_.size;
    const std::int64_t rows = layout_.local_tokens();
    args_.q = tensors_.allocate("q", p_.dtype, {s.batch, rows, s.query_heads, s.depth});
    args_.kv = tensors_.allocate("kv", p_.dtype, {2, s.batch, rows, s.kv_heads, s.depth});
    args_.out = tensors_.allocate("out", p_.dtype, {s.batch, rows, s.query_heads, s.depth});
    args_.lse = tensors_.allocate("lse", DType::f32, {s.batch, s.query_heads, rows});
    backward_.d_out = tensors_.allocate("d_out", p_.dtype, args_.out.shape);
    backward_.d_q = tensors_.allocate("d_q", DType::f32, args_.q.shape);
    backward_.d_kv = tensors_.allocate("d_kv", DType::f32, args_.kv.shape);
    sequence_.global_first = tensors_.allocate("first", DType::i32, {s.batch, rows});
    sequence_.global_last = tensors_.allocate("last", DType::i32, {s.batch, rows});
  }

  void upload() {
    put(args_.q, own_rows(p_.q, p_.size.query_heads * p_.size.depth));
    put(args_.kv[0], own_rows(p_.k, p_.size.kv_heads * p_.size.depth));
    put(args_.kv[1], own_rows(p_.v, p_.size.kv_heads * p_.size.depth));
    put(backward_.d_out, own_rows(p_.d_out, p_.size.query_heads * p_.size.depth));
    put(sequence_.global_first, own_rows({p_.limits.first.begin(), p_.limits.first.end()}, 1));
    put(sequence_.global_last, own_rows({p_.limits.last.begin(), p_.limits.last.end()}, 1));
  }

  void put(const TensorView& to, const std::vector<double>& values) {
    const auto send = [&](auto convert) {
      std::vector<decltype(convert(0.0))> typed;
      for (const double x : values) typed.push_back(convert(x));
      copy(ctx_, host_view(typed.data(), to.shape), to);
      synchronize(ctx_);
    };
    if (to.dtype == DType::i32) send([](double x) { return static_cast<std::int32_t>(x); });
    else if (to.dtype == DType::bf16) send([](double x) { return to_bfloat16(static_cast<float>(x)); });
    else send([](double x) { return static_cast<float>(x); });
  }

  std::vector<double> download(const TensorView& from) {
    std::vector<double> out;
    const auto take = [&](auto zero, auto convert) {
      std::vector<decltype(zero)> typed(static_cast<std::size_t>(from.numel()));
      copy(ctx_, from, host_view(typed.data(), from.shape));
      synchronize(ctx_);
      for (const auto x : typed) out.push_back(convert(x));
    };
    if (from.dtype == DType::bf16) take(BFloat16{}, [](BFloat16 x) { return double{to_float(x)}; });
    else take(0.0f, [](float x) { return double{x}; });
    return out;
  }

  const Problem& p_;
  parallel::SequenceLayout layout_;
  ComputeDevice device_;
  parallel::Mesh mesh_;
  Context ctx_;
  Arena tensors_, scratch_;
  attention::SequenceBatch sequence_;
  attention::DenseForward args_;
  attention::DenseBackward backward_;
};

// Error of a finished output: of fp32 arithmetic, at most twice the naive one's, and of the rounding to its type.
void expect_near(const std::vector<double>& ours, const std::vector<double>& truth, double naive, DType dtype,
                 const char* what) {
  ASSERT_EQ(ours.size(), truth.size());
  const double fp32 = 2 * naive + 0x1p-24 * max_magnitude(truth), rounding = dtype == DType::bf16 ? 0x1p-8 : 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ASSERT_LE(std::abs(ours[i] - truth[i]), fp32 + rounding * (std::abs(truth[i]) + fp32)) << what << " " << i;
  }
}

template <class R>
reference::BandOutput<R> naive_gradients(const Problem& p) {
  const auto as_real = [](const std::vector<double>& x) { return std::vector<R>(x.begin(), x.end()); };
  return reference::band_attention<R>(
      {p.size, 0.125, as_real(p.q), as_real(p.k), as_real(p.v), as_real(p.d_out), p.limits.first, p.limits.last});
}

// In fp32: at most twice the naive error, and the rounding of what cancels in d_p − delta, two sums of D products (see
// band_backward_test.cpp). In bf16 the kernel's own tests and the oracle's cases say how near gradients are.
void expect_near_gradients(const Ring& ring, const Problem& p, const Result& result) {
  const auto truth = naive_gradients<double>(p);
  const auto plain = naive_gradients<float>(p);
  const double cancels = 0.125 * std::sqrt(static_cast<double>(p.size.depth)) * max_magnitude(p.d_out) *
                         max_magnitude(p.v) * std::max(max_magnitude(p.q), max_magnitude(p.k));
  const auto near = [](const std::vector<double>& ours, const std::vector<double>& exact, double naive,
                       double magnitude, const char* what) {
    ASSERT_EQ(ours.size(), exact.size());
    EXPECT_LE(max_error(ours, exact), 2 * naive + 3 * 0x1p-24 * std::max(max_magnitude(exact), magnitude)) << what;
  };
  const std::int64_t width = p.size.kv_heads * p.size.depth;
  near(result.d_q, ring.own_rows(truth.d_q, p.size.query_heads * p.size.depth), max_error(plain.d_q, truth.d_q),
       cancels, "d_q");
  const auto half = result.d_kv.begin() + static_cast<std::ptrdiff_t>(result.d_kv.size() / 2);
  near({result.d_kv.begin(), half}, ring.own_rows(truth.d_k, width), max_error(plain.d_k, truth.d_k), cancels, "d_k");
  near({half, result.d_kv.end()}, ring.own_rows(truth.d_v, width), max_error(plain.d_v, truth.d_v), 0, "d_v");
}

void check(DType dtype, BandKind kind, parallel::LayoutKind layout) {
  if (!has_gpu_per_rank()) GTEST_SKIP() << "no GPU for every rank";
  const Problem problem = make_problem(dtype, kind);
  const auto attention_in = [&](auto zero, const std::vector<std::int64_t>& cuts, Weights weights) {
    return naive_band<decltype(zero)>(problem.size, problem.limits, problem.q, problem.k, problem.v, 0.125, cuts,
                                      weights);
  };
  const std::int64_t tokens = problem.size.keys;
  const auto truth = attention_in(double{}, {tokens}, Weights::exact);
  const auto naive = attention_in(float{}, {tokens / 2, tokens}, weights_on_gpu(dtype, problem.size.depth));
  const double naive_o = max_error(naive.o, truth.o), naive_lse = max_error(naive.lse, truth.lse);

  const auto judge = [&](Ring& ring, const Result& result) {
    expect_near(result.out, ring.own_rows(truth.o, problem.size.query_heads * problem.size.depth), naive_o, dtype,
                "out");
    expect_near(result.lse, ring.own_lse(truth.lse), naive_lse, DType::f32, "lse");
    if (dtype == DType::f32) expect_near_gradients(ring, problem, result);
  };
  {
    Ring ring(problem, layout, runtime().world());
    const Result first = ring.run(false);
    judge(ring, first);
    for (int late_rank = 0; late_rank < runtime().world().size(); ++late_rank) {
      EXPECT_TRUE(ring.run(runtime().world().rank() == late_rank) == first)
          << "other bits when rank " << late_rank << " is late";
    }
  }
  const auto alone = parallel::make_self_communicator();
  Ring one(problem, layout, *alone);
  judge(one, one.run(false));
}

TEST(RingCuda, CausalFp32) { check(DType::f32, BandKind::causal, parallel::LayoutKind::zigzag); }
TEST(RingCuda, CausalBf16) { check(DType::bf16, BandKind::causal, parallel::LayoutKind::zigzag); }
TEST(RingCuda, DocumentsFp32) { check(DType::f32, BandKind::documents, parallel::LayoutKind::zigzag); }
TEST(RingCuda, DocumentsBf16) { check(DType::bf16, BandKind::documents, parallel::LayoutKind::zigzag); }
TEST(RingCuda, WindowContiguousFp32) { check(DType::f32, BandKind::window, parallel::LayoutKind::contiguous); }
TEST(RingCuda, WindowContiguousBf16) { check(DType::bf16, BandKind::window, parallel::LayoutKind::contiguous); }

}  // namespace
}  // namespace annulus::testing
