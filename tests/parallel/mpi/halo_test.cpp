// The exchange of chunk edges on 1 to 4 ranks: every chunk gets what its neighbour sent, in both directions and
// layouts, and that stays so under random delays with another ring in flight. What is received lies on NaN.
#include "parallel/halo.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "world.h"

namespace annulus::parallel {
namespace {

using testing::value_of;
using testing::view;
using testing::world;
using Floats = std::vector<float>;

constexpr LayoutKind kLayouts[] = {LayoutKind::zigzag, LayoutKind::contiguous};
constexpr ChunkShift kDirections[] = {ChunkShift::up, ChunkShift::down};

SequenceLayout layout_of(LayoutKind kind, int ranks) { return {kind, 24 * ranks, ranks}; }

// The chunk's number in the sequence.
int chunk_of(const SequenceLayout& layout, int rank, int slot) {
  return static_cast<int>(layout.chunk_begin(rank)[static_cast<std::size_t>(slot)] / layout.chunk());
}

// The chunk whose rows a chunk gets, or −1.
int source_of(const SequenceLayout& layout, int chunk, ChunkShift direction) {
  const int source = direction == ChunkShift::up ? chunk - 1 : chunk + 1;
  return source < 2 * layout.ranks() ? source : -1;
}

Floats rows_of(int chunk, std::size_t n) {
  Floats rows(n);
  for (std::size_t i = 0; i < n; ++i) rows[i] = static_cast<float>(value_of(chunk, static_cast<std::int64_t>(i % 97)));
  return rows;
}
Floats poisoned(std::size_t n) { return Floats(n, std::numeric_limits<float>::quiet_NaN()); }

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Halo, OnlyTheSequencesEndsHaveNoNeighbour) {
  for (int ranks = 2; ranks <= 5; ++ranks) {
    for (const LayoutKind kind : kLayouts) {
      const SequenceLayout layout = layout_of(kind, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        for (int slot = 0; slot < 2; ++slot) {
          const int chunk = chunk_of(layout, rank, slot);
          for (const ChunkShift direction : kDirections) {
            EXPECT_EQ(has_neighbour(layout, rank, slot, direction), source_of(layout, chunk, direction) >= 0);
          }
        }
      }
    }
  }
  const SequenceLayout alone(LayoutKind::zigzag, 7, 1);
  EXPECT_FALSE(has_neighbour(alone, 0, 0, ChunkShift::up));
  EXPECT_FALSE(has_neighbour(alone, 0, 0, ChunkShift::down));
}

void check(Communicator& ring, LayoutKind kind, ChunkShift direction, std::size_t n) {
  Context ctx;
  const SequenceLayout layout = layout_of(kind, ring.size());
  Floats send[2], recv[2];
  for (int slot = 0; slot < 2; ++slot) {
    send[slot] = rows_of(chunk_of(layout, ring.rank(), slot), n);
    recv[slot] = poisoned(n);
  }
  const ByteCounters before = ring.counters();
  shift_chunks(ctx, ring, layout, direction, {view(send[0]), view(send[1])}, {view(recv[0]), view(recv[1])});
  for (int slot = 0; slot < 2; ++slot) {
    const int chunk = chunk_of(layout, ring.rank(), slot), source = source_of(layout, chunk, direction);
    EXPECT_TRUE(same_bits(send[slot], rows_of(chunk, n))) << "slot " << slot << " sent and changed";
    if (source < 0) continue;
    EXPECT_TRUE(same_bits(recv[slot], rows_of(source, n))) << "chunk " << chunk << " of " << 2 * layout.ranks();
  }
  const std::int64_t messages = ring.counters().num_shifts - before.num_shifts;
  EXPECT_EQ(messages, kind == LayoutKind::zigzag ? 2 : 1);
  EXPECT_EQ(ring.counters().shift - before.shift, messages * static_cast<std::int64_t>(n * sizeof(float)));
}

TEST(Halo, EveryChunkGetsItsNeighboursRows) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no neighbour";
  MpiCommunicator small_pieces(MPI_COMM_WORLD, MpiOptions{4096});  // every long message in several pieces
  for (const LayoutKind kind : kLayouts) {
    for (const ChunkShift direction : kDirections) {
      SCOPED_TRACE(std::string(kind == LayoutKind::zigzag ? "zigzag" : "contiguous") +
                   (direction == ChunkShift::up ? " up" : " down"));
      for (const std::size_t n : {1, 37, 5003}) {
        check(world(), kind, direction, n);
        check(small_pieces, kind, direction, n);
      }
    }
  }
}

