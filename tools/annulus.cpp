// The program: parses the command line (the only file that knows CLI11), starts MPI for the subcommands that need it,
// and turns errors into one message and an exit code (core/error.h, README).
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "commands.h"
#include "core/config_check.h"
#include "core/error.h"
#include "core/version.h"
#include "ops/cpu/blas_core.h"
#include "train/config.h"

namespace annulus::tools {

namespace {

// This process's rank as the launcher tells it before MPI is up: 0 without one.
int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* value = std::getenv(name)) return std::atoi(value);
  }
  return 0;
}

// What a subcommand does once its options are parsed. Local ones need no MPI and run on rank 0 only.
struct Action {
  std::function<int()> local;
  std::function<int(parallel::MpiRuntime&)> collective;
};

struct Options {  // parsed values, alive for as long as the Action
  TrainCommand train;
  train::UptrainOptions uptrain;
  train::EvaluateOptions evaluate;
  train::GenerateOptions generate;
  PlanCommand plan;
  train::BenchOptions bench;
  ConvertCommand convert;
  InspectCommand inspect;
  PlotCommand plot;
  PrepareCommand prepare;
};

constexpr const char* kModelHelp = "Checkpoint, run folder (its newest checkpoint), or HuggingFace folder";

const CLI::Range kPositive(std::int64_t{1}, std::int64_t{INT32_MAX}, "");

CLI::App* add_command(CLI::App& app, const char* name, const char* description, const char* footer = "") {
  CLI::App* command = app.add_subcommand(name, description);
  command->footer(footer);
  return command;
}

void add_overrides(CLI::App* command, std::vector<std::string>& overrides) {
  command
      ->add_option("--set", overrides,
                   "Override a key of the config; the value is TOML, a bare word is a string. May be repeated")
      ->type_name("SECTION.KEY=VALUE")
      ->allow_extra_args(false);
}

void add_config(CLI::App* command, std::string& config, std::vector<std::string>& overrides) {
  command->add_option("config", config, "TOML file of the run; docs/config.md lists every key")
      ->required()
      ->type_name("CONFIG");
  add_overrides(command, overrides);
}

void add_train(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "train", "Train a model; goes on from the newest checkpoint of its run folder",
                            "Under mpirun or srun every rank joins; alone it is one rank.\n"
                            "SIGUSR1 saves a checkpoint and stops with exit code 75; start again to go on.\n"
                            "Example: mpirun -np 2 annulus train configs/quickstart.toml --set train.steps=200");
  add_config(c, o.train.config, o.train.overrides);
  c->callback([&] { action.collective = [&](auto& runtime) { return run_train(o.train, runtime); }; });
}

void add_uptrain(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(
      app, "uptrain", "Train a model on by its own recipe, for a share of its tokens",
      "For converted models, and for longer contexts. Makes a run folder of its own; started\n"
      "again it goes on there.\n"
      "Example: mpirun -np 2 annulus uptrain gqa --fraction 0.05\n"
      "         annulus uptrain runs/english --set train.sequence_length=4096 \\\n"
      "           --set 'model.rope_scaling={rope_type=\"yarn\", factor=4, original_max_position_embeddings=1024}'");
  c->add_option("model", o.uptrain.model, kModelHelp)->required()->type_name("MODEL");
  auto* fraction = c->add_option("--fraction", o.uptrain.fraction, "Share of the tokens of the source's run")
                       ->type_name("SHARE")
                       ->capture_default_str();
  c->add_option("--tokens", o.uptrain.tokens, "Train on so many tokens instead")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 50, ""))
      ->excludes(fraction);
  c->add_option("--config", o.uptrain.config, "A recipe, for a model that has none; its [model] is not used")
      ->type_name("FILE");
  c->add_option("--run", o.uptrain.run, "The new run folder; the source's name with -uptrained if left out")
      ->type_name("FOLDER");
  add_overrides(c, o.uptrain.overrides);
  c->callback([&] { action.collective = [&](auto& runtime) { return train::run_uptraining(o.uptrain, runtime); }; });
}

