// Reading and writing of run configs: every key round-trips, every mistake is said with file, line and what is near.
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "train/config_fields.h"

namespace annulus::train {
namespace {

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
    [[maybe_unused]] auto& [a, b, d, e, f] = c.checkpoint;
    EXPECT_EQ(count["checkpoint"], 5);
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
  const std::string folder = std::filesystem::temp_directory_path().string();
  EXPECT_EQ(refusal([&] { load_config(folder, {}); }).find("config " + folder + " is a folder"), 0u);
}

}  // namespace
}  // namespace annulus::train
