// Rows of the table: element by element, matrix products, norms, rotations, gates.
#pragma once

#include "ops/cases.h"

namespace annulus::testing {

using namespace ops;  // the argument structs

inline void add_elementwise_cases(std::vector<Case>& table) {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{5}, std::int64_t{40001}}) {
    for (const Role role : {Role::work, Role::stat, Role::i32}) {
      auto c = make_case(
          "fill",
          dims({n}) + (role == Role::work   ? "_work"
                       : role == Role::stat ? "_stat"
                                            : "_i32"),
          {out("y", role, {n})},
          [](Context& ctx, const Views& v) {
            ops::fill(ctx, {v[0], -3.0});
          },
          [](auto& t) { t[0].assign(t[0].size(), -3); });
      c.tolerance = Tolerance::exact;
      c.fixed_types = role == Role::i32;
      c.mixed_types = role == Role::stat;
      table.push_back(c);
    }
    for (const int alias : {-1, 0, 1}) {
      auto c = make_case(
          "add",
          dims({n}) + "_alias" +
              (alias < 0    ? "_none"
               : alias == 0 ? "_a"
                            : "_b"),
          {in("a", Role::work, {n}), in("b", Role::work, {n}), out("y", Role::work, {n}, alias)},
          [](Context& ctx, const Views& v) {
            ops::add(ctx, {v[0], v[1], v[2]});
          },
          [](auto& t) {
            for (std::size_t i = 0; i < t[0].size(); ++i) t[2][i] = t[0][i] + t[1][i];
          });
      c.tolerance = Tolerance::exact;
      table.push_back(c);
    }
    auto c = make_case(
        "scale", dims({n}), {inout("y", Role::work, {n})},
        [](Context& ctx, const Views& v) {
          ops::scale(ctx, {v[0], 0.375});
        },
        [](auto& t) {
          for (auto& y : t[0]) y *= 0.375f;
        });
    c.tolerance = Tolerance::exact;
    table.push_back(c);
  }
}

// Every pair of types. Values reach from far below to far above what bf16 holds exactly, with ties and near ties.
inline void add_cast_cases(std::vector<Case>& table) {
  const auto value = [](std::int64_t i, double z) {
    switch (i % 8) {
      case 0:
        return 1.0 + 0x1p-8;  // a tie of bf16: down to even
      case 1:
        return 1.0 + 3 * 0x1p-8;  // up to even
      case 2:
        return 1.0 + 0x1p-8 + 0x1p-40;  // just above a tie, which float cannot tell from it
      case 3:
        return -(1.0 + 3 * 0x1p-8 - 0x1p-40);  // just below
      case 4:
        return 1e39 * z;  // beyond float's range, mostly
      case 5:
        return 1e-39 * z;  // denormal in float and bf16
      case 6:
        return i % 16 == 6 ? nan_of<double>() : std::copysign(std::numeric_limits<double>::infinity(), z);
      default:
        return z;
    }
  };
  const std::pair<Role, const char*> types[] = {{Role::f32, "f32"}, {Role::f64, "f64"}, {Role::bf16, "bf16"}};
  for (const auto& [from, from_name] : types) {
    for (const auto& [to, to_name] : types) {
      for (const std::int64_t n : {std::int64_t{3}, std::int64_t{40003}}) {
        auto c = make_case(
            "cast", std::string(from_name) + "_to_" + to_name + "_" + dims({n}),
            {{"x", from, {n}, Use::in, value}, out("y", to, {n})},
            [](Context& ctx, const Views& v) {
              ops::cast(ctx, {v[0], v[1]});
            },
            [](auto& t) { t[1] = t[0]; });
        c.tolerance = Tolerance::exact;
        c.stat_is_f64 = c.fixed_types = true;
        table.push_back(c);
      }
    }
  }
  auto c = make_case(
      "cast", "i32_to_i32", {integers("x", {40003}, -7, 1000), out("y", Role::i32, {40003})},
      [](Context& ctx, const Views& v) {
        ops::cast(ctx, {v[0], v[1]});
      },
      [](auto& t) { t[1] = t[0]; });
  c.tolerance = Tolerance::exact;
  c.fixed_types = true;
  table.push_back(c);
}

