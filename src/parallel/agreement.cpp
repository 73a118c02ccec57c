#include "parallel/agreement.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace annulus::parallel {

std::uint64_t hash_bytes(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kMultiplier = 0x9e3779b97f4a7c15u, kOdd = 0xd6e8feb86659fd93u;
  const auto mix = [](std::uint64_t lane, std::uint64_t word) {
    return std::rotl(lane ^ (word * kMultiplier), 29) * kOdd;
  };
  std::uint64_t lanes[4] = {1, 2, 3, bytes.size()};  // independent, so that multiplications overlap
  std::size_t at = 0;
  for (; at + 32 <= bytes.size(); at += 32) {
    std::uint64_t words[4];
    std::memcpy(words, bytes.data() + at, 32);
    for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::uint64_t tail[4] = {};
  if (at < bytes.size()) std::memcpy(tail, bytes.data() + at, bytes.size() - at);
  std::uint64_t h = 0;
  for (int i = 0; i < 4; ++i) {
    h = mix(h, mix(lanes[i], tail[i]));
    h ^= h >> 32;
  }
  return h;
}

void check_equal(Communicator& ranks, std::string_view what, std::span<const std::byte> bytes) {
  Context ctx;
  std::vector<std::int64_t> hashes(static_cast<std::size_t>(ranks.size()));
  std::int64_t own = std::bit_cast<std::int64_t>(hash_bytes(bytes));
  ranks.wait(ctx, ranks.all_gather(ctx, host_view(&own, {1}), host_view(hashes.data(), {ranks.size()})));

  if (std::all_of(hashes.begin(), hashes.end(), [&](auto h) { return h == hashes[0]; })) return;
  // The most frequent hash is taken for right; the first of equally frequent ones.
  const auto votes = [&](std::int64_t h) { return std::count(hashes.begin(), hashes.end(), h); };
  const auto common =
      *std::max_element(hashes.begin(), hashes.end(), [&](auto a, auto b) { return votes(a) < votes(b); });
  std::string odd;
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    if (hashes[r] != common) odd += (odd.empty() ? "" : ", ") + std::to_string(r);
  }
  const auto reference = std::find(hashes.begin(), hashes.end(), common) - hashes.begin();
  throw ConfigError(
      fmt::format("the ranks disagree on the {}: rank {} of {} differ{} from rank {}. All ranks must be started "
                  "with the same program, configuration and data",
                  what, odd, ranks.size(), odd.find(',') == std::string::npos ? "s" : "", reference));
}

}  // namespace annulus::parallel
