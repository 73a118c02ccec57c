// oracle_check DIR [--precision fp64|fp32|bf16] [--device cpu|cuda] [--data N] [--layout zigzag|contiguous]
//                  [--recompute none|keep_attention|block]
//
// Runs every oracle case of DIR (*.h5, written by the fp64 oracle with autograd) through the engine: NSA's selections,
// logits, loss, every gradient, and three optimiser steps. Under mpirun the ranks form data x sequence. Exit code 0 if
// all cases that fit pass.
//
// Bounds. fp64: max|a − b| <= 1e-9 · max|b| per tensor, with a floor of 1e-14 · the global gradient norm
// (spec/model.md). Narrower types: max|a − b| <= 4 · u · √n · max|b|, the probabilistic bound of a chain of sums
// (Higham and Mary 2019), u the unit round-off and n the sum of the lengths of the reductions on the way to a logit
// (twice that for a gradient), with a floor of u · the global gradient norm. Parameters after the steps are compared in
// fp64 only: Adam divides by √v, so an element whose gradient is round-off moves by a whole lr either way.
#include <hdf5.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "ops/ops.h"
#include "parallel/device_communicator.h"
#include "train/session.h"

namespace annulus {
namespace {

using nlohmann::json;

struct CaseFile {
  hid_t file;
  explicit CaseFile(const std::string& path) : file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)) {
    if (file < 0) throw DataError(path + ": not an HDF5 file");
  }
  ~CaseFile() { H5Fclose(file); }

  std::vector<double> read(const std::string& name) const {
    const hid_t set = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
    if (set < 0) throw DataError("no dataset " + name);
    const hid_t space = H5Dget_space(set);
    std::vector<double> out(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
    H5Dread(set, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data());
    H5Sclose(space);
    H5Dclose(set);
    return out;
  }

  json config() const {
    const hid_t attribute = H5Aopen(file, "config", H5P_DEFAULT);
    const hid_t type = H5Aget_type(attribute);
    char* text = nullptr;
    H5Aread(attribute, type, &text);
    json out = json::parse(text);
    H5free_memory(text);
    H5Tclose(type);
    H5Aclose(attribute);
    return out;
  }
};

struct Options {
  std::string dir, precision = "fp64", device = "cpu", layout = "zigzag", recompute = "none";
  int data = 1;
};

model::ModelConfig model_config(const json& c) {
  model::ModelConfig m;
  m.vocab_size = c["vocab_size"];
  m.hidden_size = c["hidden_size"];
  m.intermediate_size = c["intermediate_size"];
  m.num_hidden_layers = c["num_hidden_layers"];
  m.num_attention_heads = c["num_attention_heads"];
  m.num_key_value_heads = c["num_key_value_heads"];
  m.head_dim = c["head_dim"];
  m.rms_norm_eps = c["rms_norm_eps"];
  m.rope_theta = c["rope_theta"];
  m.tie_word_embeddings = c["tie_word_embeddings"];
  m.qk_norm = c["qk_norm"];
  m.attention_bias = c["attention_bias"];
  m.attention.clear();
  for (const auto& kind : c["attention"]) {
    m.attention.push_back(kind == "nsa" ? model::AttentionKind::nsa : model::AttentionKind::dense);
  }
  const auto& n = c["nsa"];
  m.nsa = {.kv = n["kv"],
           .compression = n["compression"],
           .rope = n["rope"],
           .block = n["block"],
           .stride = n["stride"],
           .hidden = n["hidden"],
           .select_block = n["select_block"],
           .select_count = n["select_count"],
           .init_blocks = n["init_blocks"],
           .local_blocks = n["local_blocks"],
           .window = n["window"]};
  m.resolve();
  m.validate();
  return m;
}

class Check {
 public:
  Check(const Options& options, parallel::MpiRuntime& runtime, const CaseFile& file)
      : options_(options), runtime_(runtime), file_(file), config_(file.config()) {}

  // Empty if the case does not fit these ranks; else whether all comparisons hold.
  std::string run();
  bool failed() const { return !failures_.empty(); }
  const std::vector<std::string>& failures() const { return failures_; }
  double worst() const { return worst_; }
  // Lists of blocks that differ from the oracle's, of all of them (narrow types only: in fp64 one is a failure).
  std::int64_t flips() const { return flips_; }
  std::int64_t num_lists() const { return num_lists_; }