inline void add_matmul_case(std::vector<Case>& table, std::int64_t m, std::int64_t n, std::int64_t k, bool ta, bool tb,
                            GradMode mode, Role c_role) {
  const bool add = mode == GradMode::accumulate;
  const auto size = [](std::int64_t x) { return static_cast<std::size_t>(x); };
  auto c = make_case(
      "matmul",
      dims({m, n, k}) + (ta ? "_T" : "_N") + (tb ? "T" : "N") + (add ? "_add" : "") +
          (c_role == Role::stat ? "_stat" : ""),
      {in("a", Role::work, ta ? Shape{k, m} : Shape{m, k}), in("b", Role::work, tb ? Shape{n, k} : Shape{k, n}),
       add ? inout("c", c_role, {m, n}) : out("c", c_role, {m, n})},
      [=](Context& ctx, const Views& v) {
        ops::matmul(ctx, {v[0], v[1], v[2], ta, tb, mode});
      },
      [=](auto& t) { reference::matmul(t[0], t[1], t[2], size(m), size(n), size(k), ta, tb, add); });
  c.mixed_types = c.truncates_in_bf16 = c_role == Role::stat;
  c.any_threads = false;  // OpenBLAS divides the work by the number of threads
  table.push_back(c);
}

inline void add_matmul_cases(std::vector<Case>& table) {
  struct Size3 {
    std::int64_t m, n, k;
  };
  const Size3 sizes[] = {{1, 1, 1},   {96, 64, 64},   {33, 17, 65},  {1, 257, 8},
                         {5, 1, 129}, {130, 70, 257}, {192, 264, 96}};
  for (const auto& s : sizes) {
    for (const bool ta : {false, true}) {
      for (const bool tb : {false, true}) {
        for (const GradMode mode : {GradMode::overwrite, GradMode::accumulate}) {
          for (const Role role : {Role::work, Role::stat}) add_matmul_case(table, s.m, s.n, s.k, ta, tb, mode, role);
        }
      }
    }
  }
}

inline void add_bias_cases(std::vector<Case>& table) {
  struct Size2 {
    std::int64_t r, n;
  };
  for (const auto& [r, n] : {Size2{1, 1}, Size2{7, 3}, Size2{300, 33}, Size2{129, 515}, Size2{65, 768}}) {
    auto c = make_case(
        "add_bias", dims({r, n}), {inout("x", Role::work, {r, n}), in("bias", Role::work, {n})},
        [](Context& ctx, const Views& v) {
          ops::add_bias(ctx, {v[0], v[1]});
        },
        [](auto& t) {
          for (std::size_t i = 0; i < t[0].size(); ++i) t[0][i] += t[1][i % t[1].size()];
        });
    c.tolerance = Tolerance::exact;
    table.push_back(c);
    table.push_back(make_case(
        "add_bias_backward", dims({r, n}), {in("d_y", Role::work, {r, n}), inout("d_bias", Role::stat, {n})},
        [](Context& ctx, const Views& v) {
          ops::add_bias_backward(ctx, {v[0], v[1]});
        },
        [](auto& t) {
          for (std::size_t i = 0; i < t[0].size(); ++i) t[1][i % t[1].size()] += t[0][i];
        }));
  }
}

inline void add_norm_cases(std::vector<Case>& table) {
  struct Size2 {
    std::int64_t r, h;
  };
  for (const auto& [r, h] : {Size2{1, 1}, Size2{5, 7}, Size2{3, 64}, Size2{130, 515}, Size2{70, 768}}) {
    const auto columns = static_cast<std::size_t>(h);
    for (const int alias : {-1, 0}) {
      for (const double sigma : {1.0, 1e-3}) {  // eps = 1e-5 is the larger part of the mean square for 1e-3
        table.push_back(make_case(
            "rms_norm_forward", dims({r, h}) + (alias < 0 ? "" : "_in_place") + (sigma < 1 ? "_small" : ""),
            {in("x", Role::work, {r, h}, sigma), in("w", Role::work, {h}), out("y", Role::work, {r, h}, alias),
             out("rstd", Role::stat, {r})},
            [](Context& ctx, const Views& v) {
              ops::rms_norm_forward(ctx, {v[0], v[1], v[2], v[3], 1e-5});
            },
            [=](auto& t) {
              using R = typename std::decay_t<decltype(t[0])>::value_type;
              reference::rms_norm_forward(t[0], t[1], t[2], t[3], columns, static_cast<R>(1e-5));
            }));
      }
      for (const GradMode mode : {GradMode::overwrite, GradMode::accumulate}) {
        const bool add = mode == GradMode::accumulate;
        if (add && alias >= 0) continue;
        table.push_back(make_case(
            "rms_norm_backward", dims({r, h}) + (alias < 0 ? "" : "_in_place") + (add ? "_add" : ""),
            {in("d_y", Role::work, {r, h}), in("x", Role::work, {r, h}), in("w", Role::work, {h}),
             positive("rstd", Role::stat, {r}, 0.3),
             add ? inout("d_x", Role::work, {r, h}) : out("d_x", Role::work, {r, h}, alias),
             inout("d_w", Role::stat, {h})},
            [=](Context& ctx, const Views& v) {
              ops::rms_norm_backward(ctx, {v[0], v[1], v[2], v[3], v[4], v[5], mode});
            },
            [=](auto& t) { reference::rms_norm_backward(t[0], t[1], t[2], t[3], t[4], t[5], columns, add); }));
      }
    }
  }
}

