// Inputs for attention::select_blocks, running it on guarded, poisoned memory, and what every result must be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention/select.h"
#include "core/rng.h"
#include "reference/selection.h"
#include "support/device.h"

namespace annulus::testing::selection {

using reference::BandSize;
using reference::SelectionInput;
using reference::SelectionOutput;
using reference::SelectionRule;
using Lists = std::vector<std::int32_t>;

inline constexpr SelectionRule kPaper{
    .block = 32, .stride = 16, .select_block = 64, .count = 16, .init_blocks = 1, .local_blocks = 2};

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline std::int64_t num_compressed(std::int64_t tokens, const SelectionRule& rule) {
  return tokens < rule.block ? 0 : (tokens - rule.block) / rule.stride + 1;
}

// Tokens 0 … T − 1 with documents of the given lengths, repeated; {} is one document.
inline void set_documents(SelectionInput<double>& in, const std::vector<std::int32_t>& lengths) {
  for (std::int64_t b = 0; b < in.size.batch; ++b) {
    std::int32_t begin = 0;
    std::size_t document = at(b);
    for (std::int32_t t = 0; t < in.size.queries; ++t) {
      if (!lengths.empty() && t - begin == lengths[document % lengths.size()]) {
        begin = t;
        ++document;
      }
      in.token.push_back(t);
      in.start.push_back(begin);
    }
  }
}

inline std::vector<double> normal(std::int64_t size, const char* stream, double deviation = 1) {
  const CounterRng rng(7, stream);
  std::vector<double> x(at(size));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = deviation * rng.normal(i);
  return x;
}

inline constexpr std::int64_t kPadding = 3;  // rows behind the compressed blocks, NaN

// A whole sequence; size.keys is set here.
inline SelectionInput<double> make_input(BandSize size, const SelectionRule& rule,
                                         const std::vector<std::int32_t>& documents = {}, double sharpness = 2) {
  const std::int64_t blocks = num_compressed(size.queries, rule), row = size.kv_heads * size.depth;
  size.keys = blocks + kPadding;
  SelectionInput<double> in{.size = size,
                            .rule = rule,
                            .scale = sharpness / std::sqrt(size.depth),
                            .q = {},
                            .k = {},
                            .token = {},
                            .start = {}};
  in.q = normal(size.q_numel(), "q");
  in.k = normal(size.k_numel(), "k");
  for (std::int64_t i = 0; i < size.k_numel(); ++i) {
    if (i / row % size.keys >= blocks) in.k[at(i)] = std::numeric_limits<double>::quiet_NaN();
  }
  set_documents(in, documents);
  return in;
}

template <class To, class From>
SelectionInput<To> convert(const SelectionInput<From>& in) {
  return {in.size, in.rule, in.scale, {in.q.begin(), in.q.end()}, {in.k.begin(), in.k.end()}, in.token, in.start};
}

inline std::int32_t floor_div(std::int64_t a, std::int64_t b) {
  return static_cast<std::int32_t>(a / b - (a % b < 0 ? 1 : 0));
}

// Runs the operation on poisoned memory at unaligned addresses with exactly the planned scratch.
template <class T>
Lists run(const SelectionInput<T>& in, const std::vector<T>& lse, void (*progress)() = nullptr) {
  const BandSize& s = in.size;
  TestDevice device(DeviceKind::cpu);
  device.context().progress = progress;
  GuardedTensors tensors(device);
  const Shape rows{s.batch, s.queries};
  const auto q = tensors.add(dtype_of<T>(), {s.batch, s.queries, s.query_heads, s.depth}, 1);
  const auto k = tensors.add(dtype_of<T>(), {s.batch, s.keys, s.kv_heads, s.depth}, 3);
  const auto statistics = tensors.add(dtype_of<T>(), {s.batch, s.query_heads, s.queries}, 1);
  const auto first = tensors.add(DType::i32, rows, 1), last = tensors.add(DType::i32, rows, 3);
  const auto token = tensors.add(DType::i32, rows, 1), start = tensors.add(DType::i32, rows, 2);
  const auto selected = tensors.add(DType::i32, {s.batch, s.queries, s.kv_heads, in.rule.count}, 1);
  tensors.commit();
  const auto fill = [&](std::size_t tensor, const auto& values) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size() * sizeof(values[0])), tensors.bytes(tensor));
    if (!values.empty()) std::memcpy(tensors.host(tensor), values.data(), values.size() * sizeof(values[0]));
  };
  Lists first_values, last_values;
  for (std::size_t i = 0; i < in.token.size(); ++i) {
    first_values.push_back(-floor_div(-in.start[i], in.rule.stride));
    last_values.push_back(floor_div(in.token[i] - in.rule.block + 1, in.rule.stride));
  }
  fill(q, in.q);
  fill(k, in.k);
  fill(statistics, lse);
  fill(first, first_values);
  fill(last, last_values);
  fill(token, in.token);
  fill(start, in.start);
  std::memset(tensors.host(selected), 0x7f, at(tensors.bytes(selected)));  // −1 would look like padding
  tensors.upload();
  const auto operation = [&] {
    attention::select_blocks(device.context(), {.q = tensors.view(q),
                                                .k = tensors.view(k),
                                                .first = tensors.view(first),
                                                .last = tensors.view(last),
                                                .lse = tensors.view(statistics),
                                                .token = tensors.view(token),
                                                .start = tensors.view(start),
                                                .selected = tensors.view(selected),
                                                .block = in.rule.block,
                                                .stride = in.rule.stride,
                                                .select_block = in.rule.select_block,
                                                .init_blocks = in.rule.init_blocks,
                                                .local_blocks = in.rule.local_blocks,
                                                .scale = in.scale});
  };
  device.plan_scratch(operation);
  operation();
  tensors.download();
  EXPECT_EQ(tensors.check_guards(), "");
  Lists result(at(tensors.bytes(selected)) / sizeof(std::int32_t));
  std::memcpy(result.data(), tensors.host(selected), at(tensors.bytes(selected)));
  return result;
}

