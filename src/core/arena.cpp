#include "core/arena.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace annulus {
namespace {

constexpr std::int64_t kAlignment = 256;
std::atomic<std::int64_t> commits{0};

std::int64_t align_up(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

const Allocator& cpu_allocator() {
  static const Allocator allocator{
      [](std::int64_t bytes) {
        const std::int64_t rounded = (bytes + 4095) / 4096 * 4096;
        void* memory = std::aligned_alloc(4096, static_cast<std::size_t>(rounded));
        if (!memory)
          throw Error(fmt::format("out of memory: {:.2f} GiB could not be taken; lower train.micro_batch or "
                                  "train.sequence_length, recompute, or use more ranks",
                                  static_cast<double>(bytes) / (1 << 30)),
                      2);
        std::memset(memory, 0, static_cast<std::size_t>(rounded));
        return memory;
      },
      [](void* memory) { std::free(memory); }};
  return allocator;
}

Arena::Arena(std::string name, DeviceKind device, Allocator allocator)
    : name_(std::move(name)), device_(device), allocator_(std::move(allocator)) {}

Arena::~Arena() {
  if (memory_) allocator_.give_back(memory_);
}

TensorView Arena::allocate(const char* name, DType dtype, const Shape& shape) {
  TensorView view{nullptr, dtype, device_, shape};
  const std::int64_t bytes = align_up(view.bytes());
  if (memory_) {
    ANNULUS_CHECK(used_ + bytes <= high_water_, "arena {}: {} {} needs {} bytes, {} of {} are used", name_, name,
                  shape.str(), bytes, used_, high_water_);
    view.data = memory_ + used_;
  } else {
    blocks_.push_back({name, bytes});
  }
  used_ += bytes;
  if (!memory_) high_water_ = std::max(high_water_, used_);
  return view;
}

void Arena::commit() {
  ANNULUS_CHECK(!memory_, "arena {} is committed twice", name_);
  try {
    memory_ = static_cast<char*>(allocator_.take(std::max(high_water_, kAlignment)));
  } catch (const Error& error) {
    throw Error(fmt::format("{} for this rank's {}; use more ranks, a shorter train.sequence_length, a smaller "
                            "train.micro_batch or train.recompute (annulus plan shows what takes how much)",
                            error.what(), name_),
                error.exit_code());
  }
  used_ = 0;
  ++commits;
}

std::int64_t Arena::num_commits() { return commits; }

}  // namespace annulus
