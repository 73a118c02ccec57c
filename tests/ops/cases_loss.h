// Rows of the table: embedding, loss, sums, optimiser.
#pragma once

#include "ops/cases.h"

namespace annulus::testing {

inline void add_embedding_cases(std::vector<Case>& table) {
  struct Size3 {
    std::int64_t r, v, h;
  };
  for (const auto& [r, v, h] : {Size3{1, 1, 1}, Size3{5, 11, 7}, Size3{300, 97, 130}, Size3{1000, 3, 64}}) {
    const auto columns = static_cast<std::size_t>(h);
    auto c = make_case(
        "embedding_forward", dims({r, v, h}),
        {integers("token", {r}, 0, v), in("w", Role::work, {v, h}), out("y", Role::work, {r, h})},
        [](Context& ctx, const Views& t) {
          ops::embedding_forward(ctx, {t[0], t[1], t[2]});
        },
        [=](auto& t) { reference::embedding_forward(t[0], t[1], t[2], columns); });
    c.tolerance = Tolerance::exact;
    table.push_back(c);
    c = make_case(
        "embedding_backward", dims({r, v, h}),
        {integers("token", {r}, 0, v), in("d_y", Role::work, {r, h}), inout("d_w", Role::stat, {v, h})},
        [](Context& ctx, const Views& t) {
          ops::embedding_backward(ctx, {t[0], t[1], t[2]});
        },
        [=](auto& t) { reference::embedding_backward(t[0], t[1], t[2], columns); });
    c.tolerance = Tolerance::exact;  // rows are added in ascending order
    table.push_back(c);
  }
}

inline void add_loss_cases(std::vector<Case>& table) {
  struct Size2 {
    std::int64_t r, v;
  };
  for (const auto& [r, v] : {Size2{1, 1}, Size2{5, 3}, Size2{200, 257}, Size2{3, 50304}, Size2{2, 1001}}) {
    const std::int64_t vocab = v;
    const auto columns = static_cast<std::size_t>(v);
    for (const Role role : {Role::work, Role::stat}) {
      for (const bool gradient : {true, false}) {
        for (const double sigma : {1.0, 40.0}) {  // at 40 a row is close to one-hot, and exponentials reach 0
          // Every third target is absent; with [2, 1001], all are.
          Slot target{"target", Role::i32, {r}, Use::in, [vocab](std::int64_t i, double) {
                        return vocab == 1001 || i % 3 == 2 ? -1.0 : static_cast<double>(i * 37 % vocab);
                      }};
          auto c = make_case(
              "cross_entropy",
              dims({r, v}) + (role == Role::stat ? "_stat" : "") + (gradient ? "" : "_loss") +
                  (sigma > 1 ? "_peaked" : ""),
              {gradient ? inout("logits", role, {r, v}, sigma) : in("logits", role, {r, v}, sigma), target,
               out("loss", Role::stat, {r})},
              [=](Context& ctx, const Views& t) {
                ops::cross_entropy(
                    ctx, {.logits = t[0], .target = t[1], .loss = t[2], .scale = 0.125, .gradient = gradient});
              },
              [=](auto& t) {
                using R = typename std::decay_t<decltype(t[0])>::value_type;
                reference::cross_entropy(t[0], t[1], t[2], columns, R(0.125), gradient);
              });
          c.mixed_types = role == Role::stat;
          table.push_back(c);
        }
      }
    }
  }
}

// `correct` beside loss and gradient. Rows in turn: the target alone is the greatest, another is as great, another is
// just greater, drawn at random from few values (ties everywhere), no target. The rival stands before or after.
inline void add_correct_cases(std::vector<Case>& table) {
  struct Size2 {
    std::int64_t r, v;
  };
  for (const auto& [r, v] : {Size2{5, 1}, Size2{40, 2}, Size2{203, 257}, Size2{30, 1001}, Size2{6, 50304}}) {
    const std::int64_t vocab = v;
    const auto wanted = [vocab](std::int64_t row) { return row * 37 % vocab; };
    const Slot target{"target", Role::i32, {r}, Use::in, [=](std::int64_t row, double) {
                        return row % 5 == 4 ? -1.0 : static_cast<double>(wanted(row));
                      }};
    const auto logit = [=](std::int64_t i, double z) {
      const std::int64_t row = i / vocab, column = i % vocab,
                         rival = (wanted(row) + row / 5 % 3 * 7 + vocab - 1) % vocab;
      if (row % 5 < 3 && column == wanted(row)) return 9.0;
      if (row % 5 == 1 && column == rival) return 9.0;
      if (row % 5 == 2 && column == rival) return 9.0625;  // the next number of bf16
      return std::clamp(std::round(2 * z) / 2, -3.0, 3.0);
    };
    for (const bool gradient : {true, false}) {
      table.push_back(make_case(
          "cross_entropy", dims({r, v}) + "_correct" + (gradient ? "" : "_loss"),
          {{"logits", Role::work, {r, v}, gradient ? Use::inout : Use::in, logit},
           target,
           out("loss", Role::stat, {r}),
           out("correct", Role::i32, {r})},
          [=](Context& ctx, const Views& t) {
            ops::cross_entropy(ctx, {t[0], t[1], t[2], t[3], 0.125, gradient});
          },
          [=](auto& t) {
            using R = typename std::decay_t<decltype(t[0])>::value_type;
            const auto columns = static_cast<std::size_t>(vocab);
            reference::target_is_greatest(t[0], t[1], t[3], columns);
            reference::cross_entropy(t[0], t[1], t[2], columns, R(0.125), gradient);
          }));
    }
  }
}

inline void add_sum_cases(std::vector<Case>& table) {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{7}, std::int64_t{40001}, std::int64_t{600001}}) {
    for (const Role role : {Role::work, Role::stat}) {
      for (const GradMode mode : {GradMode::overwrite, GradMode::accumulate}) {
        const bool add = mode == GradMode::accumulate;
        const std::string label = dims({n}) + (role == Role::stat ? "_stat" : "") + (add ? "_add" : "");
        const std::vector<Slot> slots{in("x", role, {n}, 1, 0.5),
                                      add ? inout("result", Role::f64, {1}) : out("result", Role::f64, {1})};
        auto c = make_case(
            "sum", label, slots,
            [=](Context& ctx, const Views& v) {
              ops::sum(ctx, {v[0], v[1], mode});
            },
            [=](auto& t) {
              auto total = add ? t[1][0] : 0;
              for (const auto x : t[0]) total += x;
              t[1][0] = total;
            });
        c.stat_is_f64 = true;
        c.mixed_types = role == Role::stat;
        table.push_back(c);
        c = make_case(
            "sum_squares", label, slots,
            [=](Context& ctx, const Views& v) {
              ops::sum_squares(ctx, {v[0], v[1], mode});
            },
            [=](auto& t) {
              auto total = add ? t[1][0] : 0;
              for (const auto x : t[0]) total += x * x;
              t[1][0] = total;
            });
        c.stat_is_f64 = true;
        c.mixed_types = role == Role::stat;
        table.push_back(c);
      }
    }
  }
}

