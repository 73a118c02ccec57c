// Runs attention over selected blocks on guarded, poisoned memory; its cases, and the cutting of keys into hops.
#pragma once

#include <algorithm>
#include <set>

#include "attention/band_run.h"
#include "attention/select.h"
#include "reference/selected.h"

namespace annulus::testing {

using attention::KeyChunks;
using reference::SelectedInput;

// A sequence of `tokens` tokens, all of them queries and keys.
struct SelectedSize {
  std::int64_t batch = 1, tokens = 1, query_heads = 1, kv_heads = 1, depth = 1, block = 1, count = 1;
};

// How queries choose blocks.
enum class Lists {
  causal,     // the first, the own, the rest random
  documents,  // as causal, within documents of odd lengths; one list entry may touch the document before
  hot,        // the first block alone, whether a row may see some of it or not
  masked,  // the first listed block lies before the document, the last listed after the query: nothing of them is seen
  sparse,  // most rows list nothing
};
inline constexpr std::pair<Lists, const char*> kLists[] = {{Lists::causal, "causal"},
                                                           {Lists::documents, "documents"},
                                                           {Lists::hot, "hot"},
                                                           {Lists::masked, "masked"},
                                                           {Lists::sparse, "sparse"}};

inline std::vector<std::int32_t> choose(const SelectedSize& size, Lists lists, std::int64_t token, std::int64_t start,
                                        const CounterRng& rng, std::uint64_t& draw) {
  const std::int64_t blocks = (size.tokens + size.block - 1) / size.block, own = token / size.block;
  const std::int64_t first = start / size.block;
  std::set<std::int32_t> chosen;
  const auto add = [&](std::int64_t block) {
    if (block >= 0 && block < blocks && static_cast<std::int64_t>(chosen.size()) < size.count)
      chosen.insert(static_cast<std::int32_t>(block));
  };
  if (lists == Lists::sparse && rng.uniform(draw++) < 0.7) return {};
  if (lists == Lists::hot) return {0};
  if (lists == Lists::masked) {
    add(first - 1);
    add(own + 1);
  }
  add(own);
  add(first);
  for (int tries = 0; tries < 4 * size.count; ++tries) {
    add(first + static_cast<std::int64_t>(rng.uniform(draw++) * static_cast<double>(own - first + 1)));
  }
  return {chosen.begin(), chosen.end()};
}

inline SelectedInput<double> selected_input(const SelectedSize& size, Lists lists, std::uint64_t seed = 1,
                                            double sharpness = 1) {
  SelectedInput<double> in{.size = {.batch = size.batch,
                                    .queries = size.tokens,
                                    .keys = size.tokens,
                                    .query_heads = size.query_heads,
                                    .kv_heads = size.kv_heads,
                                    .depth = size.depth},
                           .count = size.count,
                           .block = size.block,
                           .chunks = {size.tokens, {0, -1}},
                           .scale = sharpness / std::sqrt(static_cast<double>(size.depth)),
                           .q = {},
                           .k = {},
                           .v = {},
                           .d_o = {},
                           .selected = {},
                           .token = {},
                           .start = {}};
  const auto fill = [&](std::vector<double>& x, std::int64_t count, const char* stream) {
    const CounterRng rng(seed, stream);  // values of fp32, so that fp32 and fp64 runs have the same inputs
    for (std::int64_t i = 0; i < count; ++i) x.push_back(static_cast<float>(rng.normal(static_cast<std::uint64_t>(i))));
  };
  fill(in.q, in.size.q_numel(), "q");
  fill(in.k, in.size.k_numel(), "k");
  fill(in.v, in.size.k_numel(), "v");
  fill(in.d_o, in.size.q_numel(), "d_o");
  const CounterRng rng(seed, "lists");
  std::uint64_t draw = 0;
  for (std::int64_t b = 0; b < size.batch; ++b) {
    for (std::int64_t t = 0; t < size.tokens; ++t) {
      const std::int64_t document = 2 * size.block + size.block / 2 + 3 + b;  // not a multiple of blocks
      const bool whole = lists == Lists::causal || lists == Lists::hot || lists == Lists::sparse;
      in.token.push_back(static_cast<std::int32_t>(t));
      in.start.push_back(static_cast<std::int32_t>(whole ? 0 : t / document * document));
      for (std::int64_t h = 0; h < size.kv_heads; ++h) {
        auto list = choose(size, lists, t, in.start.back(), rng, draw);
        list.resize(static_cast<std::size_t>(size.count), -1);
        in.selected.insert(in.selected.end(), list.begin(), list.end());
      }
    }
  }
  return in;
}

inline const SelectedSize kSelectedSizes[] = {
    {.batch = 2, .tokens = 131, .query_heads = 1, .kv_heads = 1, .depth = 16, .block = 16, .count = 3},
    {.batch = 1, .tokens = 110, .query_heads = 4, .kv_heads = 2, .depth = 64, .block = 16, .count = 4},
    {.batch = 1, .tokens = 70, .query_heads = 6, .kv_heads = 2, .depth = 17, .block = 3, .count = 5},
    {.batch = 2, .tokens = 37, .query_heads = 4, .kv_heads = 1, .depth = 1, .block = 1, .count = 6},
    {.batch = 1, .tokens = 100, .query_heads = 12, .kv_heads = 2, .depth = 33, .block = 16, .count = 2},
    {.batch = 1, .tokens = 210, .query_heads = 8, .kv_heads = 1, .depth = 32, .block = 64, .count = 3},
    {.batch = 1, .tokens = 63, .query_heads = 12, .kv_heads = 1, .depth = 8, .block = 64, .count = 1},
    {.batch = 1, .tokens = 50, .query_heads = 16, .kv_heads = 1, .depth = 131, .block = 16, .count = 3},
    {.batch = 1, .tokens = 40, .query_heads = 128, .kv_heads = 2, .depth = 5, .block = 16, .count = 2},
    {.batch = 1, .tokens = 200, .query_heads = 2, .kv_heads = 2, .depth = 48, .block = 128, .count = 2},
    {.batch = 1, .tokens = 80, .query_heads = 2, .kv_heads = 1, .depth = 144, .block = 24, .count = 9},
    {.batch = 1, .tokens = 1, .query_heads = 3, .kv_heads = 1, .depth = 7, .block = 16, .count = 1},
};

template <class To, class From>
SelectedInput<To> convert(const SelectedInput<From>& in) {
  return {in.size,           in.count,          in.block,          in.chunks,           in.scale,
          convert<To>(in.q), convert<To>(in.k), convert<To>(in.v), convert<To>(in.d_o), in.selected,
          in.token,          in.start};
}

// Every size with every kind of list, and what the reference makes of them; computed once.
struct SelectedCase {
  std::string name;
  SelectedInput<double> in;
  BandOutput<double> exact;
  BandOutput<float> naive;
};
inline const std::vector<SelectedCase>& selected_cases() {
  static const auto cases = [] {
    std::vector<SelectedCase> made;
    for (const auto& z : kSelectedSizes) {
      for (const auto& [lists, name] : kLists) {
        const auto in = selected_input(z, lists);
        made.push_back({fmt::format("{}, B {} T {} Hq {} Hkv {} D {} l' {} n {}", name, z.batch, z.tokens,
                                    z.query_heads, z.kv_heads, z.depth, z.block, z.count),
                        in, reference::selected_attention(in), reference::selected_attention(convert<float>(in))});
      }
    }
    return made;
  }();
  return cases;
}

// Calls visit(row in the buffer of `chunks`, row of K in `in`) for the rows of every sequence, both with their batch.
template <class T, class Visit>
void for_key_rows(const SelectedInput<T>& in, const KeyChunks& chunks, const Visit& visit) {
  const std::int64_t keys = chunks.chunk * (chunks.begin[1] < 0 ? 1 : 2);
  for (std::int64_t b = 0; b < in.size.batch; ++b) {
    for (std::int64_t s = 0; s < keys; ++s) visit(b * keys + s, b * in.size.keys + reference::token_of(chunks, s));
  }
}

// The same queries against a buffer with some of the keys; `in` holds the whole sequence.
template <class T>
SelectedInput<T> with_keys(const SelectedInput<T>& in, const KeyChunks& chunks) {
  SelectedInput<T> hop = in;
  hop.chunks = chunks;
  hop.size.keys = chunks.chunk * (chunks.begin[1] < 0 ? 1 : 2);
  hop.k.resize(static_cast<std::size_t>(hop.size.k_numel()));
  hop.v.resize(hop.k.size());
  const std::int64_t row = in.size.kv_heads * in.size.depth;
  for_key_rows(in, chunks, [&](std::int64_t to, std::int64_t from) {
    std::copy_n(in.k.begin() + from * row, row, hop.k.begin() + to * row);
    std::copy_n(in.v.begin() + from * row, row, hop.v.begin() + to * row);
  });
  return hop;
}

// selected_forward on top of `state` (or of nothing). With `out`, also the finished output, in memory of its own.
template <class T>
void run_forward(const SelectedInput<T>& in, BandState<T>& state, bool has_state, std::vector<T>* out = nullptr) {
  BandMemory<T> memory(in.size);
  const auto q = memory.queries(), k = memory.keys(), v = memory.keys();
  const auto selected = memory.add(DType::i32, {in.size.batch, in.size.queries, in.size.kv_heads, in.count}, 1);
  const auto token = memory.bounds(), start = memory.bounds();
  const auto o = memory.queries(), lse = memory.statistics(), result = memory.queries();
  memory.tensors().commit();
  memory.fill(q, in.q);
  memory.fill(k, in.k);
  memory.fill(v, in.v);
  memory.fill(selected, in.selected);
  memory.fill(token, in.token);
  memory.fill(start, in.start);
  if (has_state) {
    memory.fill(o, state.o);
    memory.fill(lse, state.lse);
  }
  memory.run([&](Context& ctx) {
    attention::selected_forward(ctx, {.q = memory.view(q),
                                      .k = memory.view(k),
                                      .v = memory.view(v),
                                      .selected = memory.view(selected),
                                      .token = memory.view(token),
                                      .start = memory.view(start),
                                      .o = memory.view(o),
                                      .lse = memory.view(lse),
                                      .has_state = has_state,
                                      .out = out ? memory.view(result) : TensorView{},
                                      .select_block = in.block,
                                      .keys = in.chunks,
                                      .scale = in.scale});
  });
  state = {memory.read(o), memory.read(lse)};
  if (out) *out = memory.read(result);
}

// Adds into result.d_q, d_k, d_v; reads its lse and delta. `progress`: Context::progress.
template <class T>
void run_backward(const SelectedInput<T>& in, BandOutput<T>& result, void (*progress)() = nullptr) {
  BandMemory<T> memory(in.size);
  memory.device().context().progress = progress;
  const auto q = memory.queries(), k = memory.keys(), v = memory.keys(), d_o = memory.queries();
  const auto selected = memory.add(DType::i32, {in.size.batch, in.size.queries, in.size.kv_heads, in.count}, 1);
  const auto token = memory.bounds(), start = memory.bounds();
  const auto lse = memory.statistics(), delta = memory.statistics();
  const auto d_q = memory.queries(), d_k = memory.keys(), d_v = memory.keys();
  memory.tensors().commit();
  memory.fill(q, in.q);
  memory.fill(k, in.k);
  memory.fill(v, in.v);
  memory.fill(d_o, in.d_o);
  memory.fill(selected, in.selected);
  memory.fill(token, in.token);
  memory.fill(start, in.start);
  memory.fill(lse, result.lse);
  memory.fill(delta, result.delta);
  memory.fill(d_q, result.d_q);
  memory.fill(d_k, result.d_k);
  memory.fill(d_v, result.d_v);
  memory.run([&](Context& ctx) {
    attention::selected_backward(ctx, {.q = memory.view(q),
                                       .k = memory.view(k),
                                       .v = memory.view(v),
                                       .selected = memory.view(selected),
                                       .token = memory.view(token),
                                       .start = memory.view(start),
                                       .d_o = memory.view(d_o),
                                       .lse = memory.view(lse),
                                       .delta = memory.view(delta),
                                       .d_q = memory.view(d_q),
                                       .d_k = memory.view(d_k),
                                       .d_v = memory.view(d_v),
                                       .select_block = in.block,
                                       .keys = in.chunks,
                                       .scale = in.scale});
  });
  result.d_q = memory.read(d_q);
  result.d_k = memory.read(d_k);
  result.d_v = memory.read(d_v);
}

// One call over all keys: output, statistics, gradients from zero.
template <class T>
BandOutput<T> run_selected(const SelectedInput<T>& in) {
  BandState<T> state;
  run_forward(in, state, false);
  const BandInput<T> rows{in.size, in.scale, in.q, in.k, in.v, in.d_o, {}, {}};
  BandOutput<T> result{state.o, state.lse, run_delta(rows, state.o), {}, {}, {}};
  result.d_q.assign(in.q.size(), 0);
  result.d_k.assign(in.k.size(), 0);
  result.d_v.assign(in.v.size(), 0);
  run_backward(in, result);
  return result;
}

template <class T>
bool same_bits(const BandOutput<T>& a, const BandOutput<T>& b) {
  return std::all_of(std::begin(kBandOutputs<T>), std::end(kBandOutputs<T>),
                     [&](const auto& tensor) { return same_bits(a.*tensor.values, b.*tensor.values); });
}

// Buffers that together hold a sequence: whole; in two and three parts; the hops of zigzag rings of 2 and 3 ranks.
inline std::vector<std::vector<KeyChunks>> hops_of(std::int64_t tokens) {
  std::vector<std::vector<KeyChunks>> splits;
  for (const std::int64_t parts : {2, 3}) {
    std::vector<KeyChunks> contiguous, zigzag;
    const std::int64_t chunk = tokens / (2 * parts);
    for (std::int64_t r = parts - 1; r >= 0; --r) {
      contiguous.push_back({2 * chunk, {2 * r * chunk, -1}});
      zigzag.push_back({chunk, {r * chunk, (2 * parts - 1 - r) * chunk}});
    }
    splits.push_back(contiguous);
    splits.push_back(zigzag);
  }
  return splits;
}

// Sequences that every split of hops_of cuts at edges of blocks.
inline const SelectedSize kHopSizes[] = {
    {.batch = 2, .tokens = 96, .query_heads = 4, .kv_heads = 2, .depth = 17, .block = 8, .count = 4},
    {.batch = 1, .tokens = 72, .query_heads = 3, .kv_heads = 1, .depth = 32, .block = 3, .count = 7},
    {.batch = 1, .tokens = 192, .query_heads = 2, .kv_heads = 2, .depth = 16, .block = 16, .count = 5},
};

}  // namespace annulus::testing
