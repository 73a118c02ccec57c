// Reading and writing of run configs: every key round-trips, every mistake is said with file, line and what is near.
#include "train/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/rng.h"
#include "train/config_fields.h"

namespace annulus::train {
namespace {

const std::filesystem::path kRoot = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();

template <class Action>
std::string refusal(Action action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

std::string parse_refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return refusal([&] { parse_config(text, "run.toml", overrides); });
}

// Structured bindings name every member of every struct: a new member does not compile here until it is counted, and
// then fails until the table has it.
TEST(ConfigFields, HaveEveryMember) {
  RunConfig c;
  std::map<std::string, int> count;
  std::set<std::string> keys;
  for (const Field& field : config_fields(c)) {
    ++count[std::string(field.section())];
    EXPECT_TRUE(keys.insert(field.key).second) << field.key << " twice";
    EXPECT_FALSE(field.meaning.empty()) << field.key;
  }
  {
    [[maybe_unused]] auto& [a, b, d, e, f, g, h, i, j, scaling, k, l, m, n, o, nsa] = c.model;
    EXPECT_EQ(count["model"], 16 - 2);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e, f, g, h, i] = c.model.rope_scaling;
    EXPECT_EQ(count["model.rope_scaling"], 8);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e, f, g, h, i, j, k, l] = c.model.nsa;
    EXPECT_EQ(count["model.nsa"], 11);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e] = c.parallel;
    EXPECT_EQ(count["parallel"], 4);
  }
  {
    [[maybe_unused]] auto& [a, b, d] = c.data;
    EXPECT_EQ(count["data"], 3);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e, f, g, h, i, j] = c.train;
    EXPECT_EQ(count["train"], 9);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e, f, g, h] = c.optimizer;
    EXPECT_EQ(count["optimizer"], 7);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e] = c.schedule;
    EXPECT_EQ(count["schedule"], 4);
  }
  {
    [[maybe_unused]] auto& [a, b, d, e] = c.checkpoint;
    EXPECT_EQ(count["checkpoint"], 4);
  }
  {
    [[maybe_unused]] auto& [a, b, d] = c.log;
    EXPECT_EQ(count["log"], 3);
  }
  {
    [[maybe_unused]] auto& [a, b] = c.eval;
    EXPECT_EQ(count["eval"], 2);
  }
  EXPECT_EQ(count.size(), 11u);
}

// Fills any field with a random value, awkward ones among them.
struct Randomize {
  const CounterRng& rng;
  std::uint64_t& draw;

  std::uint64_t next(std::uint64_t n) const { return rng.bits(draw++) % n; }
  std::string text() const {
    static const std::string kPieces[] = {"a", "runs/x", " ", "\"", "\\",   "\n",   "\t", "#",
                                          "é", "日本",   "=", "[",  "\x01", "\x7f", "'"};
    std::string s;
    for (std::uint64_t n = next(6); n > 0; --n) s += kPieces[next(std::size(kPieces))];
    return s;
  }
  double number() const {
    static const double kAwkward[] = {
        0.0,    -0.0,        1.0,  1e-8, 0.1,  1.0 / 3, 1e300,
        5e-324, 123456789.0, 1e15, 1e16, 1e22, 1e23,    std::numeric_limits<double>::infinity()};
    return next(2) ? kAwkward[next(std::size(kAwkward))] : rng.normal(draw++);
  }
  void operator()(bool* x) const { *x = next(2) == 1; }
  void operator()(int* x) const { *x = static_cast<int>(rng.bits(draw++)); }
  void operator()(std::int64_t* x) const { *x = static_cast<std::int64_t>(rng.bits(draw++)); }
  void operator()(double* x) const { *x = number(); }
  void operator()(std::string* x) const { *x = text(); }
  void operator()(std::vector<std::string>* x) const {
    x->assign(next(4), "");
    for (std::string& s : *x) s = text();
  }
  void operator()(std::vector<data::SourceConfig>* x) const {
    x->assign(next(4), {});
    for (data::SourceConfig& s : *x) s = {text(), number()};
  }
  void operator()(std::vector<model::AttentionKind>* x) const {
    x->clear();
    for (std::uint64_t n = next(4); n > 0; --n) x->push_back(static_cast<model::AttentionKind>(next(2)));
  }
};

