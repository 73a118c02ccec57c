#include "data/fingerprint.h"

#include <xxhash.h>

#include <memory>

#include "core/error.h"

namespace annulus::data {
namespace {

constexpr std::size_t kWholeFile = 256u << 20, kEnd = 64u << 20, kBlock = 64u << 10, kNumBlocks = 1024;

void append_bytes(std::string& fields, char tag, std::uint64_t number) {
  fields.push_back(tag);
  for (int shift = 0; shift < 64; shift += 8) fields.push_back(static_cast<char>(number >> shift & 0xff));
}

XXH128_hash_t hash_content(std::string_view bytes) {
  if (bytes.size() <= kWholeFile) return XXH3_128bits(bytes.data(), bytes.size());
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  ANNULUS_CHECK(state != nullptr && XXH3_128bits_reset(state.get()) == XXH_OK, "no memory for a hash");
  const auto update = [&](std::string_view part) { XXH3_128bits_update(state.get(), part.data(), part.size()); };
  update(bytes.substr(0, kEnd));
  const std::size_t step = (bytes.size() - 2 * kEnd - kBlock) / (kNumBlocks - 1);
  for (std::size_t i = 0; i < kNumBlocks; ++i) update(bytes.substr(kEnd + i * step, kBlock));
  update(bytes.substr(bytes.size() - kEnd));
  return XXH3_128bits_digest(state.get());
}

}  // namespace

void Fingerprint::add(std::string_view text) {
  append_bytes(fields_, 't', text.size());
  fields_ += text;
}

void Fingerprint::add(std::int64_t number) { append_bytes(fields_, 'n', static_cast<std::uint64_t>(number)); }

void Fingerprint::add_file(std::string_view bytes) {
  const XXH128_hash_t hash = hash_content(bytes);
  append_bytes(fields_, 'f', bytes.size());
  append_bytes(fields_, 'h', hash.high64);
  append_bytes(fields_, 'h', hash.low64);
}

std::string Fingerprint::hex() const {
  const XXH128_hash_t hash = XXH3_128bits(fields_.data(), fields_.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace annulus::data
