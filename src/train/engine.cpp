#include "train/engine.h"

#include <algorithm>
#include <cmath>

#include "parallel/ring.h"

namespace annulus::train {
namespace {

std::int32_t* i32(const TensorView& view) { return view.as<std::int32_t>(); }

}  // namespace

parallel::SequenceLayout sequence_layout(const model::ModelConfig& model, parallel::LayoutKind kind,
                                         std::int64_t tokens, int ranks) {
  if (!model.has_nsa()) return {kind, tokens, ranks};
  const auto shape = model.nsa.shape();
  return {kind, tokens, ranks, shape.chunk_multiple(), shape.min_chunk()};
}

Engine::Engine(const ComputeDevice& device, parallel::Mesh& mesh, const EngineOptions& options)
    : options_(options),
      device_(device),
      mesh_(mesh),
      ctx_(make_device_context(device)),
      layout_(sequence_layout(options.model, options.layout, options.sequence_length, mesh.size("sequence"))),
      model_(options.model),
      store_(model_, mesh.world().rank(), mesh.world().size()),
      parameters_("parameters", device.kind, device.allocator),
      gradients_("gradients", device.kind, device.allocator),
      optimizer_state_("optimizer", device.kind, device.allocator),
      activations_("activations", device.kind, device.allocator),
      scratch_("scratch", device.kind, device.allocator),
      host_("host", DeviceKind::cpu, device.host_allocator) {
  if (device.kind == DeviceKind::cuda && options.model.has_nsa()) {
    throw ConfigError(
        "model.attention: \"nsa\" layers run on CPU ranks only in this version; expected \"dense\" layers on a GPU. "
        "Set "
        "parallel.device = \"cpu\"");
  }
  ctx_.scratch = &scratch_;
  ctx_.deterministic = options.deterministic;
  first_.resize(static_cast<std::size_t>(options_.batch * options_.sequence_length));
  if (!options_.training) return;
  optimizer_ = optim::make_optimizer(options_.optimizer);
  const auto& shards = store_.shards();
  for (const auto& part : store_.parts(shards.begin(), shards.shard())) {
    segments_.push_back({part.flat - shards.begin(), part.count, part.entry->decays});
  }
}

void Engine::allocate() {
  const std::int64_t batch = options_.batch, local = layout_.local_tokens(), rows = batch * local;
  const DType dtype = options_.dtype, stat = stat_type(dtype);
  store_.allocate_values(parameters_, dtype);
  const model::ModelSizes sizes{dtype, batch, local};
  if (options_.training) {
    store_.allocate_gradients(gradients_);
    optimizer_->allocate(optimizer_state_, dtype, store_.shards().shard());
    model_.allocate_training(activations_, sizes, options_.recompute);
  } else {
    model_.allocate_evaluation(activations_, sizes);
  }
  batch_.token = activations_.allocate("tokens", DType::i32, {rows});
  batch_.target = activations_.allocate("targets", DType::i32, {rows});
  batch_.position = activations_.allocate("positions", DType::i32, {rows});
  batch_.sequence.global_first = activations_.allocate("first visible token", DType::i32, {batch, local});
  batch_.sequence.global_last = activations_.allocate("last visible token", DType::i32, {batch, local});
  batch_.sequence.document_start = activations_.allocate("document start", DType::i32, {batch, local});
  losses_ = activations_.allocate("losses", stat, {rows});
  correct_ = activations_.allocate("correct", DType::i32, {rows});
  scalars_ = activations_.allocate("step scalars", DType::f64, {4});
  for (auto* staged : {&host_token_, &host_target_, &host_position_}) {
    *staged = host_.allocate("batch staging", DType::i32, {rows});
  }
  for (auto* staged : {&host_first_, &host_last_, &host_start_})
    *staged = host_.allocate("batch staging", DType::i32, {batch, local});
  host_losses_ = host_.allocate("losses", stat, {rows});
  host_correct_ = host_.allocate("correct", DType::i32, {rows});
  host_scalars_ = host_.allocate("step scalars", DType::f64, {4});
  batch_.sequence.layout = &layout_;
  batch_.sequence.mesh = &mesh_;
  batch_.sequence.batch = batch;
  batch_.sequence.hops = batch_.sequence.document_hops = parallel::all_hops(mesh_.size("sequence"));
}

void Engine::plan() {
  allocate();
  ctx_.planning = true;
  if (options_.training) {
    forward_backward(1);
    (void)optimizer_step(0, 0, 1);
  }
  model_.forward_losses(ctx_, batch_, losses_, correct_);
  ctx_.planning = false;
}

void Engine::commit() {
  for (Arena* arena : {&parameters_, &gradients_, &optimizer_state_, &activations_, &scratch_, &host_}) arena->commit();
  allocate();
  model_.upload_constants(ctx_);
  ops::fill(ctx_, {.y = scalars_, .value = 0});
}

std::vector<const Arena*> Engine::arenas() const {
  return {&parameters_, &gradients_, &optimizer_state_, &activations_, &scratch_, &host_};
}

std::int64_t Engine::planned_bytes() const {
  std::int64_t bytes = 0;
  for (const Arena* arena : arenas()) bytes += arena->planned_bytes();
  return bytes;
}

void Engine::initialize(std::uint64_t seed) {
  // Every rank draws its own shard only; the gather gives all ranks the same bits. Masters keep what bf16 weights
  // round.
  const auto& shards = store_.shards();
  const TensorView own = shards.own(store_.values());
  TensorView drawn;
  std::vector<double> wide;
  std::vector<float> narrow;
  if (options_.dtype == DType::f64) {
    wide.resize(static_cast<std::size_t>(shards.shard()));
    store_.initial_values(seed, shards.begin(), wide);
    drawn = host_view(wide.data(), {shards.shard()});
  } else {
    narrow.resize(static_cast<std::size_t>(shards.shard()));
    store_.initial_values(seed, shards.begin(), narrow);
    drawn = host_view(narrow.data(), {shards.shard()});
  }
  std::vector<std::uint16_t> rounded;
  if (options_.dtype == DType::bf16) {
    for (const float x : narrow) rounded.push_back(to_bfloat16(x).bits);
    copy(ctx_, {rounded.data(), DType::bf16, DeviceKind::cpu, {shards.shard()}}, own);
  } else {
    copy(ctx_, drawn, own);
  }
  if (optimizer_) {
    for (const auto& slot : optimizer_->slots()) {
      if (slot.name == "master") copy(ctx_, drawn, slot.state);
      else ops::fill(ctx_, {.y = slot.state, .value = 0});
    }
  }
  synchronize(ctx_);
  gather_weights();
}

void Engine::gather_weights() {
  store_.shards().gather_parameters(ctx_, mesh_.device_world(), store_.values());
  synchronize(ctx_);
}

void Engine::load(const Sequences& in) {
  const std::int64_t tokens = options_.sequence_length, local = layout_.local_tokens();
  const int rank = mesh_.coordinate("sequence");
  const std::int64_t window = options_.model.sliding_window;
  auto* first = first_.data();
  staged_.wait();  // the copies of the micro-batch before may not have begun
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t from = b * tokens;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t start = in.document_start[static_cast<std::size_t>(from + t)];
      first[from + t] = static_cast<std::int32_t>(window > 0 ? std::max(start, t - window + 1) : start);
    }
    for (std::int64_t row = 0; row < local; ++row) {
      const std::int64_t t = layout_.global_index(rank, row), at = from + t, to = b * local + row;
      i32(host_token_)[to] = in.tokens[static_cast<std::size_t>(at)];
      i32(host_target_)[to] = in.targets[static_cast<std::size_t>(at)];
      i32(host_position_)[to] = static_cast<std::int32_t>(t - in.document_start[static_cast<std::size_t>(at)]);
      i32(host_first_)[to] = first[at];
      i32(host_last_)[to] = static_cast<std::int32_t>(t);
      i32(host_start_)[to] = in.document_start[static_cast<std::size_t>(at)];
    }
  }
  copy(ctx_, host_token_, batch_.token);
  copy(ctx_, host_target_, batch_.target);
  copy(ctx_, host_position_, batch_.position);
  copy(ctx_, host_first_, batch_.sequence.global_first);
  copy(ctx_, host_last_, batch_.sequence.global_last);
  copy(ctx_, host_start_, batch_.sequence.document_start);
  staged_.set(ctx_);
  batch_.sequence.hops = attention::needed_hops(layout_, first_, options_.batch);
  batch_.sequence.document_hops = attention::needed_hops(layout_, in.document_start, options_.batch);
}