void add_evaluate(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "evaluate", "Loss, perplexity and bits per byte of a model on documents",
                            "Example: annulus evaluate runs/quickstart --data book.txt");
  c->add_option("model", o.evaluate.model, kModelHelp)->required()->type_name("MODEL");
  c->add_option("--data", o.evaluate.data, "Files or folders to score: .txt, .jsonl, .bin")
      ->required()
      ->type_name("FILE");
  c->add_option(
       "--sequence-length", o.evaluate.sequence_length,
       "Tokens per window; the training length if left out (a model without a recipe: its limit, at most 4096)")
      ->type_name("S")
      ->check(kPositive);
  c->add_option("--stride", o.evaluate.stride, "Tokens by which windows advance; the whole window if left out")
      ->type_name("N")
      ->check(kPositive);
  c->add_option("--precision", o.evaluate.precision,
                "fp32, bf16 (GPU) or fp64 (CPU); fp32, or fp64 for an fp64 model, if left out")
      ->type_name("TYPE");
  c->add_flag("--attention", o.evaluate.attention,
              "Also what sparse layers do: mean gates, blocks selected by a query and by 4 and 8 neighbouring ones");
  c->add_option("--without", o.evaluate.without,
                "Shut the gates of a branch of sparse layers: compressed, selected or window. May be repeated")
      ->type_name("BRANCH")
      ->check(CLI::IsMember({"compressed", "selected", "window"}))
      ->allow_extra_args(false);
  c->add_flag("--json", o.evaluate.json, "Print the result as one line of JSON");
  c->callback([&] { action.collective = [&](auto& runtime) { return train::run_evaluation(o.evaluate, runtime); }; });
}

void add_generate(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "generate", "Continue a prompt with a model, on the CPU, as one process",
                            "Stops at the end of the document, after --max-new tokens, or where the context is full.\n"
                            "Text goes to stdout, speed to stderr. The same seed gives the same draws.\n"
                            "Example: annulus generate runs/quickstart --prompt 'A hacker is' --temperature 0.8");
  train::GenerateOptions& g = o.generate;
  c->add_option("model", g.model, kModelHelp)->required()->type_name("MODEL");
  CLI::Option* prompt = c->add_option("--prompt", g.prompt, "Text to continue")->type_name("TEXT");
  c->add_option("--tokens", g.tokens, "Or token ids, as they stand")->type_name("ID,ID,…");
  c->add_option("--max-new", g.max_new, "New tokens, at most")->type_name("N")->check(kPositive)->capture_default_str();
  c->add_option("--temperature", g.sampling.temperature,
                "Logits are divided by it before the draw; 0: always the most probable token")
      ->type_name("T")
      ->capture_default_str();
  c->add_option("--top-p", g.sampling.top_p, "Draw from the most probable tokens that together have this probability")
      ->type_name("P")
      ->capture_default_str();
  c->add_option("--seed", g.sampling.seed, "Another seed draws other tokens")->type_name("N")->capture_default_str();
  c->add_option("--sequence-length", g.sequence_length,
                "Tokens that the model may see, prompt included; the training length if left out")
      ->type_name("S")
      ->check(kPositive);
  c->add_flag("--json", g.json, "Print tokens, text, speed and cache bytes as one line of JSON");
  c->callback([&o, &action, prompt] {
    o.generate.has_prompt = prompt->count() > 0;
    action.collective = [&o](auto& runtime) { return train::run_generation(o.generate, runtime); };
  });
}

void add_plan(CLI::App& app, Options& o, Action& action) {
  CLI::App* c =
      add_command(app, "plan", "What a run would take: parameters, memory, bytes per hop, time; starts nothing",
                  "Example: annulus plan configs/llama-1b-128k.toml --gpus 8");
  add_config(c, o.plan.config, o.plan.overrides);
  c->add_option("--gpus", o.plan.gpus, "Plan for this many GPUs, one rank each")->type_name("N")->check(kPositive);
  c->add_option("--ranks", o.plan.ranks, "Plan for this many CPU ranks")->type_name("N")->check(kPositive);
  c->callback([&] { action.local = [&] { return run_plan(o.plan); }; });
}

