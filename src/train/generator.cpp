#include "train/generator.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

namespace annulus::train {

Generator::Generator(Engine& engine, std::int64_t capacity, std::int64_t max_rows)
    : engine_(engine),
      ctx_(engine.context()),
      kv_("kv cache", ctx_.device),
      activations_("generation", ctx_.device),
      scratch_("generation scratch", ctx_.device) {
  ANNULUS_CHECK(ctx_.device == DeviceKind::cpu, "generation on a GPU");
  const model::CacheSizes sizes{engine.options().dtype, capacity, std::min(max_rows, capacity)};
  ctx_.scratch = &scratch_;
  cache_ = engine.model().allocate_cache(kv_, activations_, sizes);
  plan();
  const double have = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const double want = static_cast<double>(planned_bytes() + engine.planned_bytes());
  if (want > have) {
    throw ConfigError(fmt::format(
        "{} tokens of context need {:.1f} GiB, of which {:.1f} are keys and values; this host has {:.1f}. Give a "
        "smaller --sequence-length",
        capacity, want / (1 << 30), static_cast<double>(cache_bytes()) / (1 << 30), have / (1 << 30)));
  }
  for (Arena* arena : {&kv_, &activations_, &scratch_}) arena->commit();
  cache_ = engine.model().allocate_cache(kv_, activations_, sizes);
  engine.model().fill_cache_tables(ctx_, cache_);
}

// A dry run of the longest sequence: whole chunks, then single tokens until one has filled a compression block.
void Generator::plan() {
  const auto& model = engine_.options().model;
  const std::int64_t rows = cache_.sizes.max_rows, capacity = cache_.sizes.capacity;
  const std::int64_t singles = std::min(capacity, model.has_nsa() ? model.nsa.stride : 1);
  const std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows));
  ctx_.planning = true;
  auto append_planned = [&](std::int64_t count) {
    (void)engine_.model().forward_cached(ctx_, cache_, std::span(tokens).first(static_cast<std::size_t>(count)));
  };
  while (capacity - cache_.length > 0) append_planned(std::min(rows, capacity - cache_.length));
  clear();
  while (capacity - singles - cache_.length > 0) append_planned(std::min(rows, capacity - singles - cache_.length));
  while (cache_.length < capacity) append_planned(1);
  ctx_.planning = false;
}

TensorView Generator::append(std::span<const std::int32_t> tokens) {
  TensorView logits;
  const auto rows = static_cast<std::size_t>(cache_.sizes.max_rows);
  for (std::size_t from = 0; from < tokens.size(); from += rows) {
    logits = engine_.model().forward_cached(ctx_, cache_, tokens.subspan(from, std::min(rows, tokens.size() - from)));
  }
  return logits;
}

std::int64_t Generator::planned_bytes() const {
  return kv_.planned_bytes() + activations_.planned_bytes() + scratch_.planned_bytes();
}

}  // namespace annulus::train