 private:
  void load_parameters();
  void load_batch();
  void check_selection();
  void unpin_selection();
  void check_logits();
  void check_gradients();
  void check_steps();
  double tolerance(bool gradient) const;
  void compare(const std::string& what, double error, double scale, double tolerance, double floor = 0);
  void compare_flat(const std::string& group, const TensorView& flat, double floor);
  TensorView host_copy(const TensorView& t);
  double reduced(double x, parallel::ReduceOp op);
  double reduced_max(double x) { return reduced(std::isnan(x) ? INFINITY : x, parallel::ReduceOp::max); }
  double reduced_sum(double x) { return reduced(x, parallel::ReduceOp::sum); }

  const Options& options_;
  parallel::MpiRuntime& runtime_;
  const CaseFile& file_;
  json config_;
  std::unique_ptr<ComputeDevice> device_;
  std::unique_ptr<parallel::Mesh> mesh_;
  std::unique_ptr<train::Engine> engine_;
  std::vector<std::byte> staging_;
  std::int64_t own_batch_ = 0, targets_ = 0, tokens_ = 0, batch_ = 0;
  double global_norm_ = 0, largest_logit_ = 0;
  std::vector<std::string> failures_;
  double worst_ = 0;  // error over bound
  std::int64_t flips_ = 0, num_lists_ = 0;
  std::vector<std::unique_ptr<Arena>> pinned_;  // by layer: the oracle's selection of the local rows
};

double at(const TensorView& t, std::int64_t i) {
  switch (t.dtype) {
    case DType::f64:
      return t.as<double>()[i];
    case DType::f32:
      return t.as<float>()[i];
    case DType::bf16:
      return to_float(t.as<BFloat16>()[i]);
    default:
      throw Error("no float type");
  }
}

void put(const TensorView& t, std::int64_t i, double x) {
  switch (t.dtype) {
    case DType::f64:
      t.as<double>()[i] = x;
      break;
    case DType::f32:
      t.as<float>()[i] = static_cast<float>(x);
      break;
    case DType::bf16:
      t.as<BFloat16>()[i] = to_bfloat16(static_cast<float>(x));
      break;
    default:
      throw Error("no float type");
  }
}

double Check::tolerance(bool gradient) const {
  if (options_.precision == "fp64") return 1e-9;
  const double unit = options_.precision == "bf16" ? 0x1p-8 : 0x1p-24;
  const auto& m = engine_->options().model;
  const double layer = static_cast<double>(2 * m.hidden_size + m.intermediate_size +
                                           m.num_attention_heads * m.head_dim + m.head_dim + tokens_);
  const double n = layer * static_cast<double>(m.num_hidden_layers) + static_cast<double>(m.hidden_size);
  return 4 * unit * std::sqrt(n * (gradient ? 2 : 1));
}

double Check::reduced(double x, parallel::ReduceOp op) {
  Context host;
  auto& world = runtime_.world();
  world.wait(host, world.all_reduce(host, host_view(&x, {1}), op));
  return x;
}

void Check::compare(const std::string& what, double error, double scale, double tolerance, double floor) {
  error = reduced_max(error);
  const double bound = std::max(tolerance * scale, floor);
  worst_ = std::max(worst_, error / bound);
  if (!(error <= bound)) failures_.push_back(fmt::format("{}: off by {:.3g}, allowed {:.3g}", what, error, bound));
}

TensorView Check::host_copy(const TensorView& t) {
  staging_.resize(static_cast<std::size_t>(t.bytes()));
  const TensorView host{staging_.data(), t.dtype, DeviceKind::cpu, t.shape};
  copy(engine_->context(), t, host);
  synchronize(engine_->context());
  return host;
}

std::string Check::run() {
  const auto model = model_config(config_);
  if (options_.device == "cuda" && model.has_nsa()) return "native sparse attention runs on CPU ranks only";
  const int ranks = runtime_.world().size(), sequence = ranks / options_.data;
  tokens_ = config_["tokens"];
  batch_ = config_["batch"];
  if (batch_ % options_.data)
    return fmt::format("a batch of {} does not split over {} replicas", batch_, options_.data);
  const auto layout = options_.layout == "contiguous" ? parallel::LayoutKind::contiguous : parallel::LayoutKind::zigzag;
  try {
    (void)train::sequence_layout(model, layout, tokens_, sequence);
  } catch (const ConfigError& error) {
    return error.what();
  }
  own_batch_ = batch_ / options_.data;

  device_ = std::make_unique<ComputeDevice>(
      make_compute_device(options_.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu, runtime_.local_rank()));
  mesh_ = std::make_unique<parallel::Mesh>(runtime_.world(),
                                           std::vector<parallel::Axis>{{"data", options_.data}, {"sequence", sequence}},
                                           parallel::device_communicators(*device_));
  optim::OptimizerConfig optimizer;
  const auto& o = config_["optim"];
  optimizer.lr = o["lr"];
  optimizer.beta1 = o["beta1"];
  optimizer.beta2 = o["beta2"];
  optimizer.eps = o["eps"];
  optimizer.weight_decay = o["weight_decay"];
  optimizer.grad_clip = o["grad_clip"];
  engine_ =
      std::make_unique<train::Engine>(*device_, *mesh_,
                                      train::EngineOptions{.model = model,
                                                           .dtype = train::parse_precision(options_.precision),
                                                           .layout = layout,
                                                           .sequence_length = tokens_,
                                                           .batch = own_batch_,
                                                           .recompute = model::parse_recompute(options_.recompute),
                                                           .optimizer = optimizer});
  engine_->plan();
  engine_->commit();
  load_parameters();
  load_batch();
  check_selection();
  check_logits();
  check_gradients();
  unpin_selection();
  check_steps();
  return {};
}

void Check::load_parameters() {
  engine_->initialize(0);  // optimiser state to zero
  auto& store = engine_->store();
  for (const auto& e : store.entries()) {
    const auto values = file_.read("params/" + e.name);
    std::vector<std::byte> bytes(values.size() * size_of(store.values().dtype));
    const TensorView host{bytes.data(), store.values().dtype, DeviceKind::cpu, {e.count}};
    for (std::int64_t i = 0; i < e.count; ++i) put(host, i, values[static_cast<std::size_t>(i)]);
    copy(engine_->context(), host, store.values().rows(e.offset, e.count));
    synchronize(engine_->context());
  }
  for (const auto& slot : engine_->optimizer().slots()) {
    if (slot.name == "master")
      ops::cast(engine_->context(), {.x = store.shards().own(store.values()), .y = slot.state});
  }
}

void Check::load_batch() {
  const auto tokens = file_.read("inputs/tokens"), targets = file_.read("inputs/targets"),
             document = file_.read("inputs/document");
  targets_ = std::count_if(targets.begin(), targets.end(), [](double t) { return t >= 0; });
  const auto size = static_cast<std::size_t>(own_batch_ * tokens_);
  const auto from = static_cast<std::size_t>(mesh_->coordinate("data")) * size;
  std::vector<std::int32_t> token(size), target(size), start(size);
  for (std::size_t i = 0; i < size; ++i) {
    token[i] = static_cast<std::int32_t>(tokens[from + i]);
    target[i] = static_cast<std::int32_t>(targets[from + i]);
    const std::size_t t = i % static_cast<std::size_t>(tokens_);
    start[i] = t > 0 && document[from + i] == document[from + i - 1] ? start[i - 1] : static_cast<std::int32_t>(t);
  }
  engine_->load({token, target, start});
}

// Runs a forward pass and compares every list of selected blocks. In narrower types near-ties may fall the other way:
// such lists are counted, and from here to the gradients the oracle's selection is used, so that the rest can be
// compared.
void Check::check_selection() {
  const auto& model = engine_->options().model;
  if (!model.has_nsa()) return;
  const std::int64_t local = engine_->layout().local_tokens(), kv_heads = model.num_key_value_heads;
  const std::int64_t count = model.nsa.select_count;
  const int rank = mesh_->coordinate("sequence");
  std::map<std::int64_t, std::vector<std::int32_t>> wanted;
  std::int64_t differ = 0, lists = 0;
  for (std::int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (model.kind(layer) != model::AttentionKind::nsa) continue;
    const auto all = file_.read(fmt::format("expected/selected/{}", layer));
    auto& rows = wanted[layer];
    for (std::int64_t row = 0; row < own_batch_ * local; ++row) {
      const std::int64_t b = row / local + mesh_->coordinate("data") * own_batch_;
      const std::int64_t t = engine_->layout().global_index(rank, row % local);
      const auto from = all.begin() + (b * tokens_ + t) * kv_heads * count;
      for (std::int64_t i = 0; i < kv_heads * count; ++i) rows.push_back(static_cast<std::int32_t>(from[i]));
    }
  }
  engine_->model().on_attention([&](Context&, std::int64_t layer, const model::AttentionLayer::View& view) {
    if (!view.selected.shape.rank()) return;
    const TensorView host = host_copy(view.selected);
    const auto* got = host.as<std::int32_t>();
    const auto& expected = wanted.at(layer);
    for (std::size_t i = 0; i < expected.size(); i += static_cast<std::size_t>(count)) {
      differ += !std::equal(got + i, got + i + count, expected.begin() + static_cast<std::ptrdiff_t>(i));
      ++lists;
    }
  });
  (void)engine_->losses();
  engine_->model().on_attention(nullptr);
  flips_ = static_cast<std::int64_t>(reduced_sum(static_cast<double>(differ)));
  num_lists_ = static_cast<std::int64_t>(reduced_sum(static_cast<double>(lists)));
  if (options_.precision == "fp64" && flips_ > 0) {
    failures_.push_back(fmt::format("expected/selected: {} of {} lists differ", flips_, num_lists_));
  }
  for (auto& [layer, rows] : wanted) {
    auto& arena = pinned_.emplace_back(std::make_unique<Arena>("pinned", device_->kind, device_->allocator));
    TensorView view;
    for (int pass = 0; pass < 2; ++pass) {
      view = arena->allocate("selected", DType::i32, {own_batch_, local, kv_heads, count});
      if (pass == 0) arena->commit();
    }
    copy(engine_->context(), host_view(rows.data(), view.shape), view);
    synchronize(engine_->context());
    if (options_.precision != "fp64") engine_->model().pin_selection(layer, view);
  }
}

void Check::unpin_selection() {
  for (std::int64_t i = 0; i < engine_->options().model.num_hidden_layers; ++i) engine_->model().pin_selection(i, {});
}

void Check::check_logits() {
  const auto expected = file_.read("expected/logits");
  const std::int64_t vocab = engine_->options().model.vocab_size, local = engine_->layout().local_tokens();
  Arena arena("logits", device_->kind, device_->allocator);
  TensorView logits;
  for (int pass = 0; pass < 2; ++pass) {
    logits = arena.allocate("logits", engine_->options().dtype, {own_batch_ * local, vocab});
    if (pass == 0) arena.commit();
  }
  engine_->logits(logits);
  const TensorView host = host_copy(logits);
  double error = 0, scale = 0;
  for (const double x : expected) scale = std::max(scale, std::abs(x));
  for (std::int64_t row = 0; row < own_batch_ * local; ++row) {
    const std::int64_t b = row / local + mesh_->coordinate("data") * own_batch_;
    const std::int64_t t = engine_->layout().global_index(mesh_->coordinate("sequence"), row % local);
    for (std::int64_t v = 0; v < vocab; ++v) {
      const double e =
          std::abs(at(host, row * vocab + v) - expected[static_cast<std::size_t>((b * tokens_ + t) * vocab + v)]);
      error = e <= error ? error : e;  // NaN stays
    }
  }
  compare("logits", error, scale, tolerance(false));
  largest_logit_ = scale;
}

void Check::compare_flat(const std::string& group, const TensorView& flat, double floor) {
  for (const auto& e : engine_->store().entries()) {
    const auto expected = file_.read(group + "/" + e.name);
    const TensorView host = host_copy(flat.rows(e.offset, e.count));
    double error = 0, scale = 0;
    for (std::int64_t i = 0; i < e.count; ++i) {
      const double wanted = expected[static_cast<std::size_t>(i)], d = std::abs(at(host, i) - wanted);
      scale = std::max(scale, std::abs(wanted));
      error = d <= error ? error : d;
    }
    compare(group + "/" + e.name, error, scale, tolerance(true), floor);
  }
}

void Check::check_gradients() {
  auto& store = engine_->store();
  auto& ctx = engine_->context();
  global_norm_ = file_.read("expected/step_grad_norm")[0];
  engine_->zero_gradients();
  engine_->forward_backward(1 / static_cast<double>(targets_));
  store.shards().reduce_gradients(ctx, mesh_->device_world(), store.gradients());
  store.shards().gather_parameters(ctx, mesh_->device_world(), store.gradients());
  // Gradients that are mathematically zero are round-off of the whole: a floor by the global norm.
  const double unit = options_.precision == "bf16" ? 0x1p-8 : 0x1p-24;
  const double floor = (options_.precision == "fp64" ? 1e-14 : unit) * global_norm_;
  compare_flat("expected/grads", store.gradients(), floor);
}

void Check::check_steps() {
  const auto losses = file_.read("expected/step_loss"), norms = file_.read("expected/step_grad_norm");
  const auto& o = config_["optim"];
  engine_->zero_gradients();  // and the loss of the gradient check
  (void)engine_->optimizer_step(0, 0, 1);
  load_parameters();
  for (std::int64_t k = 1; k <= 4; ++k) {
    engine_->zero_gradients();
    engine_->forward_backward(1 / static_cast<double>(targets_));
    const auto result = engine_->optimizer_step(k <= 3 ? o["lr"].get<double>() : 0.0, o["grad_clip"], k);
    const auto i = static_cast<std::size_t>(k - 1);
    // A loss is a difference of logits: where it has become small its error is still theirs.
    const double scale = options_.precision == "fp64" ? losses[i] : std::max(losses[i], largest_logit_);
    compare(fmt::format("loss before step {}", k),
            std::abs(result.loss_sum / static_cast<double>(targets_) - losses[i]), scale, tolerance(k > 1));
    if (k > 3) break;
    compare(fmt::format("gradient norm of step {}", k), std::abs(result.grad_norm - norms[i]), norms[i],
            tolerance(true));
    if (k == 3 && options_.precision == "fp64") compare_flat("expected/params_after", engine_->store().values(), 0);
  }
}

int run(const Options& options, parallel::MpiRuntime& runtime) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(options.dir)) {
    if (entry.path().extension() == ".h5") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  if (paths.empty()) throw DataError(options.dir + ": no *.h5 case in it");
  int passed = 0, failed = 0, skipped = 0;
  const bool root = runtime.world().rank() == 0;
  for (const auto& path : paths) {
    const CaseFile file(path);
    Check check(options, runtime, file);
    const std::string why = check.run();
    const std::string name = std::filesystem::path(path).stem();
    (why.empty() ? check.failed() ? failed : passed : skipped) += 1;
    if (!root) continue;
    if (!why.empty()) fmt::print("skipped  {}: {}\n", name, why);
    else
      fmt::print(
          "{}  {} (worst error {:.2g} of its bound{})\n", check.failed() ? "FAILED " : "passed ", name, check.worst(),
          check.num_lists() ? fmt::format("; {} of {} selections differ", check.flips(), check.num_lists()) : "");
    for (const auto& text : check.failures()) fmt::print("         {}\n", text);
  }
  if (root) fmt::print("{} passed, {} failed, {} skipped\n", passed, failed, skipped);
  return failed > 0 || passed == 0 ? 1 : 0;
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  annulus::parallel::MpiRuntime runtime(&argc, &argv);
  annulus::Options options;
  std::map<std::string, std::string*> flags{{"--precision", &options.precision},
                                            {"--device", &options.device},
                                            {"--layout", &options.layout},
                                            {"--recompute", &options.recompute}};
  try {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--data" && i + 1 < argc) options.data = std::max(1, std::atoi(argv[++i]));
      else if (flags.count(word) && i + 1 < argc) *flags[word] = argv[++i];
      else if (options.dir.empty() && word[0] != '-') options.dir = word;
      else throw annulus::UsageError("unknown argument " + word);
    }
    if (options.dir.empty())
      throw annulus::UsageError(
          "usage: oracle_check DIR [--precision fp64|fp32|bf16] [--device cpu|cuda] "
          "[--data N] [--layout zigzag|contiguous] [--recompute none|keep_attention|block]");
    if (options.device == "cuda" && annulus::device_count(annulus::DeviceKind::cuda) < runtime.local_size()) {
      fmt::print(stderr, "oracle_check: {} GPUs for {} ranks: skipped\n",
                 annulus::device_count(annulus::DeviceKind::cuda), runtime.local_size());
      return 77;
    }
    return annulus::run(options, runtime);
  } catch (const annulus::Error& error) {
    fmt::print(stderr, "oracle_check: error: {}\n", error.what());
    runtime.abort(error.exit_code());
  }
}
