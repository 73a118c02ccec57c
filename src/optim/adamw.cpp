// AdamW (arXiv 1711.05101; spec/model.md, Optimiser), and the factory of optimisers.
#include <cmath>

#include "ops/ops.h"
#include "optim/optimizer.h"

namespace annulus::optim {
namespace {

class AdamW : public Optimizer {
 public:
  explicit AdamW(const OptimizerConfig& config) : config_(config) {}

  void allocate(Arena& arena, DType dtype, std::int64_t size) override {
    const DType stat = stat_type(dtype);
    slots_ = {{"m", arena.allocate("adamw m", stat, {size})}, {"v", arena.allocate("adamw v", stat, {size})}};
    if (stat != dtype) slots_.push_back({"master", arena.allocate("master weights", stat, {size})});
  }

  const std::vector<Slot>& slots() const override { return slots_; }

  void step(Context& ctx, const std::vector<Segment>& segments, const Update& u) override {
    const auto k = static_cast<double>(u.step);
    for (const auto& s : segments) {
      auto part = [&](const TensorView& t) { return t.rows(s.begin, s.count); };
      ops::adamw(ctx, {.param = part(u.param),
                       .master = slots_.size() > 2 ? part(slots_[2].state) : TensorView{},
                       .m = part(slots_[0].state),
                       .v = part(slots_[1].state),
                       .grad = part(u.gradient),
                       .clip_factor = u.clip_factor,
                       .lr = u.lr,
                       .beta1 = config_.beta1,
                       .beta2 = config_.beta2,
                       .eps = config_.eps,
                       .weight_decay = s.decays ? config_.weight_decay : 0,
                       .bias_correction1 = 1 - std::pow(config_.beta1, k),
                       .bias_correction2 = 1 - std::pow(config_.beta2, k)});
    }
  }

 private:
  OptimizerConfig config_;
  std::vector<Slot> slots_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config) {
  if (config.type == "adamw") return std::make_unique<AdamW>(config);
  throw ConfigError(fmt::format("optimizer.type = \"{}\"; expected \"adamw\"", config.type));
}

}  // namespace annulus::optim
