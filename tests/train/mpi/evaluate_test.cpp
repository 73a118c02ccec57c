// What evaluate() counts, on any number of ranks: against every logit of every window.
#include "train/evaluate.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "small_run.h"

namespace annulus::testing {
namespace {

struct Rig {
  explicit Rig(const model::ModelConfig& model, std::int64_t tokens)
      : mesh(runtime().world(), {{"data", 1}, {"sequence", runtime().world().size()}}),
        engine(make_compute_device(DeviceKind::cpu), mesh,
               {.model = model,
                .dtype = DType::f64,
                .layout = parallel::LayoutKind::zigzag,
                .sequence_length = tokens,
                .batch = 2,
                .training = false,
                .recompute = model::Recompute::none,
                .deterministic = true,
                .optimizer = {}}) {
    engine.plan();
    engine.commit();
    engine.context().progress = parallel::mpi_progress;
    engine.initialize(3);
  }
  // This rank's logits of the loaded batch, [batch · T, V].
  std::vector<double> logits() {
    std::vector<double> out(static_cast<std::size_t>(2 * engine.layout().local_tokens() * vocab()));
    engine.logits(host_view(out.data(), {2 * engine.layout().local_tokens(), vocab()}));
    return out;
  }
  std::int64_t vocab() const { return engine.options().model.vocab_size; }

