// Pooling of key/value heads and dense to sparse attention, tensor by tensor.
#include "checkpoint/conversion.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/rng.h"
#include "fixture.h"
#include "model/parameters.h"

namespace annulus::checkpoint {
namespace {

// A model in memory; `value` gives element i of a tensor.
class MemorySource : public TensorSource {
 public:
  using Value = std::function<double(const std::string& tensor, const Shape& shape, std::int64_t i)>;
  MemorySource(const model::ModelConfig& config, DType dtype, Value value, const std::string& group = "model")
      : value_(std::move(value)) {
    model::Transformer model(config);
    model.visit_parameters([&](model::Parameter& p) { tensors_.push_back({group, p.name, dtype, p.shape}); });
    sort();
  }
  void add(const TensorInfo& info) {
    tensors_.push_back(info);
    sort();
  }
  const std::string& path() const override { return path_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  void read(std::string_view group, std::string_view tensor, std::int64_t begin, TensorView out) const override {
    const TensorInfo* info = find(group, tensor);
    ASSERT_NE(info, nullptr) << group << "/" << tensor;
    for (std::int64_t i = 0; i < out.numel(); ++i) {
      const double x = value_(info->group + "/" + info->tensor, info->shape, begin + i);
      if (out.dtype == DType::f64) {
        out.as<double>()[i] = x;
      } else {
        out.as<float>()[i] = static_cast<float>(x);
      }
    }
  }

 private:
  void sort() {
    std::sort(tensors_.begin(), tensors_.end(),
              [](auto& a, auto& b) { return std::pair(a.group, a.tensor) < std::pair(b.group, b.tensor); });
  }
  std::string path_ = "memory";
  std::vector<TensorInfo> tensors_;
  Value value_;
};

double random_value(const std::string& tensor, const Shape&, std::int64_t i) {
  return static_cast<float>(CounterRng(5, tensor).normal(static_cast<std::uint64_t>(i)));
}

model::ModelConfig config(std::int64_t kv_heads, bool bias = true) {
  model::ModelConfig m;
  m.vocab_size = 19;
  m.hidden_size = 10;
  m.intermediate_size = 12;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 12;
  m.num_key_value_heads = kv_heads;
  m.head_dim = 4;
  m.attention_bias = bias;
  m.qk_norm = true;
  m.resolve();
  m.validate();
  return m;
}

model::ModelConfig sparse(model::ModelConfig m, const std::string& kv = "per_branch") {
  m.attention = {model::AttentionKind::nsa};
  m.nsa.kv = kv;
  m.resolve();
  m.validate();
  return m;
}

std::vector<double> values_of(const Slice& s) {
  std::vector<double> wide(static_cast<std::size_t>(s.data.numel()));
  if (s.data.dtype == DType::f64) {
    s.fill({wide.data(), DType::f64, DeviceKind::cpu, s.data.shape});
    return wide;
  }
  std::vector<float> narrow(wide.size());
  s.fill({narrow.data(), DType::f32, DeviceKind::cpu, s.data.shape});
  std::copy(narrow.begin(), narrow.end(), wide.begin());
  return wide;
}

const Slice& named(const std::vector<Slice>& slices, const std::string& name) {
  const auto it = std::find_if(slices.begin(), slices.end(), [&](const Slice& s) { return s.tensor == name; });
  if (it == slices.end()) throw Error("no " + name);
  return *it;
}

bool is_kv(const std::string& name) {
  return name.find("k_proj.") != std::string::npos || name.find("v_proj.") != std::string::npos;
}

TEST(Conversion, AsManyHeadsIsTheIdentity) {
  for (const auto& m : {config(6), sparse(config(6)), sparse(config(6), "shared")}) {
    const auto source = std::make_shared<MemorySource>(m, DType::f32, random_value);
    const auto out = convert_tensors(source, {m, m, Pool::mean, 0});
    ASSERT_EQ(out.size(), source->tensors().size());
    for (const Slice& s : out) {
      const auto got = values_of(s);
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], random_value("model/" + s.tensor, s.global_shape, static_cast<std::int64_t>(i))) << s.tensor;
      }
    }
  }
}

