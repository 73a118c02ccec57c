// What decides (spec/sequence_parallel.md): loss, gradient norm and every parameter's gradient of P ranks, split over
// data and sequence in every way, equal one rank's. fp64: 1e-12; fp32: 1e-5; relative to the tensor's largest element,
// with a floor of 1e-14 (u in fp32) of the global norm for gradients that are mathematically zero.
#include <gtest/gtest.h>

#include "small_run.h"

namespace annulus::testing {
namespace {

struct Split {
  int data, sequence;
};

std::vector<Split> splits(std::int64_t batch) {
  const int ranks = runtime().world().size();
  std::vector<Split> out;
  for (int data = 1; data <= ranks; ++data) {
    if (ranks % data == 0 && batch % data == 0) out.push_back({data, ranks / data});
  }
  return out;
}

// Selections of NSA layers too: the same in fp64; in fp32 one rank's are used, since near-ties may fall either way.
void expect_equal_to_one_rank(SmallRun run, const std::string& what) {
  const auto alone = runtime().world().split(runtime().world().rank(), 0);
  const Whole one = run_step(run, *alone, 1, 1);
  const bool wide = run.dtype == DType::f64;
  run.choices = &one;
  run.pinned = !wide;
  const double tolerance = wide ? 1e-12 : 1e-5, floor = (wide ? 1e-14 : 0x1p-24) * norm_of(one.gradients);
  for (const auto [data, sequence] : splits(run.batch)) {
    if (!fits(run, sequence)) continue;
    SCOPED_TRACE(fmt::format("{}, data {} x sequence {}", what, data, sequence));
    const Whole many = run_step(run, runtime().world(), data, sequence);
    EXPECT_EQ(many.flips, 0) << "of " << many.num_lists << " lists of selected blocks";
    EXPECT_NEAR(many.loss_sum, one.loss_sum, tolerance * std::max(1.0, one.loss_sum));
    EXPECT_NEAR(many.grad_norm, one.grad_norm, tolerance * std::max(1e-30, one.grad_norm));
    const auto gradients = worst(one, many.gradients, one.gradients, tolerance, floor);
    EXPECT_LE(gradients.first, 1) << "gradient of " << gradients.second;
    // A step turns an error e of a gradient into at most lr/eps · e of a weight: 1e-2/1e-3 (small_run.h).
    const auto weights = worst(one, many.weights, one.weights, tolerance, 10 * floor);
    EXPECT_LE(weights.first, 1) << "after a step: " << weights.second;
  }
}

TEST(Equivalence, GroupsLayoutsAndRecomputation) {
  for (const std::int64_t kv_heads : {8, 2, 1}) {  // G = 1, 4, 8
    for (const auto layout : {parallel::LayoutKind::zigzag, parallel::LayoutKind::contiguous}) {
      for (const auto recompute : {model::Recompute::none, model::Recompute::keep_attention, model::Recompute::block}) {
        SmallRun run{.model = small_model(kv_heads), .layout = layout, .recompute = recompute, .documents = {}};
        run.documents = {5, 1, 17, 2, 23};  // edges inside chunks, a document over several chunks, one of one token
        expect_equal_to_one_rank(run, fmt::format("Hkv {}, layout {}, recompute {}", kv_heads, static_cast<int>(layout),
                                                  static_cast<int>(recompute)));
      }
    }
  }
}

TEST(Equivalence, SinglePrecision) {
  for (const std::int64_t kv_heads : {8, 1}) {
    SmallRun run{.model = small_model(kv_heads), .dtype = DType::f32, .documents = {}};
    run.documents = {31, 17};
    expect_equal_to_one_rank(run, "fp32");
  }
}

TEST(Equivalence, EveryModelOption) {
  SmallRun run{.model = small_model(), .documents = {}};
  run.documents = {20, 28};
  run.model.qk_norm = run.model.attention_bias = true;
  run.model.tie_word_embeddings = false;
  expect_equal_to_one_rank(run, "q/k norm, biases, untied head");
  run.model.rope_scaling = {.rope_type = "yarn", .factor = 4, .original_max_position_embeddings = 16};
  expect_equal_to_one_rank(run, "yarn");
  for (const std::int64_t window : {1, 3, 13, 100}) {
    run.model.sliding_window = window;
    expect_equal_to_one_rank(run, fmt::format("sliding window {}", window));
  }
}

TEST(Equivalence, ShortDocuments) {
  const int ranks = runtime().world().size();
  for (const std::int64_t length : {1, 2, 2 * ranks - 1, 2 * ranks + 1}) {
    SmallRun run{.model = small_model(), .documents = {}};
    for (std::int64_t used = 0; used < run.tokens; used += length) {
      run.documents.push_back(std::min(length, run.tokens - used));
    }
    expect_equal_to_one_rank(run, fmt::format("documents of {}", length));
  }
}

// One valid target, placed on every rank in turn: the others have none. And no target anywhere: loss 0, gradients 0.
TEST(Equivalence, OneTargetOrNone) {
  SmallRun run{.model = small_model(), .documents = {}};
  for (std::int64_t t = 3; t < run.tokens; t += 6) {
    run.only_target = t;
    expect_equal_to_one_rank(run, fmt::format("target at {}", t));
  }
  run.only_target = -2;
  const int ranks = runtime().world().size();
  const Whole none = run_step(run, runtime().world(), 1, ranks);
  EXPECT_EQ(none.loss_sum, 0);
  EXPECT_EQ(norm_of(none.gradients), 0);
}

// The head's chunks of logits, and more tokens than one tile of the attention kernel.
TEST(Equivalence, LongerSequences) {
  SmallRun run{.model = small_model(), .tokens = 24 * 24, .batch = 1, .documents = {}};
  run.documents = {100, 201, 275};
  expect_equal_to_one_rank(run, "576 tokens");
}

SmallRun nsa_run(std::int64_t kv_heads = 2) {
  return {.model = small_nsa_model(kv_heads), .tokens = 96, .documents = {5, 1, 39, 2, 33, 16}};
}

TEST(SparseEquivalence, GroupsLayoutsAndRecomputation) {
  for (const std::int64_t kv_heads : {8, 4, 2, 1}) {  // G = 1, 2, 4, 8
    for (const auto layout : {parallel::LayoutKind::zigzag, parallel::LayoutKind::contiguous}) {
      for (const auto recompute : {model::Recompute::none, model::Recompute::keep_attention, model::Recompute::block}) {
        SmallRun run = nsa_run(kv_heads);
        run.layout = layout;
        run.recompute = recompute;
        expect_equal_to_one_rank(run, fmt::format("Hkv {}, layout {}, recompute {}", kv_heads, static_cast<int>(layout),
                                                  static_cast<int>(recompute)));
      }
    }
  }
}

TEST(SparseEquivalence, EveryModelOption) {
  for (const char* kv : {"per_branch", "shared"}) {
    for (const char* compression : {"mlp", "mean"}) {
      for (const char* rope : {"after", "before"}) {
        SmallRun run = nsa_run();
        run.model.nsa.kv = kv;
        run.model.nsa.compression = compression;
        run.model.nsa.rope = rope;
        run.model.qk_norm = run.model.attention_bias = true;
        run.model.attention = {model::AttentionKind::dense, model::AttentionKind::nsa};
        run.model.sliding_window = 11;  // of the dense layers only
        expect_equal_to_one_rank(run, fmt::format("{} {} {}", kv, compression, rope));
      }
    }
  }
}

// Blocks that do not overlap, that are one token, as long as a selection block; windows of 1 and of a whole chunk + 1;
// fewer blocks than are asked for.
TEST(SparseEquivalence, Sizes) {
  struct Sizes {
    std::int64_t block, stride, select_block, select_count, init_blocks, local_blocks, window;
  };
  for (const Sizes& z : {Sizes{4, 4, 4, 3, 1, 2, 5}, Sizes{1, 1, 1, 9, 0, 1, 1}, Sizes{6, 2, 6, 3, 1, 1, 13},
                         Sizes{4, 1, 4, 40, 2, 3, 9}, Sizes{12, 3, 12, 2, 0, 2, 13}}) {
    SmallRun run = nsa_run();
    run.model.nsa = {.block = z.block,
                     .stride = z.stride,
                     .hidden = 3,
                     .select_block = z.select_block,
                     .select_count = z.select_count,
                     .init_blocks = z.init_blocks,
                     .local_blocks = z.local_blocks,
                     .window = z.window};
    run.model.validate();
    expect_equal_to_one_rank(
        run, fmt::format("l {} d {} l' {} n {} w {}", z.block, z.stride, z.select_block, z.select_count, z.window));
    run.documents.clear();
    expect_equal_to_one_rank(run, "one document");
  }
}

TEST(SparseEquivalence, SinglePrecision) {
  for (const std::int64_t kv_heads : {8, 1}) {
    SmallRun run = nsa_run(kv_heads);
    run.dtype = DType::f32;
    expect_equal_to_one_rank(run, "fp32");
  }
}

TEST(SparseEquivalence, ShortDocumentsAndFewTargets) {
  const int ranks = runtime().world().size();
  SmallRun run = nsa_run();
  for (const std::int64_t length : {1, 2, 2 * ranks - 1, 2 * ranks + 1}) {
    run.documents.clear();
    for (std::int64_t used = 0; used < run.tokens; used += length) {
      run.documents.push_back(std::min(length, run.tokens - used));
    }
    expect_equal_to_one_rank(run, fmt::format("documents of {}", length));
  }
  run.documents.clear();
  for (std::int64_t t = 5; t < run.tokens; t += 12) {
    run.only_target = t;
    expect_equal_to_one_rank(run, fmt::format("target at {}", t));
  }
}

}  // namespace
}  // namespace annulus::testing
