#include "checkpoint/conversion.h"

#include <cmath>
#include <map>
#include <set>

#include "checkpoint/convert_type.h"
#include "core/config_check.h"
#include "model/parameters.h"

namespace annulus::checkpoint {
namespace {

// Parameters of a config by name, and their first values.
struct Parameters {
  explicit Parameters(const model::ModelConfig& config) : model(config), store(model, 0, 1) {
    for (const auto& entry : store.entries()) by_name.emplace(entry.name, &entry);
  }
  const model::ParameterStore::Entry* find(const std::string& name) const {
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second;
  }
  model::Transformer model;
  model::ParameterStore store;
  std::map<std::string, const model::ParameterStore::Entry*> by_name;
};

bool replace_word(std::string& text, std::string_view from, std::string_view to) {
  const auto at = text.find(from);
  if (at == std::string::npos) return false;
  text.replace(at, from.size(), to);
  return true;
}

bool is_key_or_value(const std::string& name) {
  return name.find("k_proj.") != std::string::npos || name.find("v_proj.") != std::string::npos;
}

// The tensor that `name` is made from: itself, or for a branch of a layer that was dense the dense one. Empty: none.
std::string origin_of(const std::string& name, const Parameters& from) {
  if (from.find(name)) return name;
  std::string dense = name;
  for (const char* branch : {".cmp_", ".slc_", ".win_"}) {
    if (is_key_or_value(name) && replace_word(dense, branch, ".") && from.find(dense)) return dense;
  }
  return "";
}

// r consecutive heads of [groups · r] become one; `head` elements each.
void pool_heads(const std::vector<double>& in, std::int64_t groups, Pool pool, std::vector<double>& out) {
  const std::int64_t head = static_cast<std::int64_t>(out.size()) / groups;
  const std::int64_t heads = static_cast<std::int64_t>(in.size()) / head, r = heads / groups;
  for (std::int64_t g = 0; g < groups; ++g) {
    const double* first = in.data() + g * r * head;
    double* y = out.data() + g * head;
    for (std::int64_t i = 0; i < head; ++i) {
      double excess = 0;  // over the first head: equal heads pool to themselves, bit for bit
      for (std::int64_t h = 1; pool == Pool::mean && h < r; ++h) excess += first[h * head + i] - first[i];
      y[i] = first[i] + excess / static_cast<double>(r);
    }
  }
}

class Converter : public std::enable_shared_from_this<Converter> {
 public:
  Converter(std::shared_ptr<const TensorSource> source, const Conversion& conversion)
      : source_(std::move(source)), c_(conversion), from_(c_.from), to_(c_.to), group_(source_->weights_group()) {}

  std::vector<Slice> run();

 private:
  Slice make(const model::ParameterStore::Entry& entry);
  DType type_of(const TensorInfo& info) const { return info.dtype == DType::f16 ? DType::f32 : info.dtype; }
  void fill_pooled(const std::string& origin, const Shape& shape, const TensorView& out) const;
  void fill_fresh(const model::ParameterStore::Entry& entry, const TensorView& out) const;

  std::shared_ptr<const TensorSource> source_;
  Conversion c_;
  Parameters from_, to_;
  std::string group_;
  std::set<std::string> used_;
};

void Converter::fill_pooled(const std::string& origin, const Shape& shape, const TensorView& out) const {
  std::vector<double> in(static_cast<std::size_t>(shape.numel())), pooled(static_cast<std::size_t>(out.numel()));
  source_->read(group_, origin, 0, host_view(in.data(), {shape.numel()}));
  pool_heads(in, c_.to.num_key_value_heads, c_.pool, pooled);
  convert_type(DType::f64, pooled.data(), out.dtype, out.data, out.numel());
}

void Converter::fill_fresh(const model::ParameterStore::Entry& entry, const TensorView& out) const {
  std::vector<double> values(static_cast<std::size_t>(entry.count), 0.0);
  if (entry.name.ends_with(".gate.bias")) {
    const std::size_t heads = values.size() / 3;  // row = branch · Hq + head
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double gate = kGateStart[i / heads];
      values[i] = std::log(gate / (1 - gate));
    }
  } else if (!entry.name.ends_with(".gate.weight")) {
    to_.store.initial_values(c_.seed, entry.offset, std::span(values));
  }
  convert_type(DType::f64, values.data(), out.dtype, out.data, out.numel());
}

Slice Converter::make(const model::ParameterStore::Entry& entry) {
  const std::string origin = origin_of(entry.name, from_);
  const auto self = shared_from_this();
  Slice out{"model", entry.name, entry.shape, 0, {}};
  out.data.shape = {entry.count};
  if (origin.empty()) {  // gates and compression of a layer that was dense
    out.data.dtype = type_of(*source_->find(group_, "model.norm.weight"));
    out.fill = [self, &entry](const TensorView& to) { self->fill_fresh(entry, to); };
    return out;
  }
  used_.insert(origin);
  const Shape shape = from_.find(origin)->shape;
  out.data.dtype = type_of(source_->require(group_, origin, shape));
  if (shape == entry.shape) {
    out.fill = [self, origin](const TensorView& to) { self->source_->read(self->group_, origin, 0, to); };
  } else {
    ANNULUS_CHECK(is_key_or_value(origin), "{} has no way from {} to {}", origin, shape.str(), entry.shape.str());
    if (c_.pool == Pool::random) {
      out.fill = [self, &entry](const TensorView& to) { self->fill_fresh(entry, to); };
    } else {
      out.fill = [self, origin, shape](const TensorView& to) { self->fill_pooled(origin, shape, to); };
    }
  }
  return out;
}

std::vector<Slice> Converter::run() {
  const std::int64_t heads = c_.from.num_key_value_heads, wanted = c_.to.num_key_value_heads;
  if (wanted < 1 || heads % wanted != 0) {
    throw ConfigError(fmt::format("--kv-heads {}: expected a divisor of the {} key/value heads of {}", wanted, heads,
                                  source_->path()));
  }
  for (const auto& entry : from_.store.entries()) (void)source_->require("model", entry.name, entry.shape);
  std::vector<Slice> out;
  for (const auto& entry : to_.store.entries()) out.push_back(make(entry));
  for (const TensorInfo& info : source_->tensors()) {
    if (info.group == "model" && !used_.contains(info.tensor)) {
      throw CheckpointError(fmt::format("{}: tensor {} {} would be lost: nothing in the result is made from it",
                                        source_->path(), info.tensor, info.shape.str()));
    }
  }
  return out;
}

}  // namespace

Pool parse_pool(const std::string& name) {
  const std::vector<std::string> names{"mean", "first", "random"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<Pool>(i);
  }
  throw UsageError(fmt::format("--pool {}: expected {}{}", name, quoted_list(names), did_you_mean(name, names)));
}

std::vector<Slice> convert_tensors(std::shared_ptr<const TensorSource> source, const Conversion& conversion) {
  return std::make_shared<Converter>(std::move(source), conversion)->run();
}

}  // namespace annulus::checkpoint
