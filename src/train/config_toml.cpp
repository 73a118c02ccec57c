// The only file that knows toml++. A document (the file, or one --set) is walked table by table against config_fields.
#include <fmt/core.h>

#include <toml++/toml.h>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/config_check.h"
#include "core/error.h"
#include "train/config_fields.h"

namespace annulus::train {

namespace {

// Where a document comes from, for messages.
struct Origin {
  std::string name;
  bool is_file = true;  // --set has no lines worth naming
  std::string at(const toml::node& node) const {
    return is_file ? fmt::format("{}:{}", name, node.source().begin.line) : name;
  }
};

std::string spell(const toml::node& node) {  // "a string \"abc\"", for type errors
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return "a string " + toml_string(node.as_string()->get());
    case toml::node_type::integer:
      return fmt::format("the integer {}", node.as_integer()->get());
    case toml::node_type::floating_point:
      return fmt::format("the number {}", node.as_floating_point()->get());
    case toml::node_type::boolean:
      return fmt::format("the boolean {}", node.as_boolean()->get());
    default:
      return "a date or time";
  }
}

[[noreturn]] void fail_type(const std::string& key, const toml::node& node, const Origin& origin,
                            const std::string& expected) {
  throw ConfigError(fmt::format("{} in {} is {}; expected {}", key, origin.at(node), spell(node), expected));
}

[[noreturn]] void fail_unknown(const std::string& key, const toml::node& node, const Origin& origin,
                               const std::string& suggestion) {
  throw ConfigError(fmt::format("unknown key {} in {}; {}", key, origin.at(node), suggestion));
}

// The nearest known key: by name in the same section, then any full key or section, then by name in any section; else
// what the section has.
std::string suggest(const std::vector<Field>& fields, const std::string& section, const std::string& name) {
  const std::string full = section.empty() ? name : section + "." + name;
  std::vector<std::string> own_names, names, keys;
  for (const Field& field : fields) {
    keys.push_back(field.key);
    names.emplace_back(field.name());
    if (field.section() == section) own_names.emplace_back(field.name());
  }
  const std::size_t num_keys = keys.size();
  for (std::size_t i = 0; i < num_keys; ++i) {
    for (std::size_t dot = keys[i].find('.'); dot != std::string::npos; dot = keys[i].find('.', dot + 1)) {
      keys.push_back(keys[i].substr(0, dot));  // sections
    }
  }
  if (const std::string near = nearest_word(name, own_names); !near.empty()) {
    return fmt::format("did you mean {}.{}?", section, near);
  }
  if (const std::string near = nearest_word(full, keys); !near.empty()) return fmt::format("did you mean {}?", near);
  if (const std::string near = nearest_word(name, names); !near.empty()) {
    const auto match = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.name() == near; });
    return fmt::format("did you mean {}?", match->key);
  }
  std::vector<std::string> known = own_names;
  if (known.empty()) {  // no such section
    for (const std::string& key : keys) {
      const std::string top = key.substr(0, key.find('.'));
      if (std::find(known.begin(), known.end(), top) == known.end()) known.push_back(top);
    }
  }
  std::string list;
  for (const std::string& word : known) list += (list.empty() ? "" : ", ") + word;
  return own_names.empty() ? "the sections are " + list : fmt::format("[{}] knows {}", section, list);
}

template <class Int>
void read_integer(const Field& field, const toml::node& node, const Origin& origin, Int* out) {
  const auto* integer = node.as_integer();
  if (!integer) fail_type(field.key, node, origin, field.expected());
  const std::int64_t value = integer->get();
  if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max()) {
    fail_type(field.key, node, origin, fmt::format("an integer of at most {}", std::numeric_limits<Int>::max()));
  }
  *out = static_cast<Int>(value);
}

// A single value stands for a list of one.
template <class Visit>
void for_each_element(const toml::node& node, Visit visit) {
  if (const toml::array* array = node.as_array()) {
    for (const toml::node& element : *array) visit(element);
  } else {
    visit(node);
  }
}

data::SourceConfig read_source(const Field& field, const toml::node& node, const Origin& origin) {
  data::SourceConfig source;
  if (const auto* path = node.as_string()) {
    source.path = path->get();
    return source;
  }
  const toml::table* table = node.as_table();
  if (!table) fail_type(field.key, node, origin, field.expected());
  for (const auto& [key, value] : *table) {
    const std::string name(key.str());
    if (name == "path") {
      if (!value.is_string()) fail_type(field.key + ".path", value, origin, "a string");
      source.path = value.as_string()->get();
    } else if (name == "weight") {
      if (!value.is_number()) fail_type(field.key + ".weight", value, origin, "a number");
      source.weight = *value.value<double>();
    } else {
      const std::vector<std::string> known = {"path", "weight"};
      fail_unknown(field.key + "." + name, value, origin, "a source has path and weight" + did_you_mean(name, known));
    }
  }
  if (!table->contains("path")) {
    throw ConfigError(fmt::format("{} in {} has a source without a path; write {{path = \"book.txt\", weight = 1.0}}",
                                  field.key, origin.at(node)));
  }
  return source;
}

