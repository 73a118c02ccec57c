// XXH3-128 as 32 hexadecimal digits (the canonical, big-endian form), in one go or piece by piece.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace annulus::checkpoint {

class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  void add(const void* data, std::size_t bytes);
  std::string digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string hash_of(const void* data, std::size_t bytes);

}  // namespace annulus::checkpoint
