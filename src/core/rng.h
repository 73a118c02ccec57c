// Counter-based random numbers (Philox4x32-10, Salmon et al., SC 2011). A draw depends on (seed, stream name, index)
// alone, so that weights and sample orders are the same on any number of ranks and on any device.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace annulus {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

std::uint64_t hash_name(std::string_view name);  // FNV-1a, 64 bit: stable across platforms and versions

class CounterRng {
 public:
  CounterRng(std::uint64_t seed, std::string_view stream);

  std::uint64_t bits(std::uint64_t index) const;
  double uniform(std::uint64_t index) const;  // [0, 1)
  double normal(std::uint64_t index) const;   // N(0, 1), Box-Muller on two draws of the same counter

 private:
  std::array<std::uint32_t, 4> block(std::uint64_t index) const;
  std::uint64_t seed_;
  std::uint64_t stream_;
};

// A keyed permutation of [0, size): a Feistel network with cycle walking; O(1) per element, no table.
class KeyedPermutation {
 public:
  KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::string_view stream);
  std::uint64_t operator()(std::uint64_t index) const;

 private:
  std::uint64_t size_;
  int half_bits_;
  CounterRng rng_;
};

}  // namespace annulus
