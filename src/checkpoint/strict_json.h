// JSON of files that nobody vouches for (headers of safetensors, config.json, index.json): whole and valid UTF-8, no
// name twice in an object, no deep nesting. Everything else is a CheckpointError that starts with `where`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace annulus::checkpoint {

nlohmann::json parse_strict_json(std::string_view text, int max_depth, const std::string& where);

// A name from such a file for a message: quoted, cut to 128 bytes, printable.
std::string quote_name(std::string_view name);

}  // namespace annulus::checkpoint
