// Arena: one block of memory on a device, planned before it is taken.
//
// Before commit() allocate() only counts and returns views without data; commit() takes the block and rewinds; the same
// sequence of calls then hands out memory. A scratch arena is used as a stack: Scope releases what was allocated in it,
// and its plan is the high-water mark of a dry run of the step (Context::planning). Blocks are 256-byte aligned.
// Running out is an internal error, since the plan was wrong. An arena owns its memory; not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace annulus {

// How a device takes and gives back memory. The CPU's is built in; CUDA's is in core/cuda/.
struct Allocator {
  std::function<void*(std::int64_t bytes)> take;
  std::function<void(void*)> give_back;
};
const Allocator& cpu_allocator();  // 4096-byte aligned, zero-filled

class Arena {
 public:
  struct Block {  // for the allocation report
    std::string name;
    std::int64_t bytes;
  };

  Arena(std::string name, DeviceKind device, Allocator allocator = cpu_allocator());
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  TensorView allocate(const char* name, DType dtype, const Shape& shape);
  void commit();  // once
  bool committed() const { return memory_ != nullptr; }

  const std::string& name() const { return name_; }
  DeviceKind device() const { return device_; }
  std::int64_t planned_bytes() const { return high_water_; }  // what commit() takes or took
  std::int64_t used() const { return used_; }
  const std::vector<Block>& blocks() const { return blocks_; }  // planned blocks in order, scopes included

  class Scope {  // releases on destruction what was allocated since construction
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.used_) {}
    ~Scope() { arena_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    std::int64_t mark_;
  };

  // Number of blocks of memory ever taken by any arena of this process: a steady step takes none.
  static std::int64_t num_commits();

 private:
  std::string name_;
  DeviceKind device_;
  Allocator allocator_;
  char* memory_ = nullptr;
  std::int64_t used_ = 0;
  std::int64_t high_water_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace annulus
