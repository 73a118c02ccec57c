// A mesh without ranks: sizes for a dry run (Context::planning), nothing behind them.
#include "parallel/mesh.h"

namespace annulus::parallel {
namespace {

class PlannedCommunicator final : public Communicator {
 public:
  explicit PlannedCommunicator(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }

  Handle all_reduce(Context& ctx, TensorView, ReduceOp) override { return nothing(ctx); }
  Handle all_gather(Context& ctx, TensorView, TensorView) override { return nothing(ctx); }
  Handle reduce_scatter(Context& ctx, TensorView, TensorView) override { return nothing(ctx); }
  Handle shift(Context& ctx, TensorView, TensorView, int) override { return nothing(ctx); }
  Handle broadcast(Context& ctx, TensorView, int) override { return nothing(ctx); }
  void wait(Context& ctx, Handle) override { nothing(ctx); }
  void barrier() override { ANNULUS_CHECK(false, "planned ranks cannot meet"); }
  std::unique_ptr<Communicator> split(int, int) override { return std::make_unique<PlannedCommunicator>(size_); }

 private:
  static Handle nothing(const Context& ctx) {
    ANNULUS_CHECK(ctx.planning, "planned ranks cannot communicate");
    return {};
  }
  int size_;
};

}  // namespace

std::unique_ptr<Mesh> Mesh::planned(std::vector<Axis> axes) {
  std::unique_ptr<Mesh> mesh(new Mesh);
  int world = 1, sequence = 1;
  for (const Axis& axis : axes) {
    world *= axis.size;
    if (axis.name == "sequence") sequence = axis.size;
    mesh->host_axes_.push_back(std::make_unique<PlannedCommunicator>(axis.size));
    mesh->device_axes_.push_back(std::make_unique<PlannedCommunicator>(axis.size));
  }
  mesh->coordinates_.assign(axes.size(), 0);
  mesh->axes_ = std::move(axes);
  mesh->planned_world_ = std::make_unique<PlannedCommunicator>(world);
  mesh->world_ = mesh->planned_world_.get();
  mesh->device_world_ = std::make_unique<PlannedCommunicator>(world);
  mesh->kv_ring_ = std::make_unique<PlannedCommunicator>(sequence);
  mesh->dkv_ring_ = std::make_unique<PlannedCommunicator>(sequence);
  return mesh;
}

}  // namespace annulus::parallel
