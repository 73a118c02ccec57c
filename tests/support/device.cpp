#include "support/device.h"

#include <cstring>

namespace annulus::testing {
namespace {

constexpr auto kPoison = std::byte{0xff};

TensorView byte_view(void* data, std::int64_t bytes, DeviceKind device) { return {data, DType::u8, device, {bytes}}; }

}  // namespace

TestDevice::TestDevice(DeviceKind kind) : device_(make_compute_device(kind)), ctx_(make_device_context(device_)) {}

void TestDevice::commit_scratch() {
  const std::int64_t bytes = scratch_->planned_bytes();
  scratch_->commit();
  if (bytes == 0) return;
  std::vector<std::byte> poison(static_cast<std::size_t>(bytes), kPoison);
  const Arena::Scope scope(*scratch_);
  copy(ctx_, byte_view(poison.data(), bytes, DeviceKind::cpu), scratch_->allocate("poison", DType::u8, {bytes}));
  synchronize(ctx_);
}

GuardedTensors::~GuardedTensors() {
  if (memory_) device_.device().allocator.give_back(memory_);
}

std::size_t GuardedTensors::add(DType dtype, const Shape& shape, std::int64_t shift) {
  ANNULUS_CHECK(!memory_, "tensors are added before commit()");
  TensorView view{nullptr, dtype, device_.device().kind, shape};
  const std::int64_t offset = used_ + shift * static_cast<std::int64_t>(size_of(dtype));
  items_.push_back({view, offset});
  used_ = (offset + view.bytes() + kGuard + kGuard - 1) / kGuard * kGuard;
  return items_.size() - 1;
}

void GuardedTensors::commit() {
  image_.assign(static_cast<std::size_t>(used_), kPoison);
  memory_ = static_cast<char*>(device_.device().allocator.take(used_));
  for (auto& item : items_) item.view.data = memory_ + item.offset;
}

TensorView GuardedTensors::view(std::size_t index) const { return items_.at(index).view; }

std::byte* GuardedTensors::host(std::size_t index) { return image_.data() + items_.at(index).offset; }

void GuardedTensors::upload() {
  Context& ctx = device_.context();
  copy(ctx, byte_view(image_.data(), used_, DeviceKind::cpu), byte_view(memory_, used_, ctx.device));
  synchronize(ctx);
}

void GuardedTensors::download() {
  Context& ctx = device_.context();
  copy(ctx, byte_view(memory_, used_, ctx.device), byte_view(image_.data(), used_, DeviceKind::cpu));
  synchronize(ctx);
}

std::string GuardedTensors::check_guards() const {
  std::int64_t at = 0;
  for (std::size_t i = 0; i <= items_.size(); ++i) {
    const std::int64_t end = i < items_.size() ? items_[i].offset : used_;
    for (; at < end; ++at) {
      if (image_[static_cast<std::size_t>(at)] == kPoison) continue;
      if (i == 0) return fmt::format("a byte {} before tensor 0 was written", end - at);
      return fmt::format("a byte {} past the end of tensor {} was written",
                         at - items_[i - 1].offset - items_[i - 1].view.bytes(), i - 1);
    }
    if (i < items_.size()) at = end + items_[i].view.bytes();
  }
  return {};
}

}  // namespace annulus::testing