  parallel::Mesh mesh;
  train::Engine engine;
};

std::int32_t argmax(std::span<const double> x) {
  return static_cast<std::int32_t>(std::max_element(x.begin(), x.end()) - x.begin());
}

// Targets in turn: none, the token with the greatest logit, another one.
TEST(Evaluate, CorrectIsTheTargetWithTheGreatestLogit) {
  const SmallRun run{.model = small_model(), .documents = {}};
  Rig rig(run.model, run.tokens);
  HostBatch batch = make_batch(run, 0, 2);
  rig.engine.load({batch.tokens, batch.targets, batch.start});
  const auto logits = rig.logits();
  const std::int64_t local = rig.engine.layout().local_tokens(), vocab = rig.vocab();
  std::vector<std::int32_t> wanted;
  std::fill(batch.targets.begin(), batch.targets.end(), -1);  // other ranks' rows are not read
  for (std::int64_t row = 0; row < 2 * local; ++row) {
    const auto best = argmax({logits.data() + row * vocab, static_cast<std::size_t>(vocab)});
    const std::int64_t t = rig.engine.layout().global_index(rig.mesh.coordinate("sequence"), row % local);
    auto& target = batch.targets[static_cast<std::size_t>(row / local * run.tokens + t)];
    target = row % 3 == 0 ? -1 : row % 3 == 1 ? best : (best + 1 + static_cast<std::int32_t>(row) % 30) % 37;
    wanted.push_back(row % 3 == 1);
  }
  rig.engine.load({batch.tokens, batch.targets, batch.start});
  (void)rig.engine.losses();
  const auto correct = rig.engine.correct();
  EXPECT_EQ(std::vector<std::int32_t>(correct.begin(), correct.end()), wanted);
}

// A file of this process alone.
struct File {
  explicit File(const std::string& text)
      : path((std::filesystem::temp_directory_path() / fmt::format("annulus-evaluate-{}.jsonl", ::getpid())).string()) {
    std::ofstream(path) << text;
  }
  ~File() { std::filesystem::remove(path); }
  std::string path;
};

TEST(Evaluate, AccuracyCountsTargetsByPosition) {
  // Documents of one window each, every second token a target. Half of the targets are made to be the model's choice:
  // changing a token changes no earlier logit, so they are set from left to right.
  const SmallRun run{.model = small_model(), .tokens = 24, .documents = {}};
  Rig rig(run.model, run.tokens);
  auto& world = runtime().world();
  const std::int64_t local = rig.engine.layout().local_tokens(), vocab = rig.vocab();
  const int rank = rig.mesh.coordinate("sequence");
  HostBatch batch = make_batch(run, 0, 2);
  std::vector<std::int32_t> last(2);  // the token behind the window
  std::vector<std::int64_t> correct(40, 0), targets(40, 0);
  for (std::int64_t t = 1; t < run.tokens; t += 2) {
    rig.engine.load({batch.tokens, batch.targets, batch.start});
    const auto logits = rig.logits();
    std::vector<std::int32_t> best(2, -1);  // by the rank that holds row t; the others have −1
    for (std::int64_t row = 0; row < 2 * local; ++row) {
      if (rig.engine.layout().global_index(rank, row % local) != t) continue;
      best[static_cast<std::size_t>(row / local)] =
          argmax({logits.data() + row * vocab, static_cast<std::size_t>(vocab)});
    }
    std::vector<double> sum(best.begin(), best.end());
    Context host;
    world.wait(host, world.all_reduce(host, host_view(sum.data(), {2}), parallel::ReduceOp::sum));
    for (std::size_t b = 0; b < 2; ++b) {
      const auto choice = static_cast<std::int32_t>(sum[b]) + world.size() - 1;
      const bool hit = (t / 2 + static_cast<std::int64_t>(b)) % 2 == 0;
      const std::int32_t token = hit ? choice : (choice + 5) % static_cast<std::int32_t>(vocab);
      (t + 1 < run.tokens ? batch.tokens[b * 24 + static_cast<std::size_t>(t) + 1] : last[b]) = token;
      std::size_t bucket = 0;
      while ((std::int64_t{1} << bucket) < t + 1) ++bucket;
      ++targets[bucket];
      correct[bucket] += hit;
    }
  }
  std::string text;
  for (std::size_t b = 0; b < 2; ++b) {
    text += "{\"tokens\":[";
    for (std::size_t t = 0; t < 24; ++t) text += fmt::format("{},", batch.tokens[b * 24 + t]);
    text += fmt::format("{}],\"mask\":[0,0", last[b]);
    for (std::size_t t = 2; t <= 24; ++t) text += t % 2 == 0 ? ",1" : ",0";
    text += "]}\n";
  }
  const File file(text);
  const data::ScoringData documents({file.path}, "none", vocab, run.tokens);
  const train::Evaluation found = train::evaluate(rig.engine, documents);
  EXPECT_EQ(found.tokens, 24);
  EXPECT_EQ(found.correct, 12);
  EXPECT_DOUBLE_EQ(found.accuracy(), 0.5);
  ASSERT_EQ(found.by_position.size(), 5u);  // up to 2, 4, 8, 16, 32
  for (const auto& bucket : found.by_position) {
    std::size_t i = 0;
    while ((std::int64_t{1} << i) < bucket.upto) ++i;
    EXPECT_EQ(bucket.tokens, targets[i]) << bucket.upto;
    EXPECT_EQ(bucket.correct, correct[i]) << bucket.upto;
  }
}

// A branch whose gate is shut has no say: whatever its values' projection holds, the losses are the same bits.
TEST(Evaluate, AShutGateSilencesItsBranchAlone) {
  const SmallRun run{.model = small_nsa_model(), .tokens = 96, .documents = {}};
  const HostBatch batch = make_batch(run, 0, 2);
  const char* prefixes[] = {".cmp_v_proj.weight", ".slc_v_proj.weight", ".win_v_proj.weight"};
  for (const auto shut : {attention::kCompressed, attention::kSelected, attention::kWindow}) {
    for (int changed = 0; changed < attention::kNumBranches; ++changed) {
      Rig rig(run.model, run.tokens);
      train::close_gate(rig.engine, shut);
      const auto losses = [&] {
        rig.engine.load({batch.tokens, batch.targets, batch.start});
        const auto out = rig.engine.losses();
        return std::vector<double>(out.begin(), out.end());
      };
      const auto before = losses();
      for (const auto& e : rig.engine.store().entries()) {
        double* values = rig.engine.store().values().as<double>() + e.offset;
        if (e.name.ends_with(prefixes[changed])) std::for_each(values, values + e.count, [](double& x) { x *= -3; });
      }
      EXPECT_EQ(losses() == before, changed == shut) << shut << ", " << prefixes[changed];
    }
  }
}

}  // namespace
}  // namespace annulus::testing
