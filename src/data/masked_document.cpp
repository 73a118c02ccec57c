#include "data/masked_document.h"

#include <fmt/format.h>

namespace annulus::data {

std::string to_json_line(const MaskedDocument& document) {
  return fmt::format("{{\"tokens\":[{}],\"mask\":[{}]}}\n", fmt::join(document.tokens, ","),
                     fmt::join(document.mask, ","));
}

}  // namespace annulus::data
