// The table of every configuration key: its name in TOML, where it lives in a RunConfig, and what it means. Reading,
// writing, suggestions and docs/config.md go through this table and nothing else, so a new key is one line here and one
// member in its struct.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "train/config.h"

namespace annulus::train {

struct Field {
  using Value = std::variant<bool*, int*, std::int64_t*, double*, std::string*, std::vector<std::string>*,
                             std::vector<data::SourceConfig>*, std::vector<model::AttentionKind>*>;
  std::string key;  // section.name, the section may have dots
  Value value;      // into the RunConfig that the table was made for
  std::string meaning;

  std::string_view section() const { return std::string_view(key).substr(0, key.rfind('.')); }
  std::string_view name() const { return std::string_view(key).substr(key.rfind('.') + 1); }
  std::string expected() const;    // "an integer", for errors and documentation
  std::string value_toml() const;  // the present value as TOML
};

// Fields in the order in which they are written; those of a section are adjacent. Pointers live as long as `config`.
std::vector<Field> config_fields(RunConfig& config);

std::string toml_string(std::string_view text);  // quoted and escaped

inline constexpr std::string_view kAttentionNames[] = {"dense", "nsa"};  // by AttentionKind

}  // namespace annulus::train