inline void add_rope_cases(std::vector<Case>& table) {
  struct Size2 {
    std::int64_t r, half;
  };
  for (const auto& [r, half] : {Size2{1, 1}, Size2{7, 3}, Size2{300, 33}, Size2{100, 64}}) {
    const std::int64_t columns = half;
    table.push_back(make_case(
        "rope_table", dims({r, half}),
        {integers("position", {r}, 0, 100000),
         {"inv_freq",
          Role::stat,
          {half},
          Use::in,
          [columns](std::int64_t j, double) {
            return std::pow(10000.0, -static_cast<double>(j) / static_cast<double>(columns));
          }},
         out("cos", Role::stat, {r, half}),
         out("sin", Role::stat, {r, half})},
        [](Context& ctx, const Views& v) {
          ops::rope_table(ctx, {v[0], v[1], v[2], v[3], 1.125});
        },
        [](auto& t) {
          using R = typename std::decay_t<decltype(t[0])>::value_type;
          reference::rope_table(t[0], t[1], t[2], t[3], R(1.125));
        }));
  }
  struct Size3 {
    std::int64_t r, heads, d;
  };
  for (const auto& [r, heads, d] : {Size3{1, 1, 2}, Size3{5, 3, 6}, Size3{9, 2, 64}, Size3{67, 5, 128}}) {
    for (const bool inverse : {false, true}) {
      for (const std::int64_t stride : {1, 3, 16}) {
        const auto rows = static_cast<std::size_t>(r), n = static_cast<std::size_t>(heads),
                   half = static_cast<std::size_t>(d / 2), step = static_cast<std::size_t>(stride);
        // The rows of the table in between hold NaN: nothing may read them.
        const auto entry = [=](const char* name) {
          const std::int64_t columns = d / 2, num_rows = (r - 1) * stride + 1;
          return Slot{name, Role::stat, {num_rows, columns}, Use::in, [=](std::int64_t i, double z) {
                        return i / columns % stride == 0 ? z : nan_of<double>();
                      }};
        };
        table.push_back(make_case(
            "rope",
            dims({r, heads, d}) + (inverse ? "_inverse" : "") + (stride > 1 ? "_every" + std::to_string(stride) : ""),
            {inout("x", Role::work, {r, heads, d}), entry("cos"), entry("sin")},
            [=](Context& ctx, const Views& v) {
              ops::rope(ctx, {v[0], v[1], v[2], inverse, stride});
            },
            [=](auto& t) { reference::rope(t[0], t[1], t[2], rows, n, half, step, inverse); }));
      }
    }
  }
}

inline void add_swiglu_cases(std::vector<Case>& table) {
  const auto gate_value = [](std::int64_t i, double z) { return i % 97 == 13 ? 100 * z : 3 * z; };  // σ also saturates
  struct Size2 {
    std::int64_t r, n;
  };
  for (const auto& [r, n] : {Size2{1, 1}, Size2{3, 5}, Size2{16, 64}, Size2{97, 515}}) {
    const Slot gate{"gate", Role::work, {r, n}, Use::in, gate_value};
    for (const int alias : {-1, 0, 1}) {
      table.push_back(make_case(
          "swiglu_forward",
          dims({r, n}) + (alias < 0    ? ""
                          : alias == 0 ? "_over_gate"
                                       : "_over_up"),
          {gate, in("up", Role::work, {r, n}), out("y", Role::work, {r, n}, alias)},
          [](Context& ctx, const Views& v) {
            ops::swiglu_forward(ctx, {v[0], v[1], v[2]});
          },
          [](auto& t) { reference::swiglu_forward(t[0], t[1], t[2]); }));
    }
    for (const bool in_place : {false, true}) {
      table.push_back(make_case(
          "swiglu_backward", dims({r, n}) + (in_place ? "_in_place" : ""),
          {in("d_y", Role::work, {r, n}), gate, in("up", Role::work, {r, n}),
           out("d_gate", Role::work, {r, n}, in_place ? 1 : -1), out("d_up", Role::work, {r, n}, in_place ? 2 : -1)},
          [](Context& ctx, const Views& v) {
            ops::swiglu_backward(ctx, {v[0], v[1], v[2], v[3], v[4]});
          },
          [](auto& t) { reference::swiglu_backward(t[0], t[1], t[2], t[3], t[4]); }));
    }
  }
}

}  // namespace annulus::testing