void add_bench(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "bench", "Time kernels and a training step against this machine's ceilings");
  c->add_option("--filter", o.bench.filter, "Only cases whose name (on a GPU: or shape) contains this")
      ->type_name("TEXT");
  c->add_option("--device", o.bench.device, "cpu, cuda (dense attention), or auto: cuda where there is one")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  c->add_flag("--json", o.bench.json, "Print the result as one line of JSON");
  c->callback([&] { action.collective = [&](auto& runtime) { return train::run_bench(o.bench, runtime); }; });
}

void add_convert(CLI::App& app, Options& o, Action& action) {
  CLI::App* c =
      add_command(app, "convert", "A model in another format, with fewer key/value heads, or with sparse attention",
                  "HuggingFace: Llama, Mistral, Qwen2 and Qwen3; safetensors in fp32, fp16 and bf16.\n"
                  "Optimiser state is dropped; the weights are its fp32 masters where there are any.\n"
                  "Example: annulus convert runs/english gqa --kv-heads 2 --pool mean\n"
                  "         annulus convert gqa gqa-hf --format huggingface");
  c->add_option("source", o.convert.source, kModelHelp)->required()->type_name("SRC");
  c->add_option("destination", o.convert.destination, "The folder to write; must not exist")
      ->required()
      ->type_name("DST");
  c->add_option("--format", o.convert.format, "Of DST: checkpoint or huggingface")
      ->type_name("NAME")
      ->capture_default_str();
  c->add_option("--kv-heads", o.convert.kv_heads, "Key/value heads of DST, a divisor of those of SRC")
      ->type_name("N")
      ->check(kPositive);
  c->add_option("--pool", o.convert.pool,
                "How consecutive key/value heads become one: their mean, the first, or random (fresh weights)")
      ->type_name("HOW")
      ->capture_default_str();
  c->add_option("--attention", o.convert.attention,
                "nsa: make dense layers sparse; copies of K and V, gates 0.8 selected")
      ->type_name("KIND");
  c->add_option("--set", o.convert.overrides,
                "A key of the sparse layers, such as model.nsa.window=256. May be repeated")
      ->type_name("MODEL.NSA.KEY=VALUE")
      ->allow_extra_args(false);
  c->add_flag("--json", o.convert.json, "Print what was read, changed, dropped and written as one line of JSON");
  c->callback([&] { action.local = [&] { return run_convert(o.convert); }; });
}

void add_inspect(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "inspect", "Parameters, tensors, config, step and provenance of a model",
                            "Open only checkpoints that you trust: HDF5 files can be crafted to attack the library.");
  c->add_option("path", o.inspect.path, kModelHelp)->required()->type_name("PATH");
  c->add_flag("--json", o.inspect.json, "Print everything as one line of JSON");
  c->add_flag("--verify", o.inspect.verify, "Read every value and compare its checksum");
  c->callback([&] { action.local = [&] { return run_inspect(o.inspect); }; });
}

void add_plot(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "plot", "Draw a run's losses as an SVG picture");
  c->add_option("run", o.plot.run, "Run folder, or its metrics.jsonl")->required()->type_name("RUN");
  c->add_option("-o,--output", o.plot.output, "The picture; RUN/loss.svg if left out")->type_name("FILE");
  c->callback([&] { action.local = [&] { return run_plot(o.plot); }; });
}

// What every kind of prepared file has.
void add_output(CLI::App* command, PrepareCommand& prepare) {
  command->add_option("output", prepare.output, "The file to write, .jsonl")->required()->type_name("DST");
  command->add_flag("--force", prepare.force, "Replace DST");
  command->add_flag("--json", prepare.json, "Print what was written as one line of JSON");
}

// CLI11 takes the nearest integer it can hold; a number that was not meant is worse than none.
std::string fits_in_64_bits(const std::string& text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc::result_out_of_range ? text + ": expected an integer of at most 18 digits" : "";
}