TEST(Halo, AloneOrOnAnotherRingItIsRefused) {
  Context ctx;
  Floats a(3), b(3), c(3), d(3);
  const auto shift = [&](int ranks) {
    shift_chunks(ctx, world(), layout_of(LayoutKind::zigzag, ranks), ChunkShift::up, {view(a), view(b)},
                 {view(c), view(d)});
  };
  EXPECT_THROW(shift(1), Error);
  EXPECT_THROW(shift(world().size() + 1), Error);
}

TEST(Halo, PlanningSendsNothing) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no neighbour";
  Context ctx;
  ctx.planning = true;
  const TensorView empty{nullptr, DType::f32, DeviceKind::cpu, {7}};
  const std::int64_t before = world().counters().num_shifts;
  for (const LayoutKind kind : kLayouts) {
    for (const ChunkShift direction : kDirections) {
      shift_chunks(ctx, world(), layout_of(kind, world().size()), direction, {empty, empty}, {empty, empty});
    }
  }
  EXPECT_EQ(world().counters().num_shifts, before);
}

// A chunk's next state: of its own and of what it got. Not inlined, so that both callers round alike.
[[gnu::noinline]] void next_state(Floats& state, const Floats* received) {
  for (std::size_t i = 0; i < state.size(); ++i) {
    state[i] = std::fmod(0.75f * state[i] + (received ? (*received)[i] : 1.0f), 3.0f);
  }
}

ChunkShift direction_of(int round) { return kDirections[round % 3 == 0]; }

// The whole sequence on one rank.
std::vector<Floats> simulate(const SequenceLayout& layout, int rounds, std::size_t n) {
  std::vector<Floats> state;
  for (int chunk = 0; chunk < 2 * layout.ranks(); ++chunk) state.push_back(rows_of(chunk, n));
  for (int round = 0; round < rounds; ++round) {
    const std::vector<Floats> sent = state;
    for (int chunk = 0; chunk < 2 * layout.ranks(); ++chunk) {
      const int source = source_of(layout, chunk, direction_of(round));
      next_state(state[static_cast<std::size_t>(chunk)],
                 source < 0 ? nullptr : &sent[static_cast<std::size_t>(source)]);
    }
  }
  return state;
}

// The same on the ranks, each round's exchange between the start and the end of a shift on `kv`.
void run_rounds(Communicator& ring, Communicator& kv, const SequenceLayout& layout, int rounds, std::size_t n,
                Floats (&state)[2]) {
  Context ctx;
  const int p = ring.size(), r = ring.rank();
  std::mt19937 random(static_cast<unsigned>(77 + r));
  Floats kv_send(4 * n), kv_recv = poisoned(4 * n);
  for (int slot = 0; slot < 2; ++slot) state[slot] = rows_of(chunk_of(layout, r, slot), n);
  for (int round = 0; round < rounds; ++round) {
    std::fill(kv_send.begin(), kv_send.end(), static_cast<float>(1000 * round + r));
    testing::sleep_at_random(random, 300);
    const Handle visiting = kv.shift(ctx, view(kv_send), view(kv_recv), 1);
    testing::sleep_at_random(random, 300);
    Floats recv[2]{poisoned(n), poisoned(n)};
    shift_chunks(ctx, ring, layout, direction_of(round), {view(state[0]), view(state[1])},
                 {view(recv[0]), view(recv[1])});
    for (int slot = 0; slot < 2; ++slot) {
      next_state(state[slot], has_neighbour(layout, r, slot, direction_of(round)) ? &recv[slot] : nullptr);
    }
    kv.wait(ctx, visiting);
    const auto wanted = static_cast<float>(1000 * round + (r + p - 1) % p);
    ASSERT_TRUE(std::all_of(kv_recv.begin(), kv_recv.end(), [=](float x) { return x == wanted; })) << round;
  }
}

TEST(Halo, RoundsUnderRandomDelaysBesideARingGiveTheSameBits) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no neighbour";
  constexpr int kRounds = 200;
  constexpr std::size_t kRows = 2500;  // 10 kB: longer than what is sent eagerly
  const auto kv = world().split(0, world().rank());
  for (const LayoutKind kind : kLayouts) {
    const SequenceLayout layout = layout_of(kind, world().size());
    const auto wanted = simulate(layout, kRounds, kRows);
    Floats state[2];
    run_rounds(world(), *kv, layout, kRounds, kRows, state);
    for (int slot = 0; slot < 2; ++slot) {
      const Floats& expected = wanted[static_cast<std::size_t>(chunk_of(layout, world().rank(), slot))];
      EXPECT_TRUE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
      EXPECT_TRUE(same_bits(state[slot], expected)) << "slot " << slot;
    }
  }
}

}  // namespace
}  // namespace annulus::parallel