struct ReadValue {
  const Field& field;
  const toml::node& node;
  const Origin& origin;

  [[noreturn]] void fail() const { fail_type(field.key, node, origin, field.expected()); }
  void operator()(bool* out) const {
    if (!node.is_boolean()) fail();
    *out = node.as_boolean()->get();
  }
  void operator()(int* out) const { read_integer(field, node, origin, out); }
  void operator()(std::int64_t* out) const { read_integer(field, node, origin, out); }
  void operator()(double* out) const {
    if (!node.is_number()) fail();
    *out = *node.value<double>();
  }
  void operator()(std::string* out) const {
    if (!node.is_string()) fail();
    *out = node.as_string()->get();
  }
  void operator()(std::vector<std::string>* out) const {
    out->clear();
    for_each_element(node, [&](const toml::node& element) {
      if (!element.is_string()) fail_type(field.key, element, origin, field.expected());
      out->push_back(element.as_string()->get());
    });
  }
  void operator()(std::vector<data::SourceConfig>* out) const {
    out->clear();
    for_each_element(node, [&](const toml::node& element) { out->push_back(read_source(field, element, origin)); });
  }
  void operator()(std::vector<model::AttentionKind>* out) const {
    out->clear();
    for_each_element(node, [&](const toml::node& element) {
      if (!element.is_string()) fail_type(field.key, element, origin, field.expected());
      const std::string name = element.as_string()->get();
      const auto* const found = std::find(std::begin(kAttentionNames), std::end(kAttentionNames), name);
      if (found == std::end(kAttentionNames)) fail_type(field.key, element, origin, field.expected());
      out->push_back(static_cast<model::AttentionKind>(found - std::begin(kAttentionNames)));
    });
  }
};

void apply_table(const std::vector<Field>& fields, const toml::table& table, const std::string& section,
                 const Origin& origin) {
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    const std::string full = section.empty() ? name : section + "." + name;
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.key == full; });
    if (field != fields.end()) {
      std::visit(ReadValue{*field, node, origin}, field->value);
      continue;
    }
    const bool is_section =
        std::any_of(fields.begin(), fields.end(), [&](const Field& f) { return f.key.starts_with(full + "."); });
    if (!is_section) fail_unknown(full, node, origin, suggest(fields, section, name));
    if (!node.is_table()) fail_type(full, node, origin, fmt::format("a table, [{}]", full));
    apply_table(fields, *node.as_table(), full, origin);
  }
}

[[noreturn]] void fail_syntax(const toml::parse_error& error, const std::string& where) {
  throw ConfigError(fmt::format("{}: not TOML: {}", where, error.description()));
}

// "section.key=value": the value is TOML; what is none and does not look like TOML is a string, and so is any bare
// value of a string key.
void apply_override(const std::vector<Field>& fields, const std::string& assignment) {
  const auto trim = [](std::string text) {
    const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
    text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), space));
    text.erase(std::find_if_not(text.rbegin(), text.rend(), space).base(), text.end());
    return text;
  };
  const Origin origin{"--set " + assignment, false};
  const std::size_t equals = assignment.find('=');
  const std::string key = trim(assignment.substr(0, equals));
  const bool plain = !key.empty() && std::all_of(key.begin(), key.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '-' || c == '.';
  });
  if (equals == std::string::npos || !plain) {
    throw ConfigError(fmt::format("{}: expected section.key=value, for example --set train.steps=200", origin.name));
  }
  const std::string value = trim(assignment.substr(equals + 1));
  const bool bare = value.empty() || !std::strchr("\"'[{", value.front());
  const bool names_string = std::any_of(fields.begin(), fields.end(), [&](const Field& f) {
    return f.key == key && std::holds_alternative<std::string*>(f.value);
  });
  if (value.empty() && !names_string) {
    throw ConfigError(fmt::format("{}: the value is missing; expected section.key=value", origin.name));
  }
  const std::string as_string = fmt::format("{} = {}", key, toml_string(value));
  toml::table table;
  try {
    table = toml::parse(bare && names_string ? as_string : fmt::format("{} = {}", key, value));
  } catch (const toml::parse_error& error) {
    if (!bare) fail_syntax(error, origin.name + " (strings in lists and tables need quotes)");
    try {
      table = toml::parse(as_string);
    } catch (const toml::parse_error& again) {
      fail_syntax(again, origin.name);
    }
  }
  apply_table(fields, table, "", origin);
}

}  // namespace

RunConfig parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides) {
  RunConfig config;
  const std::vector<Field> fields = config_fields(config);
  try {
    const toml::table table = toml::parse(text, name);
    apply_table(fields, table, "", Origin{name});
  } catch (const toml::parse_error& error) {
    fail_syntax(error, fmt::format("{}:{}:{}", name, error.source().begin.line, error.source().begin.column));
  }
  for (const std::string& assignment : overrides) apply_override(fields, assignment);
  return config;
}

RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    throw ConfigError(fmt::format("config {} is a folder; name the .toml file in it", path));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file)
    throw ConfigError(fmt::format("cannot read config {}: {}; expected a TOML file", path, std::strerror(errno)));
  return parse_config(text.str(), path, overrides);
}

}  // namespace annulus::train