template <class T>
void add_number(CLI::App* command, const char* name, T& value, const char* help, const char* type) {
  auto* option = command->add_option(name, value, help)->type_name(type)->capture_default_str();
  if constexpr (std::is_integral_v<T>) option->check(fits_in_64_bits);
}

void add_recall(CLI::App& prepare, Options& o, Action& action) {
  CLI::App* c = add_command(
      prepare, "recall", "Associative recall (MQAR): pairs of a key and a value, later queries for them",
      "A document states its pairs first and asks for every key at most once; answers are the only targets.\n"
      "Two layers that see W tokens reach 2(W - 1) back: --gap-min 2W hides the pairs from them.\n"
      "Train with data.tokenizer=none, model.vocab_size=VOCAB and train.sequence_length=LENGTH.\n"
      "Example: annulus prepare recall recall.jsonl --length 128 --gap-min 32 --seed 1");
  data::RecallOptions& r = o.prepare.recall;
  add_output(c, o.prepare);
  add_number(c, "--documents", r.documents, "Documents; each depends on its number and the seed alone", "N");
  add_number(c, "--length", r.length, "Tokens of a document", "L");
  add_number(c, "--pairs", r.pairs, "Pairs of a key and a value in a document", "N");
  add_number(c, "--queries", r.queries, "Keys that a document asks for; 0: all", "N");
  add_number(c, "--pair-span", r.pair_span, "The pairs lie in the first N tokens, filler between them; 0: no filler",
             "N");
  add_number(c, "--gap-min", r.gap_min, "Tokens that every query lies behind these, at least", "N");
  add_number(c, "--vocab", r.vocab, "Token ids: filler, then keys, then as many values", "N");
  add_number(c, "--filler-ids", r.filler_ids, "Ids that fill the rest of a document, drawn evenly", "N");
  add_number(c, "--seed", r.seed, "Another seed makes other documents", "N");
  c->callback([&] { action.local = [&] { return run_prepare_recall(o.prepare); }; });
}

void add_passkey(CLI::App& prepare, Options& o, Action& action) {
  CLI::App* c = add_command(prepare, "passkey", "A number told once in long filler, and asked for at the end, as bytes",
                            "The digits of the answer are the only targets; evaluate tells the accuracy.\n"
                            "For models with data.tokenizer=bytes.\n"
                            "Example: annulus prepare passkey passkey.jsonl --length 8192 --depth 0.5");
  data::PasskeyOptions& p = o.prepare.passkey;
  add_output(c, o.prepare);
  add_number(c, "--documents", p.documents, "Documents; each depends on its number and the seed alone", "N");
  add_number(c, "--length", p.length, "Bytes of a document, the answer included", "L");
  add_number(c, "--digits", p.digits, "Digits of the number", "N");
  add_number(c, "--depth", p.depth, "Where it is told: 0 at the start of the filler, 1 at its end, -1 anywhere",
             "SHARE");
  add_number(c, "--seed", p.seed, "Another seed makes other documents", "N");
  c->callback([&] { action.local = [&] { return run_prepare_passkey(o.prepare); }; });
}

void add_prepare(CLI::App& app, Options& o, Action& action) {
  CLI::App* c = add_command(app, "prepare", "Write data files for experiments");
  c->require_subcommand(1);
  add_recall(*c, o, action);
  add_passkey(*c, o, action);
}

void add_config_docs(CLI::App& app, Action& action) {
  CLI::App* c = add_command(app, "config-docs", "Print docs/config.md, every key of a config");
  c->group("");  // for maintainers: not in --help
  c->callback([&] {
    action.local = [] {
      fmt::print("{}", train::config_docs());
      return 0;
    };
  });
}