// Against the definition: new head g, row c, is the mean (or the first) of heads g·r … g·r + r − 1, row c; weights and
// biases, and each branch of sparse layers.
TEST(Conversion, ConsecutiveHeadsArePooled) {
  for (const auto& from : {config(6), sparse(config(6)), sparse(config(6), "shared")}) {
    for (const std::int64_t heads : {1, 2, 3}) {
      auto to = from;
      to.num_key_value_heads = heads;
      const std::int64_t r = 6 / heads, d = from.head_dim;
      const auto source = std::make_shared<MemorySource>(from, DType::f32, random_value);
      for (const Pool pool : {Pool::mean, Pool::first}) {
        int pooled = 0;
        for (const Slice& s : convert_tensors(source, {from, to, pool, 0})) {
          const auto got = values_of(s);
          const std::int64_t columns = s.global_shape.rank() == 2 ? s.global_shape[1] : 1;
          for (std::int64_t i = 0; i < s.data.numel(); ++i) {
            double wanted = 0;
            const std::int64_t row = i / columns, g = row / d;
            if (!is_kv(s.tensor)) {
              wanted = random_value("model/" + s.tensor, s.global_shape, i);
            } else {
              const std::int64_t count = pool == Pool::mean ? r : 1;
              for (std::int64_t h = 0; h < count; ++h) {
                const std::int64_t from_row = (g * r + h) * d + row % d;
                wanted += random_value("model/" + s.tensor, {}, from_row * columns + i % columns) /
                          static_cast<double>(count);
              }
              wanted = static_cast<float>(wanted);
            }
            ASSERT_NEAR(got[static_cast<std::size_t>(i)], wanted, 0x1p-23 * std::abs(wanted)) << s.tensor << " " << i;
          }
          pooled += is_kv(s.tensor);
        }
        EXPECT_EQ(pooled, 2 * 2 * 2 * (from.has_nsa() && from.nsa.kv == "per_branch" ? 3 : 1));
      }
    }
  }
}

TEST(Conversion, EqualHeadsPoolToThemselvesBitForBit) {
  const auto from = config(12);
  auto to = from;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t heads : {1, 2, 4}) {  // groups of 12, 6 and 3: thirds do not divide in binary
      to.num_key_value_heads = heads;
      const std::int64_t block = 12 / heads * from.head_dim;
      // Every head of a group has the first one's values.
      const auto value = [&](const std::string& tensor, const Shape& shape, std::int64_t i) {
        if (is_kv(tensor)) {
          const std::int64_t columns = shape.rank() == 2 ? shape[1] : 1, row = i / columns;
          i = (row / block * block + row % from.head_dim) * columns + i % columns;
        }
        const double x = CounterRng(5, tensor).normal(static_cast<std::uint64_t>(i));
        return dtype == DType::f32 ? static_cast<double>(static_cast<float>(x)) : x;
      };
      const auto source = std::make_shared<MemorySource>(from, dtype, value);
      const auto mean = convert_tensors(source, {from, to, Pool::mean, 0}),
                 first = convert_tensors(source, {from, to, Pool::first, 0});
      for (std::size_t i = 0; i < mean.size(); ++i)
        EXPECT_EQ(values_of(mean[i]), values_of(first[i])) << mean[i].tensor;
    }
  }
}

TEST(Conversion, RandomHeadsAreThoseOfAFreshRun) {
  const auto from = config(6);
  auto to = from;
  to.num_key_value_heads = 2;
  const auto source = std::make_shared<MemorySource>(from, DType::f64, random_value);
  const std::string k = "model.layers.1.self_attn.k_proj.";
  const auto weight = [&](std::uint64_t seed, const std::string& name) {
    return values_of(named(convert_tensors(source, {from, to, Pool::random, seed}), name));
  };
  model::Transformer model(to);
  const model::ParameterStore store(model, 0, 1);
  for (const auto& e : store.entries()) {
    if (e.name != k + "weight") continue;
    std::vector<double> fresh(static_cast<std::size_t>(e.count));
    store.initial_values(7, e.offset, std::span(fresh));
    EXPECT_EQ(weight(7, e.name), fresh);
    EXPECT_NE(weight(8, e.name), fresh);
  }
  for (const double x : weight(7, k + "bias")) EXPECT_EQ(x, 0);
}