inline void add_clip_cases(std::vector<Case>& table) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  struct Row {
    const char* label;
    double sum_squares, loss, max_norm;
  };
  for (const Row& row : {Row{"clips", 16, 2.5, 1}, Row{"keeps", 0.25, 2.5, 1}, Row{"off", 1e6, 2.5, 0},
                         Row{"zero", 0, 0, 1}, Row{"infinite_norm", kInf, 2.5, 1},
                         Row{"nan_norm", nan_of<double>(), 2.5, 1}, Row{"nan_norm_off", nan_of<double>(), 2.5, 0},
                         Row{"nan_loss", 4, nan_of<double>(), 1}, Row{"infinite_loss", 4, -kInf, 0}}) {
    const auto constant = [](const char* name, double x) {
      return Slot{name, Role::f64, {1}, Use::in, [x](std::int64_t, double) { return x; }};
    };
    auto c = make_case(
        "clip_factor", row.label,
        {constant("sum_squares", row.sum_squares), constant("loss", row.loss), out("norm", Role::f64, {1}),
         out("factor", Role::f64, {1})},
        [=](Context& ctx, const Views& v) {
          ops::clip_factor(ctx, {v[0], v[1], v[2], v[3], row.max_norm});
        },
        [=](auto& t) {
          using R = typename std::decay_t<decltype(t[0])>::value_type;
          const R norm = std::sqrt(t[0][0]), most = static_cast<R>(row.max_norm);
          t[2][0] = norm;
          t[3][0] = row.max_norm == 0 || norm + R(1e-6) < most ? R(1) : most / (norm + static_cast<R>(1e-6));
          if (!std::isfinite(norm) || !std::isfinite(t[1][0])) t[3][0] = nan_of<R>();
        });
    c.stat_is_f64 = c.fixed_types = true;
    table.push_back(c);
  }
}

// `master`: -1 none (f32 and f64 only), 0 the memory of param, 1 its own memory and the value to start from.
inline void add_adamw_case(std::vector<Case>& table, std::int64_t n, int master, double clip, int step, double decay) {
  const reference::AdamWNumbers numbers{3e-3, 0.9, 0.95, 1e-8, decay, step};
  std::vector<Slot> slots{inout("param", master == 1 ? Role::work : Role::stat, {n}),
                          inout("master", Role::stat, {n}),
                          inout("m", Role::stat, {n}, 0.1),
                          {"v", Role::stat, {n}, Use::inout, [](std::int64_t, double z) { return 1e-3 * z * z; }},
                          in("grad", Role::stat, {n}, 0.1),
                          {"clip", Role::f64, {1}, Use::in, [clip](std::int64_t, double) { return clip; }}};
  auto c = make_case(
      "adamw",
      dims({n}) +
          (master < 0    ? "_no_master"
           : master == 0 ? "_one_memory"
                         : "_master") +
          "_step" + std::to_string(step) + (std::isfinite(clip) ? "" : "_refused") + (decay > 0 ? "" : "_no_decay"),
      slots,
      [=](Context& ctx, const Views& t) {
        const TensorView own = master < 0 ? TensorView{} : master == 0 ? t[0] : t[1];
        ops::adamw(ctx, {t[0], own, t[2], t[3], t[4], t[5], numbers.lr, numbers.beta1, numbers.beta2, numbers.eps,
                         numbers.weight_decay, 1 - std::pow(numbers.beta1, step), 1 - std::pow(numbers.beta2, step)});
      },
      [=](auto& t) {
        auto& start = master == 1 ? t[1] : t[0];
        reference::adamw(start, t[2], t[3], t[4], t[5][0], numbers);
        if (master == 1 && std::isfinite(clip)) t[0] = t[1];
      });
  table.push_back(c);
}

inline void add_adamw_cases(std::vector<Case>& table) {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{13}, std::int64_t{40007}}) {
    for (const int master : {-1, 0, 1}) {
      add_adamw_case(table, n, master, 0.75, 1, 0.1);
      add_adamw_case(table, n, master, 1, 37, 0);
      add_adamw_case(table, n, master, nan_of<double>(), 3, 0.1);
    }
  }
}

}  // namespace annulus::testing
