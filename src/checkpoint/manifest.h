// manifest.json: the list of what a checkpoint holds, and the text of the records that ranks exchange.
//
//   format "annulus-checkpoint", version, written_by, created (UTC), step, tokens_seen, tokens_planned, seed,
//   precision, ranks, provenance, config (TOML), data {fingerprint, position[]}, files[{name, bytes}], slices[{group,
//   tensor, dtype, global_shape[], offset[], shape[], file, xxh3_128}], checksum: XXH3-128 of the compact text (sorted
//   keys) of all the rest
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/piece.h"
#include "checkpoint/store.h"

namespace annulus::checkpoint {

inline constexpr int kManifestVersion = 1;
inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kVirtualName = "checkpoint.h5";

struct Manifest {
  Meta meta;
  std::vector<ShardFile> files;
  std::vector<Piece> pieces;  // sorted, tiling every tensor
};

std::string to_text(const Manifest& manifest);
// Checks everything that the text alone can show. CheckpointError that starts with `where`.
Manifest parse_manifest(const std::string& text, const std::string& where);

std::string to_text(const ShardReport& report);
ShardReport parse_report(const std::string& text);

}  // namespace annulus::checkpoint