TEST(Conversion, DenseToSparse) {
  for (const std::int64_t heads : {6, 3}) {
    const auto from = config(6);
    auto to = sparse(from);
    to.num_key_value_heads = heads;
    const auto source = std::make_shared<MemorySource>(from, DType::f64, random_value);
    const auto out = convert_tensors(source, {from, to, Pool::mean, 0});
    auto dense = from;
    dense.num_key_value_heads = heads;
    const auto plain = convert_tensors(source, {from, dense, Pool::mean, 0});
    const std::string layer = "model.layers.0.self_attn.";
    for (const std::string what : {"k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"}) {
      for (const std::string branch : {"cmp_", "slc_", "win_"}) {
        EXPECT_EQ(values_of(named(out, layer + branch + what)), values_of(named(plain, layer + what)))
            << branch << what;
      }
    }
    for (const std::string what : {"q_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"}) {
      EXPECT_EQ(values_of(named(out, layer + what)), values_of(named(plain, layer + what))) << what;
    }
    for (const double x : values_of(named(out, layer + "cmp_k.w2"))) EXPECT_EQ(x, 0) << "compression is the mean";
    for (const double x : values_of(named(out, layer + "gate.weight"))) EXPECT_EQ(x, 0);
    const auto bias = values_of(named(out, layer + "gate.bias"));
    ASSERT_EQ(bias.size(), 36u);
    double sum = 0;
    for (std::size_t branch = 0; branch < 3; ++branch) {
      for (std::size_t h = 0; h < 12; ++h) {
        EXPECT_NEAR(1 / (1 + std::exp(-bias[branch * 12 + h])), kGateStart[branch], 1e-12);
      }
      sum += kGateStart[branch];
    }
    EXPECT_NEAR(sum, 1, 1e-15);
  }
  // One pair of K and V for all branches keeps its name.
  const auto from = config(6);
  const auto source = std::make_shared<MemorySource>(from, DType::f64, random_value);
  const auto out = convert_tensors(source, {from, sparse(from, "shared"), Pool::mean, 0});
  EXPECT_NO_THROW(named(out, "model.layers.1.self_attn.k_proj.weight"));
}

TEST(Conversion, MastersAreTheWeights) {
  const auto m = config(6);
  const auto source = std::make_shared<MemorySource>(m, DType::bf16, random_value);
  model::Transformer model(m);
  model.visit_parameters([&](model::Parameter& p) { source->add({"optimizer/master", p.name, DType::f32, p.shape}); });
  for (const Slice& s : convert_tensors(source, {m, m, Pool::mean, 0})) {
    EXPECT_EQ(s.group, "model");
    EXPECT_EQ(s.data.dtype, DType::f32);
    EXPECT_EQ(values_of(s)[0], random_value("optimizer/master/" + s.tensor, {}, 0)) << s.tensor;
  }
}

TEST(Conversion, WhatCannotBeIsSaid) {
  const auto from = config(6);
  auto to = from;
  const auto source = std::make_shared<MemorySource>(from, DType::f32, random_value);
  for (const std::int64_t heads : {4, 5, 12}) {
    to.num_key_value_heads = heads;
    EXPECT_THROW(convert_tensors(source, {from, to, Pool::mean, 0}), ConfigError) << heads;
  }
  source->add({"model", "model.layers.0.self_attn.rel_bias", DType::f32, {3}});
  try {
    (void)convert_tensors(source, {from, from, Pool::mean, 0});
    ADD_FAILURE() << "a tensor was lost";
  } catch (const CheckpointError& e) {
    EXPECT_NE(std::string(e.what()).find("model.layers.0.self_attn.rel_bias [3] would be lost"), std::string::npos);
  }
  EXPECT_THROW(convert_tensors(source, {config(6, false), from, Pool::mean, 0}), Error);
  EXPECT_THROW(parse_pool("median"), UsageError);
}

}  // namespace
}  // namespace annulus::checkpoint
