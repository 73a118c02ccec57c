// Agreement: do all ranks hold the same bytes? Used for the configuration at start, and for every batch before it is
// cut into shards (ranks of one replica that read different batches train on nonsense, silently; ranks with different
// lengths would wait for each other for ever).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "parallel/communicator.h"

namespace annulus::parallel {

// 64-bit hash of bytes and their number; several GB/s. Stable within a run, not a file format.
std::uint64_t hash_bytes(std::span<const std::byte> bytes);

// Collective over `ranks` (host data). Throws ConfigError on every rank when some rank's bytes differ from the
// majority's, naming `what` and those ranks. The number of bytes may differ.
void check_equal(Communicator& ranks, std::string_view what, std::span<const std::byte> bytes);

template <class T>
void check_equal(Communicator& ranks, std::string_view what, std::span<const T> values) {
  check_equal(ranks, what, std::as_bytes(values));
}

}  // namespace annulus::parallel
