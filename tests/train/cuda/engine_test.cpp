// Whole training steps on GPUs, a rank each, against the same steps on the CPU in fp64. Skipped where there is no GPU
// for every rank.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "core/cuda/device.h"
#include "parallel/device_communicator.h"
#include "support/require_gpu.h"
#include "train/mpi/small_run.h"

namespace annulus::testing {
namespace {

constexpr int kSteps = 3, kMicroBatches = 2;

struct Steps {
  std::vector<double> loss, norm;
  std::vector<double> evaluated;                        // this rank's losses after the steps, one per row
  std::vector<std::vector<double>> gradients, weights;  // by parameter, after the last step
  std::vector<std::string> names;
  bool operator==(const Steps&) const = default;
};

void late(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

std::vector<std::vector<double>> to_host(train::Engine& engine, const TensorView& flat) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(flat.bytes()));
  const TensorView host{bytes.data(), flat.dtype, DeviceKind::cpu, flat.shape};
  copy(engine.context(), flat, host);
  synchronize(engine.context());
  std::vector<float> wide;
  if (flat.dtype != DType::bf16) return by_parameter(engine, host);
  for (std::int64_t i = 0; i < flat.numel(); ++i) wide.push_back(to_float(host.as<BFloat16>()[i]));
  return by_parameter(engine, host_view(wide.data(), flat.shape));
}

SmallRun small_run(DType dtype, model::Recompute recompute = model::Recompute::none) {
  SmallRun run;
  run.model = small_model(2);
  run.model.qk_norm = true;
  run.model.attention_bias = true;
  run.model.tie_word_embeddings = false;
  run.dtype = dtype;
  run.recompute = recompute;
  run.tokens = 96;
  run.batch = 2 * kMicroBatches;
  run.documents = {1, 40, 5, 50};
  return run;
}

// Every micro-batch is half of the run's sequences. `delayed`: the GPU stands still before each.
Steps take_steps(const SmallRun& run, DeviceKind kind, parallel::Communicator& world, bool delayed = false) {
  const ComputeDevice device = make_compute_device(kind, kind == DeviceKind::cuda ? runtime().local_rank() : 0);
  parallel::Mesh mesh(world, {{"data", 1}, {"sequence", world.size()}}, parallel::device_communicators(device));
  train::EngineOptions options{.model = run.model,
                               .dtype = run.dtype,
                               .sequence_length = run.tokens,
                               .batch = run.batch / kMicroBatches,
                               .recompute = run.recompute,
                               .optimizer = {}};
  options.optimizer.eps = 1e-3;  // a smooth step: Adam's sign-like response to round-off is not what is compared
  train::Engine engine(device, mesh, options);
  engine.plan();
  engine.commit();
  engine.initialize(3);
  Steps out;
  for (int step = 1; step <= kSteps; ++step) {
    engine.zero_gradients();
    for (int i = 0; i < kMicroBatches; ++i) {
      if (delayed) ANNULUS_CUDA_TRY(cudaLaunchHostFunc(device.cuda->stream, late, nullptr));
      const HostBatch batch = make_batch(run, i * options.batch, options.batch);
      engine.load({batch.tokens, batch.targets, batch.start});
      engine.forward_backward(0.01);
    }
    const auto result = engine.optimizer_step(1e-2, 1.0, step);
    EXPECT_TRUE(result.finite);
    out.loss.push_back(result.loss_sum);
    out.norm.push_back(result.grad_norm);
  }
  const auto losses = engine.losses();
  out.evaluated.assign(losses.begin(), losses.end());
  auto& store = engine.store();
  store.shards().gather_parameters(engine.context(), mesh.device_world(), store.gradients());
  out.gradients = to_host(engine, store.gradients());
  out.weights = to_host(engine, store.values());
  for (const auto& e : store.entries()) out.names.push_back(e.name);
  return out;
}

// Of a rank's rows of the two sequences of the last micro-batch.
double sum_of_squares(const std::vector<double>& losses, parallel::Communicator& world) {
  double sum = 0;
  for (const double x : losses) sum += x * x;
  Context host;
  world.wait(host, world.all_reduce(host, host_view(&sum, {1}), parallel::ReduceOp::sum));
  return sum;
}

// fp32 against fp64 on the CPU: relative to a tensor's largest element, with a floor of u of the global norm for
// gradients that are mathematically zero. The CPU's own fp32 is off by up to 1.4e-6.
void expect_near(const Steps& gpu, const Steps& truth) {
  constexpr double kTolerance = 1e-5;
  for (std::size_t i = 0; i < truth.loss.size(); ++i) {
    EXPECT_NEAR(gpu.loss[i], truth.loss[i], kTolerance * truth.loss[i]) << "step " << i + 1;
    EXPECT_NEAR(gpu.norm[i], truth.norm[i], kTolerance * truth.norm[i]) << "step " << i + 1;
  }
  Whole names;
  names.names = truth.names;
  const double floor = 0x1p-24 * norm_of(truth.gradients);
  const auto gradient = worst(names, gpu.gradients, truth.gradients, kTolerance, floor);
  EXPECT_LE(gradient.first, 1) << "gradient of " << gradient.second;
  // A step turns an error e of a gradient into at most lr/eps · e of a weight.
  const auto weight = worst(names, gpu.weights, truth.weights, kTolerance, 10 * floor);
  EXPECT_LE(weight.first, 1) << "weight " << weight.second;
  const auto alone = parallel::make_self_communicator();
  const double expected = sum_of_squares(truth.evaluated, *alone);
  EXPECT_NEAR(sum_of_squares(gpu.evaluated, runtime().world()), expected, 2 * kTolerance * expected) << "evaluated";
}

class EngineCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device_count(DeviceKind::cuda) < runtime().local_size()) GTEST_SKIP() << "no GPU for every rank";
  }
};

TEST_F(EngineCuda, Fp32StepsAreNearTheCpusInFp64) {
  const auto alone = parallel::make_self_communicator();
  for (const auto recompute : {model::Recompute::none, model::Recompute::keep_attention, model::Recompute::block}) {
    SCOPED_TRACE(static_cast<int>(recompute));
    expect_near(take_steps(small_run(DType::f32, recompute), DeviceKind::cuda, runtime().world()),
                take_steps(small_run(DType::f64, recompute), DeviceKind::cpu, *alone));
  }
}

TEST_F(EngineCuda, TheSameBitsAgain) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const SmallRun run = small_run(dtype);
    const Steps once = take_steps(run, DeviceKind::cuda, runtime().world());
    EXPECT_TRUE(once == take_steps(run, DeviceKind::cuda, runtime().world())) << name_of(dtype);
    EXPECT_LT(once.loss.back(), once.loss.front());
  }
}

// The host stages the next micro-batch while the GPU has not yet copied the one before.
TEST_F(EngineCuda, ALateGpuGetsEveryMicroBatch) {
  const SmallRun run = small_run(DType::bf16);
  EXPECT_TRUE(take_steps(run, DeviceKind::cuda, runtime().world(), true) ==
              take_steps(run, DeviceKind::cuda, runtime().world()));
}

}  // namespace
}  // namespace annulus::testing