template <class T>
Lists run(const SelectionInput<T>& in) {
  return run(in, reference::select_blocks(in).lse);
}

// One list: row r of the B · T rows, KV head h.
inline Lists list_of(const Lists& selected, const SelectionInput<double>& in, std::int64_t row, std::int64_t head) {
  const auto begin = selected.begin() + (row * in.size.kv_heads + head) * in.rule.count;
  return {begin, begin + in.rule.count};
}

inline bool contains(const Lists& list, std::int64_t block) {
  return std::find(list.begin(), list.end(), static_cast<std::int32_t>(block)) != list.end();
}

// Forced blocks are there, all are candidates, ascending, as many as there can be, then −1.
inline void expect_well_formed(const Lists& selected, const SelectionInput<double>& in) {
  for (std::int64_t row = 0; row < in.size.bounds(); ++row) {
    const std::int64_t own = in.token[at(row)] / in.rule.select_block, first = in.start[at(row)] / in.rule.select_block;
    for (std::int64_t h = 0; h < in.size.kv_heads; ++h) {
      const Lists list = list_of(selected, in, row, h);
      const std::int64_t used = std::min(in.rule.count, own - first + 1);
      for (std::int64_t i = 0; i < in.rule.count; ++i) {
        if (i >= used) ASSERT_EQ(list[at(i)], -1) << "row " << row << " entry " << i;
        else
          ASSERT_TRUE(list[at(i)] >= (i > 0 ? list[at(i - 1)] + 1 : first) && list[at(i)] <= own)
              << "row " << row << " entry " << i;
      }
      for (std::int64_t j = 0; j < in.rule.init_blocks; ++j)
        ASSERT_TRUE(first + j > own || contains(list, first + j)) << "row " << row;
      for (std::int64_t j = 0; j < in.rule.local_blocks; ++j)
        ASSERT_TRUE(own - j < first || contains(list, own - j)) << "row " << row;
    }
  }
}

}  // namespace annulus::testing::selection