TEST(ConfigToml, WhatIsWrittenReadsBackEqual) {
  const CounterRng rng(7, "config");
  std::uint64_t draw = 0;
  for (int round = 0; round < 200; ++round) {
    RunConfig config;
    for (const Field& field : config_fields(config)) std::visit(Randomize{rng, draw}, field.value);
    const std::string text = to_toml(config);
    const RunConfig again = parse_config(text, "written", {});
    ASSERT_EQ(again, config) << text << "\n--- read back as\n" << to_toml(again);
    ASSERT_NE(again, RunConfig{});
  }
  EXPECT_EQ(parse_config(to_toml(RunConfig{}), "defaults", {}), RunConfig{});
  EXPECT_EQ(parse_config("", "empty", {}), RunConfig{});
}

TEST(ConfigToml, ReadsEveryKindOfValue) {
  const RunConfig c = parse_config(R"(
[model]
hidden_size = 512
rms_norm_eps = 1e-6
rope_theta = 500_000      # a number may be written as an integer
tie_word_embeddings = false
attention = ["dense", "nsa"]
[model.rope_scaling]
rope_type = "yarn"
factor = 4
[model.nsa]
kv = "shared"
[parallel]
sequence = 2
[data]
sources = ["a.txt", {path = "b.jsonl", weight = 2.5}, {path = "c"}]
validation = "v.txt"
[train]
precision = "bf16"
)",
                                   "run.toml", {});
  RunConfig want;
  want.model.hidden_size = 512;
  want.model.rms_norm_eps = 1e-6;
  want.model.rope_theta = 500000;
  want.model.tie_word_embeddings = false;
  want.model.attention = {model::AttentionKind::dense, model::AttentionKind::nsa};
  want.model.rope_scaling.rope_type = "yarn";
  want.model.rope_scaling.factor = 4;
  want.model.nsa.kv = "shared";
  want.parallel.sequence = 2;
  want.data.sources = {{"a.txt", 1}, {"b.jsonl", 2.5}, {"c", 1}};
  want.data.validation = {"v.txt"};
  want.train.precision = "bf16";
  EXPECT_EQ(c, want);
  EXPECT_EQ(parse_config("[[data.sources]]\npath = \"a\"\n[[data.sources]]\npath = \"b\"\nweight = 3\n", "t", {})
                .data.sources,
            (std::vector<data::SourceConfig>{{"a", 1}, {"b", 3}}));
  EXPECT_EQ(parse_config("data.sources = \"a.txt\"\nmodel.attention = \"nsa\"", "t", {}).data.sources,
            (std::vector<data::SourceConfig>{{"a.txt", 1}}));
}

TEST(ConfigToml, OverridesAreTomlValuesOrBareWords) {
  const std::string file = "[train]\nsteps = 5\n[model.nsa]\nblock = 16\n";
  const RunConfig c = parse_config(
      file, "run.toml",
      {"train.steps=200", " train.steps = 300 ", "train.precision=fp64", "checkpoint.dir=runs/a b#1",
       "checkpoint.resume=123", "log.bar=false", "optimizer.lr=1e-3",
       "data.sources=[\"x.txt\", {path=\"y\", weight=2}]", "data.validation=v.txt", "model.nsa={stride=8, window=32}",
       "model.attention=[\"nsa\", \"dense\"]", "parallel.layout=\"contiguous\""});
  RunConfig want;
  want.train.steps = 300;  // the last one holds
  want.train.precision = "fp64";
  want.checkpoint.dir = "runs/a b#1";
  want.checkpoint.resume = "123";
  want.log.bar = false;
  want.optimizer.lr = 1e-3;
  want.data.sources = {{"x.txt", 1}, {"y", 2}};
  want.data.validation = {"v.txt"};
  want.model.nsa.block = 16;
  want.model.nsa.stride = 8;
  want.model.nsa.window = 32;
  want.model.attention = {model::AttentionKind::nsa, model::AttentionKind::dense};
  want.parallel.layout = "contiguous";
  EXPECT_EQ(c, want) << to_toml(c);

  EXPECT_EQ(parse_refusal("", {"train.step=3"}),
            "unknown key train.step in --set train.step=3; did you mean train.steps?");
  EXPECT_EQ(parse_refusal("", {"train.steps=abc"}),
            "train.steps in --set train.steps=abc is a string \"abc\"; expected an integer");
  EXPECT_EQ(parse_refusal("", {"train.steps"}),
            "--set train.steps: expected section.key=value, for example --set train.steps=200");
  EXPECT_EQ(parse_refusal("", {"=3"}), "--set =3: expected section.key=value, for example --set train.steps=200");
  EXPECT_NE(parse_refusal("", {"train.steps="}).find("the value is missing"), std::string::npos);
  EXPECT_NE(parse_refusal("", {"model.attention=[dense, nsa]"}).find("strings in lists and tables need quotes"),
            std::string::npos);
  EXPECT_EQ(parse_refusal("", {"train.=3"}).find("--set train.=3: not TOML"), 0u) << parse_refusal("", {"train.=3"});
}

