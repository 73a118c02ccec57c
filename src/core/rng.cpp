#include "core/rng.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace annulus {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = 0xD2511F53ull * c[0];
    const std::uint64_t p1 = 0xCD9E8D57ull * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p0)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

CounterRng::CounterRng(std::uint64_t seed, std::string_view stream) : seed_(seed), stream_(hash_name(stream)) {}

std::array<std::uint32_t, 4> CounterRng::block(std::uint64_t index) const {
  return philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                 static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)},
                {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
}

std::uint64_t CounterRng::bits(std::uint64_t index) const {
  const auto b = block(index);
  return (static_cast<std::uint64_t>(b[1]) << 32) | b[0];
}

double CounterRng::uniform(std::uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }

double CounterRng::normal(std::uint64_t index) const {
  const auto b = block(index);
  const double u = (static_cast<double>((static_cast<std::uint64_t>(b[1]) << 32 | b[0]) >> 11) + 0.5) * 0x1p-53;
  const double v = static_cast<double>((static_cast<std::uint64_t>(b[3]) << 32 | b[2]) >> 11) * 0x1p-53;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

KeyedPermutation::KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::string_view stream)
    : size_(size), half_bits_((std::bit_width(size > 1 ? size - 1 : 1) + 1) / 2), rng_(seed, stream) {
  ANNULUS_CHECK(size > 0, "a permutation of nothing");
}

std::uint64_t KeyedPermutation::operator()(std::uint64_t index) const {
  ANNULUS_CHECK(index < size_, "element {} of a permutation of {}", index, size_);
  const std::uint64_t mask = (1ull << half_bits_) - 1;
  do {
    std::uint64_t left = index >> half_bits_, right = index & mask;
    for (std::uint64_t round = 0; round < 4; ++round) {
      const std::uint64_t next = left ^ (rng_.bits(round << 48 | right) & mask);
      left = right;
      right = next;
    }
    index = left << half_bits_ | right;
  } while (index >= size_);  // the network permutes [0, 4^half_bits), at most four times size: a few walks
  return index;
}

}  // namespace annulus
