#include "checkpoint/strict_json.h"

#include <set>
#include <vector>

#include "core/error.h"

namespace annulus::checkpoint {

using nlohmann::json;

std::string quote_name(std::string_view name) {
  constexpr std::size_t kMost = 128;
  std::string out = "\"";
  for (const char c : name.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return out + (name.size() > kMost ? "…\"" : "\"");
}

json parse_strict_json(std::string_view text, int max_depth, const std::string& where) {
  std::vector<std::set<std::string>> open;  // names seen in every object and list that is open (lists have none)
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        open.emplace_back();
        if (static_cast<int>(open.size()) > max_depth) {
          throw CheckpointError(fmt::format("{}: nested deeper than {} levels", where, max_depth));
        }
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        open.pop_back();
        break;
      case json::parse_event_t::key:
        if (const auto name = value.get<std::string>(); !open.back().insert(name).second) {
          throw CheckpointError(fmt::format("{}: {} is there twice", where, quote_name(name)));
        }
        break;
      case json::parse_event_t::value:
        break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& error) {
    throw CheckpointError(fmt::format("{}: not JSON from byte {} on", where, error.byte));
  } catch (const json::exception& error) {  // a number beyond doubles
    throw CheckpointError(fmt::format("{}: not JSON: {}", where, error.what()));
  }
}

}  // namespace annulus::checkpoint