TEST(ConfigToml, SaysWhereAndWhatIsNear) {
  struct Bad {
    const char* text;
    const char* message;
  };
  const Bad bad[] = {
      {"[train]\n\nstep = 3", "unknown key train.step in run.toml:3; did you mean train.steps?"},
      {"[trian]\nsteps = 3", "unknown key trian in run.toml:1; did you mean train?"},
      {"[optimiser]\nlr = 1", "unknown key optimiser in run.toml:1; did you mean optimizer?"},
      {"[train]\nlr = 1.0", "unknown key train.lr in run.toml:2; did you mean optimizer.lr?"},
      {"steps = 3", "unknown key steps in run.toml:1; did you mean train.steps?"},
      {"[train]\nwarmup_step = 3", "unknown key train.warmup_step in run.toml:2; did you mean schedule.warmup_steps?"},
      {"[model.nsa]\nwindwo = 3", "unknown key model.nsa.windwo in run.toml:2; did you mean model.nsa.window?"},
      {"[model.rope_scale]\nfactor = 3",
       "unknown key model.rope_scale in run.toml:1; did you mean model.rope_scaling?"},
      {"[eval]\nzzzzzz = 1", "unknown key eval.zzzzzz in run.toml:2; [eval] knows every, tokens"},
      {"zzzzzz = 1",
       "unknown key zzzzzz in run.toml:1; the sections are model, parallel, data, train, optimizer, schedule, "
       "checkpoint, log, eval"},
      {"[data]\nsources = [{path = \"a\", wieght = 2}]",
       "unknown key data.sources.wieght in run.toml:2; a source has path and weight (did you mean \"weight\"?)"},
      {"[data]\nsources = [{weight = 2}]", "data.sources in run.toml:2 has a source without a path"},
      {"[data]\nsources = [3]", "data.sources in run.toml:2 is the integer 3; expected a list of paths or"},
      {"[data]\nvalidation = [true]", "data.validation in run.toml:2 is the boolean true; expected a list of strings"},
      {"[train]\nsteps = \"abc\"", "train.steps in run.toml:2 is a string \"abc\"; expected an integer"},
      {"[train]\nsteps = 1e6", "train.steps in run.toml:2 is the number 1000000; expected an integer"},
      {"[train]\nsteps = 2024-01-01", "train.steps in run.toml:2 is a date or time; expected an integer"},
      {"[train]\nsteps = [3]", "train.steps in run.toml:2 is a list; expected an integer"},
      {"[train.steps]\na = 3", "train.steps in run.toml:1 is a table; expected an integer"},
      {"[train]\ndeterministic = 1", "train.deterministic in run.toml:2 is the integer 1; expected true or false"},
      {"[train]\nprecision = 16", "train.precision in run.toml:2 is the integer 16; expected a string"},
      {"[optimizer]\nlr = \"high\"", "optimizer.lr in run.toml:2 is a string \"high\"; expected a number"},
      {"train = 3", "train in run.toml:1 is the integer 3; expected a table, [train]"},
      {"[parallel]\nsequence = 5000000000",
       "parallel.sequence in run.toml:2 is the integer 5000000000; expected an integer of"},
      {"[model]\nattention = \"sparse\"",
       "model.attention in run.toml:2 is a string \"sparse\"; expected \"dense\", \"nsa\" or"},
      {"[model]\nattention = [\"dense\", 3]", "model.attention in run.toml:2 is the integer 3; expected \"dense\""},
      {"[train]\nsteps = = 3", "run.toml:2:9: not TOML: "},
      {"[train]\nsteps = 3\nsteps = 4", "run.toml:3:"},
      {"[train", "run.toml:1:"},
  };
  for (const Bad& b : bad)
    EXPECT_EQ(parse_refusal(b.text).find(b.message), 0u) << b.text << "\n" << parse_refusal(b.text);
}

TEST(ConfigToml, FilesThatCannotBeRead) {
  EXPECT_EQ(refusal([] { load_config("no/such/run.toml", {}); }),
            "cannot read config no/such/run.toml: No such file or directory; expected a TOML file");
  EXPECT_EQ(refusal([] { load_config(kRoot.string(), {}); }).find("config " + kRoot.string() + " is a folder"), 0u);
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
      {"checkpoint.keep=1", 1, "checkpoint.keep = 1: expected an integer >= 2"},
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
