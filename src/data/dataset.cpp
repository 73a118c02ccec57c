#include "data/dataset.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <mutex>
#include <numeric>

#include "core/error.h"
#include "core/rng.h"
#include "data/documents.h"
#include "data/fingerprint.h"
#include "data/packing.h"
#include "data/tokenizer.h"

namespace annulus::data {
namespace {

__extension__ typedef __int128 Int128;  // products of weights and sample counts, exact on every machine

Documents::Framing training_frame(const Documents& documents, std::int64_t document, const Tokenizer& tokenizer) {
  const auto end = tokenizer.end_of_document();
  if (!end) return {};
  return {true, !documents.has_mask(document), *end};
}

struct Source {
  Documents documents;
  Packing packing;
  std::int64_t num_targets = 0;

  Source(Documents opened, const Tokenizer& tokenizer, std::int64_t sequence_length)
      : documents(std::move(opened)), packing(positions(documents, tokenizer), sequence_length) {
    for (std::int64_t d = 0; d < documents.size(); ++d) {
      num_targets += documents.num_targets(d, training_frame(documents, d, tokenizer));
    }
  }

  static std::vector<std::int64_t> positions(const Documents& documents, const Tokenizer& tokenizer) {
    std::vector<std::int64_t> positions(static_cast<std::size_t>(documents.size()));
    for (std::int64_t d = 0; d < documents.size(); ++d) {
      positions[static_cast<std::size_t>(d)] = documents.num_positions(d, training_frame(documents, d, tokenizer));
    }
    return positions;
  }
};

// Weights as integers with a sum of about 2^32: shares are exact integer ratios, the same on every machine.
std::vector<std::int64_t> integer_weights(const std::vector<SourceConfig>& sources) {
  double sum = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (!(sources[i].weight > 0) || !std::isfinite(sources[i].weight)) {
      throw ConfigError(
          fmt::format("data.sources[{}].weight = {} (path \"{}\"): expected a number above 0; remove a source "
                      "that is not wanted",
                      i, sources[i].weight, sources[i].path));
    }
    sum += sources[i].weight;
  }
  std::vector<std::int64_t> weights;
  for (const auto& source : sources) {
    weights.push_back(std::max<std::int64_t>(1, std::llround(source.weight / sum * 0x1p32)));
  }
  return weights;
}

void require_sequence_length(std::int64_t sequence_length) {
  if (sequence_length < 1 || sequence_length > std::numeric_limits<std::int32_t>::max()) {
    throw ConfigError(fmt::format("train.sequence_length = {}: expected 1 to 2147483647 tokens", sequence_length));
  }
}

}  // namespace

struct TrainingData::Impl {
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<Source> sources;
  std::vector<std::int64_t> weights;
  std::int64_t total_weight = 0;
  std::int64_t sequence_length = 0;
  std::uint64_t seed = 0;
  mutable std::once_flag fingerprint_once;
  mutable std::string fingerprint;

  std::size_t next_source(const std::vector<std::int64_t>& taken) const;
  std::string compute_fingerprint() const;
};

TrainingData::TrainingData(const DataConfig& config, std::int64_t vocab_size, std::int64_t sequence_length,
                           std::uint64_t seed)
    : impl_(std::make_unique<Impl>()) {
  require_sequence_length(sequence_length);
  if (config.sources.empty()) {
    throw ConfigError("data.sources is empty: give at least one, such as sources = [{path = \"book.txt\"}]");
  }
  impl_->sequence_length = sequence_length;
  impl_->seed = seed;
  impl_->weights = integer_weights(config.sources);
  impl_->total_weight = std::accumulate(impl_->weights.begin(), impl_->weights.end(), std::int64_t{0});
  impl_->tokenizer = make_tokenizer(config.tokenizer);
  require_vocabulary(*impl_->tokenizer, vocab_size);
  for (const auto& source : config.sources) {
    Documents documents({source.path}, *impl_->tokenizer, vocab_size);
    const Source& opened = impl_->sources.emplace_back(std::move(documents), *impl_->tokenizer, sequence_length);
    if (opened.num_targets == 0) {
      throw DataError(
          fmt::format("{}: {} documents, but no target in any of them: documents of one token have none, nor "
                      "have masks of zeros",
                      source.path, opened.documents.size()));
    }
  }
}

