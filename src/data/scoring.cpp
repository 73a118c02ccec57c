#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "data/dataset.h"
#include "data/documents.h"
#include "data/tokenizer.h"

namespace annulus::data {

struct ScoringData::Impl {
  std::unique_ptr<Tokenizer> tokenizer;
  Documents documents;
  std::int64_t sequence_length;
  std::int64_t num_targets = 0;
  std::int64_t num_bytes = 0;
  std::vector<ScoringWindow> windows;

  Impl(const std::vector<std::string>& paths, const std::string& tokenizer_name, std::int64_t vocab_size,
       std::int64_t window)
      : tokenizer(make_tokenizer(tokenizer_name)), documents(paths, *tokenizer, vocab_size), sequence_length(window) {}

  Documents::Framing frame(std::int64_t document) const {
    const auto end = tokenizer->end_of_document();
    if (!end || !documents.is_text(document)) return {};
    return {true, false, *end};
  }

  void add_windows(std::int64_t document, std::int64_t stride) {
    const std::int64_t positions = documents.num_positions(document, frame(document));
    std::int64_t scored = 0;
    for (std::int64_t begin = 0; scored < positions; begin += stride) {
      const std::int64_t end = std::min(begin + sequence_length, positions);
      windows.push_back({document, begin, end - begin, scored - begin});
      scored = end;
    }
  }
};

ScoringData::ScoringData(const std::vector<std::string>& paths, const std::string& tokenizer, std::int64_t vocab_size,
                         std::int64_t sequence_length, std::int64_t stride) {
  if (sequence_length < 1)
    throw ConfigError(fmt::format("sequence length {}: expected at least 1 token", sequence_length));
  if (stride < 0 || stride > sequence_length) {
    throw ConfigError(
        fmt::format("stride {}: expected 1 to {}, the window (or 0 for the whole window)", stride, sequence_length));
  }
  if (paths.empty()) throw ConfigError("no data to score: name at least one file or folder");
  impl_ = std::make_unique<Impl>(paths, tokenizer, vocab_size, sequence_length);
  const Documents& documents = impl_->documents;
  bool all_text = true;
  for (std::int64_t d = 0; d < documents.size(); ++d) {
    const std::int64_t targets = documents.num_targets(d, impl_->frame(d));
    impl_->num_targets += targets;
    all_text = all_text && documents.is_text(d);
    if (documents.is_text(d)) impl_->num_bytes += targets;  // a text document's tokens are its bytes
    impl_->add_windows(d, stride == 0 ? sequence_length : stride);
  }
  if (!all_text) impl_->num_bytes = 0;
  if (impl_->num_targets == 0) {
    throw DataError(
        fmt::format("{}{}: {} documents, but no target in any of them: documents of one token have none, nor have "
                    "masks of zeros",
                    paths[0], paths.size() > 1 ? ", ..." : "", documents.size()));
  }
}

ScoringData::~ScoringData() = default;

const std::vector<ScoringWindow>& ScoringData::windows() const { return impl_->windows; }
std::int64_t ScoringData::num_documents() const { return impl_->documents.size(); }
std::string ScoringData::document_name(std::int64_t document) const { return impl_->documents.name(document); }
std::int64_t ScoringData::num_targets() const { return impl_->num_targets; }
std::int64_t ScoringData::num_bytes() const { return impl_->num_bytes; }

void ScoringData::read(const ScoringWindow& window, std::span<std::int32_t> tokens,
                       std::span<std::int32_t> targets) const {
  ANNULUS_CHECK(std::ssize(tokens) == impl_->sequence_length && targets.size() == tokens.size() &&
                    window.length <= impl_->sequence_length,
                "buffers of {} and {} for a window of {} in {}", tokens.size(), targets.size(), window.length,
                impl_->sequence_length);
  const auto length = static_cast<std::size_t>(window.length);
  impl_->documents.read(window.document, impl_->frame(window.document), window.begin, tokens.first(length),
                        targets.first(length));
  std::ranges::fill(targets.first(static_cast<std::size_t>(window.score_from)), -1);
  std::ranges::fill(tokens.subspan(length), 0);
  std::ranges::fill(targets.subspan(length), -1);
}

}  // namespace annulus::data
