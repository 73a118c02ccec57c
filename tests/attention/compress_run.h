// The operations on compression blocks (attention/compress.h) between guard bytes, and the same naively: block after
// block, row after row, in the arithmetic R, scattered where the operations gather.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/compress.h"
#include "core/rng.h"
#include "support/device.h"

namespace annulus::testing::compression {

using attention::LocalBlocks;

struct Case {
  const char* name;
  std::int64_t batch, chunk, kv_heads, depth;
  bool has_halo;
  LocalBlocks blocks;

  std::int64_t width() const { return kv_heads * depth; }
  std::int64_t halo() const { return has_halo ? blocks.block - blocks.stride : 0; }
  std::int64_t vectors() const { return batch * blocks.rows() * kv_heads; }
  std::int64_t length() const { return blocks.block * depth; }
  Shape x() const { return {batch, blocks.chunks * chunk, kv_heads, depth}; }
  Shape halo_shape() const { return {batch, blocks.chunks, halo(), kv_heads, depth}; }
  Shape y() const { return {batch, blocks.chunks, blocks.per_chunk, kv_heads, depth}; }

  // visit(block of the tensor, its j-th row's number among the rows of x, or −1 − its number among those of halo).
  template <class Visit>
  void for_rows_of_blocks(const Visit& visit) const {
    for (std::int64_t piece = 0; piece < batch * blocks.chunks; ++piece) {
      for (std::int64_t i = 0; i < blocks.num_blocks[piece % blocks.chunks]; ++i) {
        for (std::int64_t j = 0; j < blocks.block; ++j) {
          const std::int64_t row = i * blocks.stride + j;
          visit(piece * blocks.per_chunk + i, j,
                row < chunk ? piece * chunk + row : -1 - (piece * halo() + row - chunk));
        }
      }
    }
  }
};

// A whole sequence of `tokens` on one rank; `padding` blocks behind those that exist.
inline Case alone(const char* name, std::int64_t batch, std::int64_t tokens, std::int64_t kv_heads, std::int64_t depth,
                  std::int64_t l, std::int64_t d, std::int64_t padding = 0) {
  const std::int64_t count = tokens < l ? 0 : (tokens - l) / d + 1;
  return {name, batch, tokens, kv_heads, depth, false, {l, d, 1, count + padding, {count, 0}}};
}

// Two chunks with the rows that follow them; `missing` of the second one's blocks would pass the sequence's end.
inline Case spread(const char* name, std::int64_t batch, std::int64_t chunk, std::int64_t kv_heads, std::int64_t depth,
                   std::int64_t l, std::int64_t d, std::int64_t missing) {
  const std::int64_t count = chunk / d;
  return {name, batch, chunk, kv_heads, depth, true, {l, d, 2, count, {count, count - missing}}};
}

inline std::vector<Case> cases() {
  return {alone("shorter than a block", 1, 7, 2, 3, 8, 4),
          alone("shorter than a block, padded", 2, 7, 2, 3, 8, 4, 3),
          alone("one block", 1, 8, 2, 3, 8, 4),
          alone("a row more than a block", 2, 9, 1, 5, 8, 4),
          alone("rows behind the last block", 2, 47, 3, 7, 8, 4),
          alone("padding", 2, 47, 3, 7, 8, 4, 2),
          alone("single rows", 2, 19, 2, 5, 1, 1),
          alone("l = d", 1, 50, 2, 5, 6, 6),
          alone("l = 4 d", 2, 61, 2, 5, 12, 3),
          alone("d = 1", 1, 33, 2, 1, 5, 1),
          alone("paper", 1, 700, 4, 16, 32, 16),
          spread("two chunks", 2, 24, 3, 5, 8, 4, 0),
          spread("two chunks, the last of the sequence", 2, 24, 3, 5, 12, 4, 2),
          spread("chunks of one block", 1, 8, 2, 3, 8, 2, 3),
          spread("two chunks of single rows", 2, 5, 1, 4, 1, 1, 0),
          spread("no block in the second chunk", 1, 12, 2, 3, 12, 4, 3),
          spread("two chunks, paper", 2, 192, 2, 16, 32, 16, 1)};
}

template <class R>
struct Rows {  // of x and halo, by number
  std::vector<R> x, halo;

