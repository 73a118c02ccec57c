// Rows of the table: silu, and the gates of sparse attention's branches.
#pragma once

#include "ops/cases.h"

namespace annulus::testing {

inline void add_silu_cases(std::vector<Case>& table) {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{15}, std::int64_t{40001}}) {
    const Slot x{"x", Role::work, {n}, Use::in, [](std::int64_t i, double z) {  // σ saturates, and e^−x overflows
                   return i % 97 == 13 ? 1e4 * z : 3 * z;
                 }};
    for (const int alias : {-1, 0}) {
      table.push_back(make_case(
          "silu_forward", dims({n}) + (alias < 0 ? "" : "_in_place"), {x, out("y", Role::work, {n}, alias)},
          [](Context& ctx, const Views& v) {
            ops::silu_forward(ctx, {v[0], v[1]});
          },
          [](auto& t) { reference::silu_forward(t[0], t[1]); }));
    }
    for (const int alias : {-1, 0, 1}) {
      table.push_back(make_case(
          "silu_backward",
          dims({n}) + (alias < 0    ? ""
                       : alias == 0 ? "_over_d_y"
                                    : "_over_x"),
          {in("d_y", Role::work, {n}), x, out("d_x", Role::work, {n}, alias)},
          [](Context& ctx, const Views& v) {
            ops::silu_backward(ctx, {v[0], v[1], v[2]});
          },
          [](auto& t) { reference::silu_backward(t[0], t[1], t[2]); }));
    }
  }
}

inline void add_gate_cases(std::vector<Case>& table) {
  struct Size3 {
    std::int64_t r, heads, d;
  };
  for (const auto& [r, heads, d] :
       {Size3{1, 1, 1}, Size3{3, 2, 5}, Size3{67, 16, 33}, Size3{6, 64, 128}, Size3{41, 3, 64}}) {
    const auto n = static_cast<std::size_t>(heads), depth = static_cast<std::size_t>(d);
    const Shape gates{r, 3 * heads}, rows{r, heads, d};
    const Slot logits{"logits", Role::work, gates, Use::in, [](std::int64_t i, double z) {
                        return i % 7 == 2 ? 1e4 : i % 7 == 5 ? -1e4 : 2 * z;
                      }};
    table.push_back(make_case(
        "gate_forward", dims({r, heads, d}),
        {logits, in("o_cmp", Role::work, rows), in("o_slc", Role::work, rows), in("o_win", Role::work, rows),
         out("out", Role::work, rows)},
        [](Context& ctx, const Views& v) {
          ops::gate_forward(ctx, {.logits = v[0], .o = {v[1], v[2], v[3]}, .out = v[4]});
        },
        [=](auto& t) {
          reference::gate_forward(t[0], {&t[1], &t[2], &t[3]}, t[4], n, depth);
        }));
    table.push_back(make_case(
        "gate_backward", dims({r, heads, d}),
        {in("d_out", Role::work, rows), logits, in("o_cmp", Role::work, rows), in("o_slc", Role::work, rows),
         in("o_win", Role::work, rows), out("d_logits", Role::work, gates), out("d_o_cmp", Role::work, rows),
         out("d_o_slc", Role::work, rows), out("d_o_win", Role::work, rows)},
        [](Context& ctx, const Views& v) {
          ops::gate_backward(
              ctx,
              {.d_out = v[0], .logits = v[1], .o = {v[2], v[3], v[4]}, .d_logits = v[5], .d_o = {v[6], v[7], v[8]}});
        },
        [=](auto& t) {
          reference::gate_backward(t[0], t[1], {&t[2], &t[3], &t[4]}, t[5], {&t[6], &t[7], &t[8]}, n, depth);
        }));
  }
}

}  // namespace annulus::testing
