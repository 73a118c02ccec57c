// What a step costs: bytes on the wire, memory per rank, allocations; and that repeats and accumulation are exact.
#include <gtest/gtest.h>

#include "small_run.h"

namespace annulus::testing {

std::int64_t heap_bytes();  // heap_count_test.cpp

namespace {

struct Rig {
  explicit Rig(const SmallRun& run, int data = 1)
      : mesh(runtime().world(), {{"data", data}, {"sequence", runtime().world().size() / data}}),
        engine(make_compute_device(DeviceKind::cpu), mesh,
               {.model = run.model,
                .dtype = run.dtype,
                .layout = run.layout,
                .sequence_length = run.tokens,
                .batch = run.batch,
                .training = true,
                .recompute = run.recompute,
                .deterministic = true,
                .optimizer = {}}),
        batch(make_batch(run, 0, run.batch)) {
    engine.plan();
    engine.commit();
    engine.initialize(3);
  }
  void forward_backward(double scale) {
    engine.load({batch.tokens, batch.targets, batch.start});
    engine.forward_backward(scale);
  }
  parallel::Mesh mesh;
  train::Engine engine;
  HostBatch batch;
};

TEST(Engine, BytesSentPerLayerAreTheFormula) {
  SmallRun run{.model = small_model(), .documents = {}};
  for (const auto dtype : {DType::f64, DType::f32}) {
    run.dtype = dtype;
    Rig rig(run);
    const std::int64_t ranks = rig.mesh.size("sequence"), layers = run.model.num_hidden_layers;
    const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t kv =
        2 * run.batch * run.model.num_key_value_heads * run.model.head_dim * rig.engine.layout().local_tokens() * size;
    const auto before = rig.mesh.kv_ring().counters().shift;
    (void)rig.engine.losses();
    const auto forward = rig.mesh.kv_ring().counters().shift;
    EXPECT_EQ(forward - before, layers * kv * (ranks - 1));
    rig.engine.zero_gradients();
    rig.forward_backward(1);
    // Forward again, then backward: K, V once more, their gradients one hop further, home.
    EXPECT_EQ(rig.mesh.kv_ring().counters().shift - forward, 2 * layers * kv * (ranks - 1));
    EXPECT_EQ(rig.mesh.dkv_ring().counters().shift, ranks > 1 ? layers * kv * ranks : 0);
  }
}

// Halos of 2 chunks' edges in zigzag order, 1 in contiguous order, the ring of selected K, V, and compressed rows alone
// gathered: the formulas of spec/sequence_parallel.md.
TEST(Engine, BytesSentPerSparseLayerAreTheFormula) {
  SmallRun run{.model = small_nsa_model(), .tokens = 96, .documents = {}};
  const auto& nsa = run.model.nsa;
  for (const auto layout : {parallel::LayoutKind::zigzag, parallel::LayoutKind::contiguous}) {
    for (const auto dtype : {DType::f64, DType::f32}) {
      run.layout = layout;
      run.dtype = dtype;
      Rig rig(run);
      const std::int64_t ranks = rig.mesh.size("sequence"), layers = run.model.num_hidden_layers;
      const std::int64_t tokens = rig.engine.layout().local_tokens();
      const std::int64_t row = 2 * run.batch * run.model.num_key_value_heads * run.model.head_dim *
                               static_cast<std::int64_t>(size_of(dtype));  // of K and V, all sequences
      const std::int64_t messages = ranks == 1 ? 0 : layout == parallel::LayoutKind::zigzag ? 2 : 1;
      const std::int64_t halos = messages * row * (nsa.block - nsa.stride + nsa.window - 1);
      const std::int64_t ring = row * tokens * (ranks - 1), gathered = row * (tokens / nsa.stride) * (ranks - 1);
      const auto& kv_ring = rig.mesh.kv_ring().counters();
      const auto& axis = rig.mesh.device("sequence").counters();
      const std::int64_t shifted = kv_ring.shift, collected = axis.all_gather, scattered = axis.reduce_scatter;
      (void)rig.engine.losses();
      EXPECT_EQ(kv_ring.shift - shifted, layers * (halos + ring));
      EXPECT_EQ(axis.all_gather - collected, layers * gathered);
      rig.engine.zero_gradients();
      rig.forward_backward(1);
      // Forward again; backward fetches all of it once more and returns the halos' gradients by the way they came.
      EXPECT_EQ(kv_ring.shift - shifted, layers * (4 * halos + 3 * ring));
      EXPECT_EQ(axis.all_gather - collected, 3 * layers * gathered);
      EXPECT_EQ(axis.reduce_scatter - scattered, layers * gathered);
      EXPECT_EQ(rig.mesh.dkv_ring().counters().shift, ranks > 1 ? layers * row * tokens * ranks : 0);
    }
  }
}

// A window of 3 tokens is seen by neighbouring chunks alone: with 4 ranks in zigzag order hops 1 and 3 remain.
TEST(Engine, HopsThatNobodyNeedsAreNotSent) {
  SmallRun run{.model = small_model(), .documents = {}};
  run.model.sliding_window = 3;
  Rig rig(run);
  rig.engine.load({rig.batch.tokens, rig.batch.targets, rig.batch.start});
  const auto before = rig.mesh.kv_ring().counters().num_shifts;
  (void)rig.engine.losses();
  const std::int64_t needed[] = {0, 0, 1, 2, 2};
  EXPECT_EQ(rig.mesh.kv_ring().counters().num_shifts - before,
            needed[runtime().world().size()] * run.model.num_hidden_layers);
}

class EngineOf : public ::testing::TestWithParam<model::AttentionKind> {
 protected:
  static model::ModelConfig config() {
    return GetParam() == model::AttentionKind::nsa ? small_nsa_model() : small_model();
  }
};
INSTANTIATE_TEST_SUITE_P(Attention, EngineOf, ::testing::Values(model::AttentionKind::dense, model::AttentionKind::nsa),
                         [](const auto& i) { return i.param == model::AttentionKind::nsa ? "nsa" : "dense"; });

// What a step asks of the heap are handles and lists of hops, some kilobytes that do not grow with the sequence.
TEST_P(EngineOf, SteadyStepAllocatesNoTensor) {
  const auto bytes_per_step = [](std::int64_t tokens) {
    SmallRun run{.model = config(), .tokens = tokens, .documents = {}};
    Rig rig(run);
    std::int64_t commits = 0, bytes = 0;
    for (std::int64_t k = 1; k <= 6; ++k) {
      if (k == 3) {
        commits = Arena::num_commits();
        bytes = heap_bytes();
      }
      rig.engine.zero_gradients();
      rig.forward_backward(1e-3);
      (void)rig.engine.optimizer_step(1e-3, 1.0, k);
    }
    EXPECT_EQ(Arena::num_commits(), commits);
    return (heap_bytes() - bytes) / 4;
  };
  const std::int64_t growth = bytes_per_step(384) - bytes_per_step(96);  // of texts that hold numbers
  EXPECT_LT(growth, 4 * (384 - 96) / 4) << "as much as one number a token";
}

struct Planned {
  std::int64_t activations = 0, scratch = 0;
};

// Of a rank among so many, 64 tokens each.
Planned planned(const SmallRun& run, int ranks) {
  const auto mesh = parallel::Mesh::planned({{"data", 1}, {"sequence", ranks}});
  train::Engine engine(make_compute_device(DeviceKind::cpu), *mesh,
                       {.model = run.model,
                        .dtype = run.dtype,
                        .layout = run.layout,
                        .sequence_length = 64 * ranks,
                        .batch = 1,
                        .training = true,
                        .recompute = run.recompute,
                        .deterministic = true,
                        .optimizer = {}});
  engine.plan();
  Planned out;
  for (const Arena* arena : engine.arenas()) {
    if (arena->name() == "activations") out.activations = arena->planned_bytes();
    if (arena->name() == "scratch") out.scratch = arena->planned_bytes();
  }
  return out;
}

TEST(Engine, PlannedMemoryIsIndependentOfRanks) {
  const SmallRun run{.model = small_model(), .documents = {}};
  const Planned two = planned(run, 2), eight = planned(run, 8);
  EXPECT_EQ(two.activations, eight.activations);
  // P = 2 has one visiting buffer, P = 8 two.
  const std::int64_t visiting = 2 * 64 * run.model.num_key_value_heads * run.model.head_dim * 8;
  EXPECT_LE(eight.scratch - two.scratch, visiting + 256);
}

// Of the whole sequence a rank holds compressed rows alone: gathered keys and values, their gradients and the buffer of
// the collective, each 1/16 of the raw ones here.
TEST(Engine, PlannedMemoryOfSparseLayersGrowsByCompressedRowsAlone) {
  SmallRun run{.model = small_nsa_model(), .documents = {}};
  run.model.nsa.block = run.model.nsa.stride = run.model.nsa.select_block = 16;
  const Planned two = planned(run, 2), eight = planned(run, 8);
  EXPECT_EQ(two.activations, eight.activations);
  const std::int64_t raw = 2 * 64 * run.model.num_key_value_heads * run.model.head_dim * 8;  // of one rank's tokens
  const std::int64_t visiting = raw, compressed = raw / 16;
  EXPECT_LE(eight.scratch - two.scratch, visiting + 6 * 3 * compressed + 4 * 256);
}

TEST_P(EngineOf, RecomputationChangesMemoryAndNoBit) {
  SmallRun run{.model = config(), .dtype = DType::f32, .tokens = 96, .documents = {}};
  run.documents = {41, 55};
  const int ranks = runtime().world().size();
  const Whole kept = run_step(run, runtime().world(), 1, ranks);
  std::int64_t last = INT64_MAX;
  for (const auto policy : {model::Recompute::none, model::Recompute::keep_attention, model::Recompute::block}) {
    run.recompute = policy;
    EXPECT_EQ(run_step(run, runtime().world(), 1, ranks).gradients, kept.gradients);
    Rig rig(run);
    EXPECT_LT(rig.engine.planned_bytes(), last);
    last = rig.engine.planned_bytes();
  }
}

TEST_P(EngineOf, RepeatsGiveTheSameBits) {
  SmallRun run{.model = config(), .dtype = DType::f32, .tokens = 96, .documents = {}};
  const int ranks = runtime().world().size();
  const Whole first = run_step(run, runtime().world(), 1, ranks);
  for (int i = 0; i < 3; ++i) {
    const Whole again = run_step(run, runtime().world(), 1, ranks);
    EXPECT_EQ(again.gradients, first.gradients);
    EXPECT_EQ(again.weights, first.weights);
    EXPECT_EQ(again.loss_sum, first.loss_sum);
  }
}

// 2 micro-batches of one sequence give the gradient of one micro-batch of two, with unequal numbers of targets.
TEST(Engine, AccumulationEqualsOneBatch) {
  SmallRun run{.model = small_model(), .documents = {}};
  HostBatch both = make_batch(run, 0, 2);
  for (std::size_t i = 0; i < 30; ++i) both.targets[i] = -1;
  const auto n = static_cast<std::size_t>(run.tokens);
  const auto gradients = [&](std::int64_t batch) {
    run.batch = batch;
    Rig rig(run);
    rig.engine.zero_gradients();
    for (std::int64_t from = 0; from < 2; from += batch) {
      const std::size_t at = static_cast<std::size_t>(from) * n, size = static_cast<std::size_t>(batch) * n;
      rig.engine.load(
          {{both.tokens.data() + at, size}, {both.targets.data() + at, size}, {both.start.data() + at, size}});
      rig.engine.forward_backward(1.0 / 60);
    }
    return by_parameter(rig.engine, rig.engine.store().gradients());  // this rank's share of the sum
  };
  Whole names;
  {
    Rig rig(run);
    for (const auto& e : rig.engine.store().entries()) names.names.push_back(e.name);
  }
  const auto two = gradients(1), one = gradients(2);
  EXPECT_LE(worst(names, two, one, 1e-12, 1e-14 * norm_of(one)).first, 1);
}

// A gradient that is not finite refuses the step on every rank: no weight and no state changes.
TEST(Engine, NonFiniteStepIsRefused) {
  SmallRun run{.model = small_model(), .documents = {}};
  Rig rig(run);
  const auto before = by_parameter(rig.engine, rig.engine.store().values());
  rig.engine.zero_gradients();
  rig.forward_backward(runtime().world().rank() == runtime().world().size() - 1 ? NAN : 1e-3);
  EXPECT_FALSE(rig.engine.optimizer_step(1e-2, 1.0, 1).finite);
  EXPECT_EQ(by_parameter(rig.engine, rig.engine.store().values()), before);
  for (const auto& slot : rig.engine.optimizer().slots()) {
    for (std::int64_t i = 0; i < slot.state.numel(); ++i) ASSERT_EQ(slot.state.as<double>()[i], 0);
  }
}

}  // namespace
}  // namespace annulus::testing