void Engine::zero_gradients() { ops::fill(ctx_, {.y = store_.gradients(), .value = 0}); }

void Engine::forward_backward(double scale) { model_.forward_backward(ctx_, batch_, scale, scalars_.rows(0, 1)); }

StepResult Engine::optimizer_step(double lr, double grad_clip, std::int64_t step) {
  ctx_.at(Phase::optimizer);
  auto& world = mesh_.device_world();
  const auto& shards = store_.shards();
  const TensorView gradient = shards.own(store_.gradients()), factor = scalars_.rows(3, 1);
  shards.reduce_gradients(ctx_, world, store_.gradients());
  ops::sum_squares(ctx_, {.x = gradient, .result = scalars_.rows(1, 1)});
  world.wait(ctx_, world.all_reduce(ctx_, scalars_.rows(0, 2), parallel::ReduceOp::sum));
  ops::clip_factor(ctx_, {.sum_squares = scalars_.rows(1, 1),
                          .loss = scalars_.rows(0, 1),
                          .norm = scalars_.rows(2, 1),
                          .factor = factor,
                          .max_norm = grad_clip});
  optimizer_->step(
      ctx_, segments_,
      {.param = shards.own(store_.values()), .gradient = gradient, .clip_factor = factor, .lr = lr, .step = step});
  shards.gather_parameters(ctx_, world, store_.values());
  if (ctx_.planning) return {};
  copy(ctx_, scalars_, host_scalars_);
  ops::fill(ctx_, {.y = scalars_.rows(0, 1), .value = 0});
  synchronize(ctx_);
  const double* s = host_scalars_.as<double>();
  return {s[0], s[2], std::isfinite(s[3])};
}

std::span<const double> Engine::losses() {
  model_.forward_losses(ctx_, batch_, losses_, correct_);
  copy(ctx_, losses_, host_losses_);
  copy(ctx_, correct_, host_correct_);
  synchronize(ctx_);
  loss_values_.resize(static_cast<std::size_t>(losses_.numel()));
  if (losses_.dtype == DType::f64) std::copy_n(host_losses_.as<double>(), losses_.numel(), loss_values_.begin());
  else std::copy_n(host_losses_.as<float>(), losses_.numel(), loss_values_.begin());
  return loss_values_;
}

std::span<const std::int32_t> Engine::correct() const {
  return {i32(host_correct_), static_cast<std::size_t>(host_correct_.numel())};
}

}  // namespace annulus::train
