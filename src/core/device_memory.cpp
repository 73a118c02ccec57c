#include "core/device_memory.h"

#include <cstring>

#ifdef ANNULUS_CUDA
#include "core/cuda/device_memory.h"
#endif

namespace annulus {
namespace {

#ifndef ANNULUS_CUDA
[[noreturn]] void fail_without_cuda() {
  throw ConfigError("this program was built without CUDA: build the preset `cuda`, or set device = \"cpu\"");
}
#endif

}  // namespace

int device_count(DeviceKind kind) {
  if (kind == DeviceKind::cpu) return 1;
#ifdef ANNULUS_CUDA
  return cuda::device_count();
#else
  return 0;
#endif
}

ComputeDevice make_compute_device(DeviceKind kind, [[maybe_unused]] int host_local_rank) {
  if (kind == DeviceKind::cpu) return {};
#ifdef ANNULUS_CUDA
  return cuda::make_compute_device(host_local_rank);
#else
  fail_without_cuda();
#endif
}

Context make_device_context(const ComputeDevice& device) {
  Context ctx;
  ctx.device = device.kind;
  ctx.cuda = device.cuda.get();
  return ctx;
}

void copy([[maybe_unused]] Context& ctx, const TensorView& from, const TensorView& to) {
  ANNULUS_CHECK(from.dtype == to.dtype && from.numel() == to.numel(), "cannot copy {} {} to {} {}", name_of(from.dtype),
                from.shape.str(), name_of(to.dtype), to.shape.str());
  if (ctx.planning || from.numel() == 0) return;
  if (from.device == DeviceKind::cpu && to.device == DeviceKind::cpu) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes()));
    return;
  }
#ifdef ANNULUS_CUDA
  cuda::copy(ctx, from, to);
#else
  fail_without_cuda();
#endif
}

void Fence::set([[maybe_unused]] Context& ctx) {
  if (ctx.device == DeviceKind::cpu || ctx.planning) return;
#ifdef ANNULUS_CUDA
  cuda::record(ctx, event_);
#else
  fail_without_cuda();
#endif
}

void Fence::wait() {
#ifdef ANNULUS_CUDA
  if (event_) cuda::wait(event_);
#endif
}

double Fence::milliseconds_since([[maybe_unused]] const Fence& earlier) const {
#ifdef ANNULUS_CUDA
  if (event_ && earlier.event_) return cuda::milliseconds_between(earlier.event_, event_);
#endif
  return 0;
}

void synchronize([[maybe_unused]] Context& ctx) {
  if (ctx.device == DeviceKind::cpu) return;
#ifdef ANNULUS_CUDA
  cuda::synchronize(ctx);
#else
  fail_without_cuda();
#endif
}

}  // namespace annulus