// The message for a command line that CLI11 refused, with the nearest word for one that it does not know.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = &app;
  std::string path = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().back();
    path += " " + command->get_name();
  }
  const std::string help = fmt::format("see {} --help", path);
  const std::vector<std::string> unknown = command->remaining();
  if (unknown.empty()) return fmt::format("{}; {}", error.what(), help);

  std::vector<std::string> known;
  for (const CLI::App* sub : command->get_subcommands([](const CLI::App* s) { return !s->get_group().empty(); })) {
    known.push_back(sub->get_name());
  }
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& word : option->get_lnames()) known.push_back("--" + word);
  }
  const std::string word = unknown.front().substr(0, unknown.front().find('='));
  const bool wants_subcommand = command->get_require_subcommand_min() > 0;
  return fmt::format("{} \"{}\"{}; {}", wants_subcommand ? "unknown subcommand" : "unexpected argument", word,
                     did_you_mean(word, known), help);
}

int parse(CLI::App& app, int argc, char** argv, bool speaks) {  // −1: go on
  try {
    app.parse(argc, argv);
    return -1;
  } catch (const CLI::Success& request) {  // --help, --version
    return speaks ? app.exit(request) : 0;
  } catch (const CLI::ParseError& error) {
    const std::string message = explain(app, error);
    if (speaks) {
      fmt::print(stderr, "annulus: error: {}\n", message);
    } else {  // mpirun ends the job when the first rank leaves: that must be the one that has spoken
      std::this_thread::sleep_for(std::chrono::seconds(5));
    }
    return UsageError(message).exit_code();
  }
}

// Runs the action and gives errors to `fail`, which says them and may not return.
int guard(const std::function<int()>& action, const std::function<int(const std::string&, int)>& fail) {
  try {
    return action();
  } catch (const Error& error) {
    return fail(error.what(), error.exit_code());
  } catch (const std::bad_alloc&) {
    return fail("out of host memory; use more ranks, a shorter train.sequence_length or a smaller train.micro_batch",
                1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}

}  // namespace

namespace {

// Starts this program anew with OpenBLAS's kernels for this CPU where it has not found them itself
// (ops/cpu/blas_core.h); the environment variable ends the second round at once.
void run_with_better_blas(char** argv) {
  const std::string core(ops::cpu::better_blas_core());
  if (core.empty() || setenv("OPENBLAS_CORETYPE", core.c_str(), 0) != 0) return;
  std::error_code error;  // the program's own path: `ps` shows its name
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) execv(program.c_str(), argv);  // returns only if it failed: slow is right too
}

// A result that could not be written is none.
int flushed(int code) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw Error("standard output cannot be written (a full disk?)");
  return code;
}

}  // namespace

int run(int argc, char** argv) {
  CLI::App app("Annulus trains long-context transformers: a sequence is spread over MPI ranks.", "annulus");
  app.set_version_flag("--version", fmt::format("annulus {}", kVersion));
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done; 1 internal error; 2 usage or config; 3 data; 4 checkpoint or model file; 5 diverged;\n"
      "6 a rank hung or died; 75 stopped by a signal, with a checkpoint saved.");
  Options options;
  Action action;
  add_train(app, options, action);
  add_uptrain(app, options, action);
  add_evaluate(app, options, action);
  add_generate(app, options, action);
  add_plan(app, options, action);
  add_bench(app, options, action);
  add_convert(app, options, action);
  add_inspect(app, options, action);
  add_plot(app, options, action);
  add_prepare(app, options, action);
  add_config_docs(app, action);

  const bool speaks = launched_rank() == 0;
  if (const int code = parse(app, argc, argv, speaks); code >= 0) return code;
  if (action.local) {
    if (!speaks) return 0;
    return guard([&] { return flushed(action.local()); },
                 [](const std::string& message, int code) {
                   std::fflush(stdout);
                   fmt::print(stderr, "annulus: error: {}\n", message);
                   return code;
                 });
  }
  run_with_better_blas(argv);
  parallel::MpiRuntime runtime(&argc, &argv);
  return guard([&] { return flushed(action.collective(runtime)); },
               [&](const std::string& message, int code) -> int { fail_job(runtime, message, code); });
}

}  // namespace annulus::tools

int main(int argc, char** argv) { return annulus::tools::run(argc, argv); }
