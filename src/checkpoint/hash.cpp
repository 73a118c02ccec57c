#include "checkpoint/hash.h"

#include <xxhash.h>

#include "core/error.h"

namespace annulus::checkpoint {
namespace {

std::string hex(XXH128_hash_t hash) { return fmt::format("{:016x}{:016x}", hash.high64, hash.low64); }

struct FreeState {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

}  // namespace

struct Hasher::State {
  std::unique_ptr<XXH3_state_t, FreeState> xxh{XXH3_createState()};
};

Hasher::Hasher() : state_(std::make_unique<State>()) {
  ANNULUS_CHECK(state_->xxh, "XXH3_createState: out of memory");
  XXH3_128bits_reset(state_->xxh.get());
}
Hasher::~Hasher() = default;

void Hasher::add(const void* data, std::size_t bytes) { XXH3_128bits_update(state_->xxh.get(), data, bytes); }
std::string Hasher::digest() const { return hex(XXH3_128bits_digest(state_->xxh.get())); }

std::string hash_of(const void* data, std::size_t bytes) { return hex(XXH3_128bits(data, bytes)); }

}  // namespace annulus::checkpoint
