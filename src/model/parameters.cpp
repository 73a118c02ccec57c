#include "model/parameters.h"

#include <algorithm>
#include <cmath>

#include "core/rng.h"

namespace annulus::model {
namespace {

constexpr std::int64_t kAlignment = 64;
constexpr double kStd = 0.02;

std::int64_t aligned(std::int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

std::vector<ParameterStore::Entry> lay_out(Transformer& model) {
  std::vector<ParameterStore::Entry> entries;
  std::int64_t offset = 0;
  model.visit_parameters([&](Parameter& p) {
    entries.push_back({p.name, p.shape, p.init, p.decays(), offset, p.shape.numel()});
    offset += aligned(p.shape.numel());
  });
  return entries;
}

std::int64_t padded_size(const std::vector<ParameterStore::Entry>& entries) {
  return entries.empty() ? 0 : aligned(entries.back().offset + entries.back().count);
}

template <class T>
void draw(const ParameterStore& store, double residual_std, std::uint64_t seed, std::int64_t begin, std::span<T> out) {
  std::fill(out.begin(), out.end(), T(0));
  for (const auto& part : store.parts(begin, static_cast<std::int64_t>(out.size()))) {
    T* y = out.data() + (part.flat - begin);
    const CounterRng rng(seed, part.entry->name);
    const double std = part.entry->init == Init::residual ? residual_std : kStd;
    switch (part.entry->init) {
      case Init::zeros:
        break;
      case Init::ones:
        std::fill(y, y + part.count, T(1));
        break;
      case Init::normal:
      case Init::residual:
#pragma omp parallel for
        for (std::int64_t i = 0; i < part.count; ++i) {
          y[i] = static_cast<T>(std * rng.normal(static_cast<std::uint64_t>(part.begin + i)));
        }
    }
  }
}

}  // namespace

ParameterStore::ParameterStore(Transformer& model, int rank, int ranks)
    : model_(model),
      residual_std_(kStd / std::sqrt(2.0 * static_cast<double>(model.config().num_hidden_layers))),
      entries_(lay_out(model)),
      shards_(padded_size(entries_), rank, ranks) {}

void ParameterStore::allocate_values(Arena& arena, DType dtype) {
  dtype_ = dtype;
  values_ = arena.allocate("weights", dtype, {shards_.total()});
  std::size_t i = 0;
  model_.visit_parameters([&](Parameter& p) {
    p.value = values_.rows(entries_[i].offset, entries_[i].count).reshape(p.shape);
    ++i;
  });
}

void ParameterStore::allocate_gradients(Arena& arena) {
  gradients_ = arena.allocate("gradients", stat_type(dtype_), {shards_.total()});
  std::size_t i = 0;
  model_.visit_parameters([&](Parameter& p) {
    p.gradient = gradients_.rows(entries_[i].offset, entries_[i].count).reshape(p.shape);
    ++i;
  });
}

std::vector<ParameterStore::Part> ParameterStore::parts(std::int64_t begin, std::int64_t count) const {
  std::vector<Part> out;
  for (const auto& e : entries_) {
    const std::int64_t from = std::max(begin, e.offset), to = std::min(begin + count, e.offset + e.count);
    if (from < to) out.push_back({&e, from - e.offset, from, to - from});
  }
  return out;
}

void ParameterStore::initial_values(std::uint64_t seed, std::int64_t begin, std::span<float> out) const {
  draw(*this, residual_std_, seed, begin, out);
}

void ParameterStore::initial_values(std::uint64_t seed, std::int64_t begin, std::span<double> out) const {
  draw(*this, residual_std_, seed, begin, out);
}

}  // namespace annulus::model
