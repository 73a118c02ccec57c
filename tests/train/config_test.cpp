// What a run config resolves to and what it refuses; docs/config.md and every shipped config.
#include "train/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/error.h"

namespace annulus::train {
namespace {

const std::filesystem::path kRoot = ANNULUS_ROOT;

template <class Action>
std::string refusal(Action action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

RunConfig runnable() {
  RunConfig c;
  c.data.sources = {{"book.txt", 1}};
  return c;
}

const Machine kCpu{};
const Machine kCudaWithoutGpu{true, 0};
const Machine kGpu{true, 8};

std::string validation(RunConfig c, int ranks = 1, const Machine& machine = kCpu) {
  return refusal([&] { c.resolve_and_validate(ranks, machine); });
}

TEST(RunConfig, ResolvesAxes) {
  struct Case {
    int sequence, data, ranks, want_sequence, want_data;
  };
  for (const Case& c : {Case{0, 0, 1, 1, 1}, Case{0, 0, 4, 4, 1}, Case{0, 2, 4, 2, 2}, Case{2, 0, 8, 2, 4},
                        Case{2, 3, 6, 2, 3}, Case{1, 0, 3, 1, 3}, Case{0, 4, 4, 1, 4}}) {
    RunConfig config = runnable();
    config.parallel.sequence = c.sequence;
    config.parallel.data = c.data;
    config.train.global_batch = 12;
    config.resolve_and_validate(c.ranks, kCpu);
    EXPECT_EQ(config.parallel.sequence, c.want_sequence);
    EXPECT_EQ(config.parallel.data, c.want_data);
    EXPECT_EQ(config.parallel.device, "cpu");
    EXPECT_EQ(config.model.num_key_value_heads, 8);
    RunConfig twice = config;
    twice.resolve_and_validate(c.ranks, kCpu);
    EXPECT_EQ(twice, config);
  }
  RunConfig c = runnable();
  c.parallel.sequence = 3;
  EXPECT_EQ(validation(c, 4),
            "parallel.sequence = 3: expected a divisor of the number of ranks, 4; these fit: 1, 2, 4; or start another "
            "number of ranks");
  c.parallel.sequence = 0;
  c.parallel.data = 5;
  EXPECT_EQ(
      validation(c, 6).find("parallel.data = 5: expected a divisor of the number of ranks, 6; these fit: 1, 2, 3, 6"),
      0u);
  c.parallel.sequence = 2;
  c.parallel.data = 2;
  EXPECT_EQ(
      validation(c, 2).find("parallel.sequence × parallel.data = 2 × 2 = 4: expected the number of ranks, 2; start 4 "
                            "ranks (mpirun -np 4)"),
      0u);
  c.parallel.data = -1;
  EXPECT_EQ(validation(c, 2).find("parallel.data = -1"), 0u);
}

TEST(RunConfig, ResolvesDevices) {
  struct Case {
    const char *device, *precision;
    Machine machine;
    const char* want;  // a device, or the start of an error
  };
  const Case cases[] = {
      {"auto", "fp32", kCpu, "cpu"},
      {"auto", "fp32", kCudaWithoutGpu, "cpu"},
      {"auto", "fp32", kGpu, "cuda"},
      {"auto", "bf16", kGpu, "cuda"},
      {"auto", "fp64", kGpu, "cpu"},
      {"cpu", "fp64", kGpu, "cpu"},
      {"cuda", "bf16", kGpu, "cuda"},
      {"cuda", "fp32", kCpu,
       "parallel.device = \"cuda\": expected \"cpu\" or \"auto\", since this program was built without CUDA"},
      {"cuda", "fp32", kCudaWithoutGpu,
       "parallel.device = \"cuda\": expected \"cpu\" or \"auto\", since no GPU is visible here"},
      {"cuda", "fp64", kGpu, "train.precision = \"fp64\": expected \"fp32\" or \"bf16\" on parallel.device = \"cuda\""},
      {"cpu", "bf16", kGpu, "train.precision = \"bf16\": expected \"fp32\" on the CPU"},
      {"auto", "bf16", kCpu, "train.precision = \"bf16\": expected \"fp32\" on the CPU"},
      {"auto", "bf16", kCudaWithoutGpu, "train.precision = \"bf16\": expected \"fp32\" on the CPU"},
      {"gpu", "fp32", kGpu, "parallel.device = \"gpu\": expected \"auto\", \"cpu\" or \"cuda\""},
      {"auto", "fp16", kGpu, "train.precision = \"fp16\": expected \"fp32\", \"bf16\" or \"fp64\""},
  };
  for (const Case& c : cases) {
    RunConfig config = runnable();
    config.parallel.device = c.device;
    config.train.precision = c.precision;
    const std::string said = refusal([&] { config.resolve_and_validate(1, c.machine); });
    EXPECT_EQ((said == "accepted" ? config.parallel.device : said).find(c.want), 0u)
        << c.device << " " << c.precision << ": " << said;
  }
}

TEST(RunConfig, RefusesWhatCannotRun) {
  struct Bad {
    const char* set;
    int ranks;
    const char* message;
  };
  const Bad bad[] = {
      {"train.steps=0", 1, "train.steps = 0: expected an integer from 1"},
      {"train.global_batch=-8", 1, "train.global_batch = -8"},
      {"train.micro_batch=0", 1, "train.micro_batch = 0"},
      {"train.sequence_length=0", 1, "train.sequence_length = 0"},
      {"train.recompute=all", 1, "train.recompute = \"all\": expected \"none\", \"keep_attention\" or \"block\""},
      {"train.seed=-1", 1, "train.seed = -1"},
      {"train.watchdog_seconds=-1", 1, "train.watchdog_seconds = -1"},
      {"train.micro_batch=3", 1,
       "train.global_batch = 8: expected a multiple of replicas × train.micro_batch = 1 × 3 = 3; 6 or 9 would fit"},
      {"train.micro_batch=16", 1,
       "train.global_batch = 8: expected a multiple of replicas × train.micro_batch = 1 × 16 = 16; 16 would fit"},
      {"parallel.data=3", 3,
       "train.global_batch = 8: expected a multiple of replicas × train.micro_batch = 3 × 1 = 3; 6 or 9 would fit"},
      {"parallel.layout=zigzg", 1,
       "parallel.layout = \"zigzg\": expected \"zigzag\" or \"contiguous\" (did you mean \"zigzag\"?)"},
      {"schedule.warmup_steps=2000", 1, "schedule.warmup_steps = 2000: expected at most train.steps = 1000"},
      {"optimizer.lr=-1", 1, "optimizer.lr = -1"},
      {"optimizer.beta2=1.0", 1, "optimizer.beta2 = 1"},
      {"model.num_key_value_heads=3", 1, "model.num_key_value_heads = 3: expected a divisor"},
      {"model.vocab_size=256", 1, "model.vocab_size = 256: expected at least 257, since data.tokenizer = \"bytes\""},
      {"data.tokenizer=byte", 1, "data.tokenizer = \"byte\": expected \"bytes\" or \"none\" (did you mean \"bytes\"?)"},
      {"data.sources=[]", 1, "data.sources = []: expected at least one training file or folder"},
      {"data.sources=[\"\"]", 1, "data.sources = \"\""},
      {"data.sources=[{path=\"a\", weight=0}]", 1, "data.sources weight of \"a\" = 0: expected a finite number > 0"},
      {"data.validation=[\"\"]", 1, "data.validation = \"\""},
      {"checkpoint.dir=", 1, "checkpoint.dir = \"\""},
      {"checkpoint.every=-1", 1, "checkpoint.every = -1"},
      {"checkpoint.keep=1", 1, "checkpoint.keep = 1: expected an integer from 2 to 1000000"},
      {"checkpoint.resume=", 1, "checkpoint.resume = \"\""},
      {"log.every=0", 1, "log.every = 0"},
      {"log.peak_tflops=-2", 1, "log.peak_tflops = -2"},
      {"eval.every=10", 1, "eval.every = 10: expected 0, since data.validation names nothing to score"},
      {"eval.tokens=-1", 1, "eval.tokens = -1"},
  };
  EXPECT_EQ(validation(runnable()), "accepted");
  EXPECT_EQ(validation(runnable(), 4), "accepted");
  const std::string file = "data.sources = [\"book.txt\"]";
  for (const Bad& b : bad) {
    const std::string said = validation(parse_config(file, "run.toml", {b.set}), b.ranks);
    EXPECT_EQ(said.find(b.message), 0u) << b.set << "\n" << said;
  }
  EXPECT_EQ(validation(parse_config(file, "run.toml", {"model.vocab_size=5", "data.tokenizer=none"})), "accepted");
}

TEST(RunConfig, SequenceMustFitTheRanks) {
  RunConfig c = runnable();
  c.train.sequence_length = 1000;
  EXPECT_EQ(validation(c, 1), "accepted");
  EXPECT_EQ(validation(c, 2), "accepted");                                          // 4 chunks of 250
  EXPECT_NE(validation(c, 3).find("1002"), std::string::npos) << validation(c, 3);  // 6 chunks

  c.model.attention = {model::AttentionKind::nsa};
  EXPECT_EQ(validation(c, 1), "accepted");  // one rank takes any length
  // 4 chunks, multiples of 64, at least 511 tokens: 512 each.
  EXPECT_EQ(
      validation(c, 2).find("train.sequence_length = 1000: a sequence of 1000 tokens does not fit 2 sequence ranks"),
      0u);
  EXPECT_NE(validation(c, 2).find("Lengths that fit: 2048"), std::string::npos) << validation(c, 2);
  c.train.sequence_length = 2100;
  EXPECT_NE(validation(c, 2).find("Lengths that fit: 2048 and 2304"), std::string::npos) << validation(c, 2);
  for (const std::int64_t fits : {2048, 2304, 2560}) {
    c.train.sequence_length = fits;
    EXPECT_EQ(validation(c, 2), "accepted") << fits;
  }
  c.model.nsa.window = 513;  // window − 1 = 512 still fits
  c.train.sequence_length = 2048;
  EXPECT_EQ(validation(c, 2), "accepted");
  c.model.nsa.window = 514;
  EXPECT_NE(validation(c, 2).find("Lengths that fit: 2304"), std::string::npos) << validation(c, 2);
}

TEST(ConfigDocs, AreUpToDate) {
  std::ifstream file(kRoot / "docs" / "config.md");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), config_docs()) << "run: annulus config-docs > docs/config.md";
}

// Every shipped config is whole: it reads, and validates for the ranks and the machine that it names.
TEST(ShippedConfigs, LoadAndValidate) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kRoot / "configs")) {
    if (entry.path().extension() != ".toml") continue;
    ++found;
    for (const int ranks : {1, 2, 8}) {
      RunConfig config = load_config(entry.path().string(), {});
      const std::string said = refusal([&] { config.resolve_and_validate(ranks, kGpu); });
      EXPECT_EQ(said, "accepted") << entry.path() << " on " << ranks << " ranks";
    }
  }
  EXPECT_GE(found, 4);
}

}  // namespace
}  // namespace annulus::train