TrainingData::~TrainingData() = default;

int TrainingData::num_sources() const { return static_cast<int>(impl_->sources.size()); }

std::int64_t TrainingData::num_samples(int source) const {
  return impl_->sources.at(static_cast<std::size_t>(source)).packing.num_samples();
}

std::int64_t TrainingData::num_tokens() const {
  std::int64_t tokens = 0;
  for (const auto& source : impl_->sources) tokens += source.num_targets;
  return tokens;
}

std::string TrainingData::fingerprint() const {
  std::call_once(impl_->fingerprint_once, [&] { impl_->fingerprint = impl_->compute_fingerprint(); });
  return impl_->fingerprint;
}

std::string TrainingData::Impl::compute_fingerprint() const {
  Fingerprint hash;
  hash.add("annulus training data 1");  // the version of framing, packing and order
  hash.add(tokenizer->name());
  hash.add(sequence_length);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    hash.add("source");
    hash.add(weights[i]);
    for (const auto& file : sources[i].documents.files()) {
      const std::string& path = file.path();
      hash.add(std::string_view(path).substr(path.rfind('.')));  // how it is read
      hash.add_file(file.bytes());
    }
  }
  return hash.hex();
}

// Tijdeman's rule for k sources, shares w/W, after t samples in all: of the sources whose due share w·t/W − taken is at
// least 1/(2k − 2), the one that must be served first if no share may fall behind by more than 1 − 1/(2k − 2).
std::size_t TrainingData::Impl::next_source(const std::vector<std::int64_t>& taken) const {
  if (sources.size() == 1) return 0;
  const Int128 slack = static_cast<Int128>(2 * sources.size() - 2), total = total_weight;
  const Int128 t = std::accumulate(taken.begin(), taken.end(), std::int64_t{1});
  std::size_t best = sources.size();
  Int128 best_time = 0;  // deadline of `best`, times its weight
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const Int128 due = slack * (weights[i] * t - taken[i] * total);  // in units of 1/(slack · W) samples
    if (due < total) continue;
    const Int128 time = (slack - 1) * total - due;  // over the weight: samples until it is too late
    if (best == sources.size() || time * weights[best] < best_time * weights[i]) {
      best = i;
      best_time = time;
    }
  }
  ANNULUS_CHECK(best < sources.size(), "no source is due");  // the dues add up to W, so one has at least W/k
  return best;
}

SampleRef TrainingData::next(std::vector<std::int64_t>& taken) const {
  ANNULUS_CHECK(taken.size() == impl_->sources.size(), "position of {} sources in data of {}", taken.size(),
                impl_->sources.size());
  const std::size_t source = impl_->next_source(taken);
  const std::int64_t size = num_samples(static_cast<int>(source)), n = taken[source]++;
  const KeyedPermutation permutation(static_cast<std::uint64_t>(size), impl_->seed,
                                     fmt::format("data.source {} epoch {}", source, n / size));
  return {static_cast<std::int32_t>(source), n / size,
          static_cast<std::int64_t>(permutation(static_cast<std::uint64_t>(n % size)))};
}

void TrainingData::read(const SampleRef& ref, std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
                        std::span<std::int32_t> document_start) const {
  ANNULUS_CHECK(std::ssize(tokens) == impl_->sequence_length && targets.size() == tokens.size() &&
                    document_start.size() == tokens.size(),
                "buffers of {}, {} and {} for a sample of {}", tokens.size(), targets.size(), document_start.size(),
                impl_->sequence_length);
  const Source& source = impl_->sources.at(static_cast<std::size_t>(ref.source));
  std::size_t at = 0;
  for (const Piece& piece : source.packing.sample(ref.index)) {
    const auto length = static_cast<std::size_t>(piece.length);
    source.documents.read(piece.document, training_frame(source.documents, piece.document, *impl_->tokenizer),
                          piece.begin, tokens.subspan(at, length), targets.subspan(at, length));
    std::ranges::fill(document_start.subspan(at, length), static_cast<std::int32_t>(at));
    at += length;
  }
  std::ranges::fill(tokens.subspan(at), 0);
  std::ranges::fill(targets.subspan(at), -1);
  std::ranges::fill(document_start.subspan(at), static_cast<std::int32_t>(at));
}

}  // namespace annulus::data