  Rows() = default;
  template <class From>
  explicit Rows(const Rows<From>& from) : x(from.x.begin(), from.x.end()), halo(from.halo.begin(), from.halo.end()) {}
  R* operator()(std::int64_t row, std::int64_t width) {
    return row >= 0 ? &x[static_cast<std::size_t>(row * width)] : &halo[static_cast<std::size_t>((-1 - row) * width)];
  }
};

template <class T>
std::vector<T> draw(const char* name, std::int64_t n) {
  const CounterRng rng(5, name);
  std::vector<T> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(rng.normal(i));
  return values;
}

template <class T>
Rows<T> draw_rows(const Case& c) {
  Rows<T> rows;
  rows.x = draw<T>("x", c.x().numel());
  rows.halo = draw<T>("halo", c.halo_shape().numel());
  return rows;
}

// Rows that no block covers, and block vectors that do not exist: NaN.
template <class T>
void poison_uncovered(const Case& c, Rows<T>& rows) {
  Rows<T> kept = rows;
  std::fill(rows.x.begin(), rows.x.end(), std::numeric_limits<T>::quiet_NaN());
  std::fill(rows.halo.begin(), rows.halo.end(), std::numeric_limits<T>::quiet_NaN());
  c.for_rows_of_blocks([&](std::int64_t, std::int64_t, std::int64_t row) {
    std::copy_n(kept(row, c.width()), c.width(), rows(row, c.width()));
  });
}
template <class T>
void poison_padding(const Case& c, std::vector<T>& blocks) {
  std::vector<T> kept(blocks.size(), std::numeric_limits<T>::quiet_NaN());
  kept.swap(blocks);
  const std::int64_t size =
      static_cast<std::int64_t>(blocks.size()) / std::max<std::int64_t>(1, c.batch * c.blocks.rows());
  c.for_rows_of_blocks([&](std::int64_t block, std::int64_t, std::int64_t) {
    std::copy_n(kept.begin() + block * size, size, blocks.begin() + block * size);
  });
}

template <class R>
std::vector<R> naive_mean(const Case& c, Rows<R> rows) {
  std::vector<R> y(static_cast<std::size_t>(c.y().numel()));
  c.for_rows_of_blocks([&](std::int64_t block, std::int64_t, std::int64_t row) {
    for (std::int64_t e = 0; e < c.width(); ++e)
      y[static_cast<std::size_t>(block * c.width() + e)] += rows(row, c.width())[e];
  });
  for (R& value : y) value /= static_cast<R>(c.blocks.block);
  return y;
}

template <class R>
void naive_mean_backward(const Case& c, const std::vector<R>& d_y, Rows<R>& d_rows) {
  c.for_rows_of_blocks([&](std::int64_t block, std::int64_t, std::int64_t row) {
    for (std::int64_t e = 0; e < c.width(); ++e)
      d_rows(row, c.width())[e] +=
          d_y[static_cast<std::size_t>(block * c.width() + e)] / static_cast<R>(c.blocks.block);
  });
}

// visit(element of the block vectors, element of a row): which are the same.
template <class Visit>
void for_unfolded(const Case& c, const Visit& visit) {
  c.for_rows_of_blocks([&](std::int64_t block, std::int64_t j, std::int64_t row) {
    for (std::int64_t e = 0; e < c.width(); ++e) {
      visit((block * c.kv_heads + e / c.depth) * c.length() + j * c.depth + e % c.depth, row, e);
    }
  });
}

template <class R>
std::vector<R> naive_unfold(const Case& c, Rows<R> rows) {
  std::vector<R> u(static_cast<std::size_t>(c.vectors() * c.length()));
  for_unfolded(c, [&](std::int64_t i, std::int64_t row, std::int64_t e) {
    u[static_cast<std::size_t>(i)] = rows(row, c.width())[e];
  });
  return u;
}

template <class R>
void naive_fold(const Case& c, const std::vector<R>& d_u, Rows<R>& d_rows) {
  for_unfolded(c, [&](std::int64_t i, std::int64_t row, std::int64_t e) {
    d_rows(row, c.width())[e] += d_u[static_cast<std::size_t>(i)];
  });
}

// One call between guard bytes: tensors in the order of put(); NaN where nothing was put.
template <class T>
class Call {
 public:
  explicit Call(TestDevice& device) : device_(device), memory_(device) {}

