// DataConfig: where training and validation tokens come from.
#pragma once

#include <string>
#include <vector>

namespace annulus::data {

struct SourceConfig {
  std::string path;  // a .txt, .jsonl or .bin file, or a folder of these
  double weight = 1;
  bool operator==(const SourceConfig&) const = default;
};

struct DataConfig {
  std::vector<SourceConfig> sources;
  std::vector<std::string> validation;  // files or folders, scored by evaluation while training
  std::string tokenizer = "bytes";  // bytes (256 + end of document), none (tokens come ready: .bin, {"tokens": …})
  bool operator==(const DataConfig&) const = default;
};

}  // namespace annulus::data
