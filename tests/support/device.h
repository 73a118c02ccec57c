// TestDevice: a Context for tests on either device. GuardedTensors: tensors in one block of its memory, each between
// guard bytes; every byte that holds no input is 0xff, a NaN in every floating-point type, so that reading an output or
// past an input shows, and writing past an output is found by check_guards().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/device_memory.h"

namespace annulus::testing {

class TestDevice {
 public:
  explicit TestDevice(DeviceKind kind);  // skip() first: ConfigError where there is none

  static bool present(DeviceKind kind) { return device_count(kind) > 0; }

  Context& context() { return ctx_; }
  const ComputeDevice& device() const { return device_; }

  // A scratch arena of exactly what `planned` took in a dry run, filled with 0xff.
  template <class Run>
  void plan_scratch(const Run& run) {
    scratch_ = std::make_unique<Arena>("test scratch", device_.kind, device_.allocator);
    ctx_.scratch = scratch_.get();
    ctx_.planning = true;
    run();
    ctx_.planning = false;
    commit_scratch();
  }

 private:
  void commit_scratch();

  ComputeDevice device_;
  Context ctx_;
  std::unique_ptr<Arena> scratch_;
};

class GuardedTensors {
 public:
  static constexpr std::int64_t kGuard = 256;  // bytes, before the first and after every tensor; also the alignment

  explicit GuardedTensors(TestDevice& device) : device_(device) {}
  ~GuardedTensors();
  GuardedTensors(const GuardedTensors&) = delete;
  GuardedTensors& operator=(const GuardedTensors&) = delete;

  // `shift` elements past an aligned address. Returns its index.
  std::size_t add(DType dtype, const Shape& shape, std::int64_t shift = 0);
  void commit();                             // takes the memory; views exist from here on
  TensorView view(std::size_t index) const;  // on the device
  std::byte* host(std::size_t index);        // the host image of a tensor's bytes
  void upload();                             // host image -> device, guards included
  void download();                           // device -> host image
  std::string check_guards() const;          // of the host image; empty, or which byte was written
  std::int64_t bytes(std::size_t index) const { return items_[index].view.bytes(); }

 private:
  struct Item {
    TensorView view;
    std::int64_t offset;
  };
  TestDevice& device_;
  std::vector<Item> items_;
  std::vector<std::byte> image_;
  std::int64_t used_ = kGuard;
  char* memory_ = nullptr;
};

}  // namespace annulus::testing