  std::size_t add(const Shape& shape) { return memory_.add(dtype_of<T>(), shape, 1); }
  void commit() { memory_.commit(); }
  void put(std::size_t index, const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(memory_.host(index), values.data(), values.size() * sizeof(T));
  }
  TensorView view(std::size_t index) const { return memory_.view(index); }
  template <class Run>
  void run(const Run& body) {
    device_.plan_scratch([&] { body(device_.context()); });
    memory_.upload();
    body(device_.context());
    memory_.download();
    EXPECT_EQ(memory_.check_guards(), "");
  }
  std::vector<T> get(std::size_t index) {
    std::vector<T> values(static_cast<std::size_t>(memory_.view(index).numel()));
    if (!values.empty()) std::memcpy(values.data(), memory_.host(index), values.size() * sizeof(T));
    return values;
  }

 private:
  TestDevice& device_;
  GuardedTensors memory_;
};

// Rows of a call: x, and halo where the case has one.
template <class T>
struct RowTensors {
  Call<T>& call;
  const Case& c;
  std::size_t x, halo = 0;

  RowTensors(Call<T>& in_call, const Case& in_case) : call(in_call), c(in_case), x(call.add(c.x())) {
    if (c.has_halo) halo = call.add(c.halo_shape());
  }
  void put(const Rows<T>& rows) {
    call.put(x, rows.x);
    if (c.has_halo) call.put(halo, rows.halo);
  }
  Rows<T> get() {
    Rows<T> rows;
    rows.x = call.get(x);
    if (c.has_halo) rows.halo = call.get(halo);
    return rows;
  }
  TensorView halo_view() const { return c.has_halo ? call.view(halo) : TensorView{}; }
};

template <class T>
std::vector<T> block_mean(TestDevice& device, const Case& c, const Rows<T>& rows) {
  Call<T> call(device);
  RowTensors<T> in(call, c);
  const std::size_t y = call.add(c.y());
  call.commit();
  in.put(rows);
  call.run([&](Context& ctx) {
    attention::block_mean(ctx, {.x = call.view(in.x), .halo = in.halo_view(), .y = call.view(y), .blocks = c.blocks});
  });
  return call.get(y);
}

template <class T>
Rows<T> block_mean_backward(TestDevice& device, const Case& c, const std::vector<T>& d_y, const Rows<T>& d_rows) {
  Call<T> call(device);
  RowTensors<T> out(call, c);
  const std::size_t in = call.add(c.y());
  call.commit();
  out.put(d_rows);
  call.put(in, d_y);
  call.run([&](Context& ctx) {
    attention::block_mean_backward(
        ctx, {.d_y = call.view(in), .d_x = call.view(out.x), .d_halo = out.halo_view(), .blocks = c.blocks});
  });
  return out.get();
}

// `count` block vectors from `first`.
template <class T>
std::vector<T> unfold_blocks(TestDevice& device, const Case& c, const Rows<T>& rows, std::int64_t first,
                             std::int64_t count) {
  Call<T> call(device);
  RowTensors<T> in(call, c);
  const std::size_t u = call.add({count, c.length()});
  call.commit();
  in.put(rows);
  call.run([&](Context& ctx) {
    attention::unfold_blocks(
        ctx, {.x = call.view(in.x), .halo = in.halo_view(), .u = call.view(u), .first_row = first, .blocks = c.blocks});
  });
  return call.get(u);
}

template <class T>
Rows<T> fold_blocks(TestDevice& device, const Case& c, const std::vector<T>& d_u, const Rows<T>& d_rows,
                    std::int64_t first, std::int64_t count) {
  Call<T> call(device);
  RowTensors<T> out(call, c);
  const std::size_t in = call.add({count, c.length()});
  call.commit();
  out.put(d_rows);
  call.put(in, {d_u.begin() + first * c.length(), d_u.begin() + (first + count) * c.length()});
  call.run([&](Context& ctx) {
    attention::fold_blocks(ctx, {.d_u = call.view(in),
                                 .d_x = call.view(out.x),
                                 .d_halo = out.halo_view(),
                                 .first_row = first,
                                 .blocks = c.blocks});
  });
  return out.get();
}

}  // namespace annulus::testing::compression
