// The ring on 1 to 4 ranks: who visits what and when, hop skipping, bytes, gradients that come home, two rings at once
// under random delays. Visiting buffers start as NaN.
#include "parallel/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel/mesh.h"
#include "world.h"

namespace annulus::parallel {
namespace {

using testing::value_of;
using testing::view;
using testing::world;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

template <class T>
std::vector<T> poisoned(std::size_t n) {
  return std::vector<T>(n, std::numeric_limits<T>::quiet_NaN());
}

Doubles own_of(int rank, std::size_t n) {
  Doubles values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = 1000 * (rank + 1) + static_cast<double>(i);
  return values;
}

std::vector<std::vector<int>> hop_lists(int ranks) {
  std::vector<std::vector<int>> lists{all_hops(ranks), {0}};
  if (ranks > 1) lists.push_back({0, ranks - 1});
  if (ranks > 3) lists.push_back({0, 2, 3});
  if (ranks > 2) lists.push_back({0, 1});
  return lists;
}

TEST(Ring, VisitsListedSourcesInOrder) {
  Context ctx;
  auto& ring = world();
  const int p = ring.size();
  const std::size_t n = 5003;
  for (const auto& hops : hop_lists(p)) {
    Doubles own = own_of(ring.rank(), n), a = poisoned<double>(n), b = poisoned<double>(n);
    const RingForward args{ring, hops, view(own), {view(a), view(b)}};
    const auto before = ring.counters();
    std::size_t i = 0;
    ring_forward(ctx, args, [&](int source, const TensorView& buffer, bool last) {
      ASSERT_LT(i, hops.size());
      EXPECT_EQ(source, (ring.rank() - hops[i] + p) % p);
      EXPECT_EQ(ctx.place.hop, hops[i]) << "the watchdog would name another hop";
      EXPECT_EQ(last, i + 1 == hops.size());
      EXPECT_EQ(Doubles(buffer.as<double>(), buffer.as<double>() + n), own_of(source, n));
      EXPECT_TRUE(buffer.data == own.data() || buffer.data == a.data() || buffer.data == b.data());
      EXPECT_EQ(buffer.data == own.data(), i == 0);
      ++i;
    });
    EXPECT_EQ(i, hops.size());
    const auto sent = static_cast<std::int64_t>(hops.size() - 1);
    EXPECT_EQ(ring.counters().shift - before.shift, sent * static_cast<std::int64_t>(n * 8));
    EXPECT_EQ(ring.counters().num_shifts - before.num_shifts, sent);
    EXPECT_EQ(own, own_of(ring.rank(), n));
    if (hops.size() == 1) {
      EXPECT_TRUE(std::isnan(a[0]));
    }
    if (hops.size() <= 2) {
      EXPECT_TRUE(std::isnan(b[0]));
    }
  }
}

TEST(Ring, UnusedBuffersMayBeEmpty) {
  Context ctx;
  auto& ring = world();
  const std::vector<int> home{0}, two{0, ring.size() - 1};
  Doubles own = own_of(ring.rank(), 3), a = poisoned<double>(3);
  int visits = 0;
  const auto visit = [&](int, const TensorView&, bool) { ++visits; };
  ring_forward(ctx, {ring, home, view(own), {}}, visit);
  if (ring.size() > 1) ring_forward(ctx, {ring, two, view(own), {view(a), TensorView{}}}, visit);
  EXPECT_EQ(visits, ring.size() > 1 ? 3 : 1);
}

TEST(Ring, BytesOfKeysAndValues) {  // 2 · B · Hkv · D · T · size · (P − 1)
  Context ctx;
  auto& ring = world();
  const std::int64_t b = 2, hkv = 3, d = 8, t = 10;
  Floats own(static_cast<std::size_t>(2 * b * hkv * d * t)), v0(own), v1(own);
  const auto hops = all_hops(ring.size());
  const auto before = ring.counters().shift;
  ring_forward(ctx, {ring, hops, view(own), {view(v0), view(v1)}}, [](int, const TensorView&, bool) {});
  EXPECT_EQ(ring.counters().shift - before, 2 * b * hkv * d * t * 4 * (ring.size() - 1));
}

TEST(Ring, BadHopsAreRefused) {
  Context ctx;
  auto& ring = world();
  Doubles own(3), a(3), b(3);
  for (const std::vector<int>& hops : {std::vector<int>{}, {1}, {0, 0}, {0, ring.size()}}) {
    EXPECT_THROW(ring_forward(ctx, {ring, hops, view(own), {view(a), view(b)}}, [](int, const TensorView&, bool) {}),
                 Error);
  }
}

template <class T>
void fill_zero(Context& ctx, const TensorView& t) {
  if (!ctx.planning) std::fill_n(t.as<T>(), t.numel(), T{0});
}
template <class T>
void add(Context& ctx, const TensorView& from, const TensorView& into) {
  if (ctx.planning) return;
  for (std::int64_t i = 0; i < from.numel(); ++i) into.as<T>()[i] += from.as<T>()[i];
}

// What a rank adds to the gradient of a source's buffer: depends on the buffer, so that a stale one shows. Not inlined,
// so that no product fuses with the addition that follows it.
template <class T>
[[gnu::noinline]] T share(int rank, T buffer_value, std::size_t i) {
  return static_cast<T>(value_of(rank, static_cast<std::int64_t>(i % 97))) * (rank % 2 ? T{100} : T{1}) +
         buffer_value * T{0.001};
}

struct Rings {
  Communicator& kv;
  Communicator& dkv;
};

// One backward with all buffers poisoned; returns the gradient that came home.
template <class T>
std::vector<T> backward(const Rings& rings, const std::vector<int>& hops, std::vector<T> own, double bump = 0,
                        std::mt19937* delays = nullptr) {
  Context ctx;
  const std::size_t n = own.size();
  const int p = rings.kv.size();
  auto a = poisoned<T>(n), b = poisoned<T>(n), home = poisoned<T>(n), partial = poisoned<T>(n), t0 = poisoned<T>(n),
       t1 = poisoned<T>(n);
  const RingBackward args{rings.kv,           rings.dkv,  hops,          view(own),
                          {view(a), view(b)}, view(home), view(partial), {view(t0), view(t1)},
                          fill_zero<T>,       add<T>};
  std::size_t i = 0;
  ring_backward(ctx, args, [&](int source, const TensorView& buffer, const TensorView& gradient) {
    EXPECT_EQ(source, (rings.kv.rank() - hops[i] + p) % p);
    if (delays) testing::sleep_at_random(*delays, 200);
    for (std::size_t k = 0; k < n; ++k) {
      ASSERT_EQ(gradient.as<T>()[k], T{0});
      gradient.as<T>()[k] +=
          share<T>(rings.kv.rank(), buffer.as<T>()[k], k) + (source == 0 ? static_cast<T>(bump) : T{0});
    }
    ++i;
  });
  EXPECT_EQ(i, hops.size());
  return home;
}

template <class T>
std::vector<T> random_own(int rank, std::size_t n) {
  std::vector<T> own(n);
  for (std::size_t i = 0; i < n; ++i) own[i] = static_cast<T>(value_of(rank + 50, static_cast<std::int64_t>(i)));
  return own;
}

template <class T>
void check_backward_sum() {
  auto dkv = world().split(0, world().rank());
  const Rings rings{world(), *dkv};
  const int p = world().size(), r = world().rank();
  const std::size_t n = 3001;
  for (const auto& hops : hop_lists(p)) {
    const auto kv_before = rings.kv.counters().shift, dkv_before = rings.dkv.counters().shift;
    const std::vector<T> home = backward<T>(rings, hops, random_own<T>(r, n));
    // Brute force, in the documented order: the owner's share, then those of the hops. The same bits.
    const std::vector<T> own = random_own<T>(r, n);
    for (std::size_t i = 0; i < n; ++i) {
      T sum = share<T>(r, own[i], i);
      for (std::size_t h = 1; h < hops.size(); ++h) sum += share<T>((r + hops[h]) % p, own[i], i);
      ASSERT_EQ(home[i], sum) << i;
    }
    const auto bytes = static_cast<std::int64_t>(n * sizeof(T)), count = static_cast<std::int64_t>(hops.size());
    EXPECT_EQ(rings.kv.counters().shift - kv_before, bytes * (count - 1));
    EXPECT_EQ(rings.dkv.counters().shift - dkv_before, count == 1 ? 0 : bytes * count);
  }
}

TEST(RingBackward, GradientsComeHomeFloat) { check_backward_sum<float>(); }
TEST(RingBackward, GradientsComeHomeDouble) { check_backward_sum<double>(); }

TEST(RingBackward, EarlyChunkSeesALateRanksContribution) {
  auto dkv = world().split(0, world().rank());
  const Rings rings{world(), *dkv};
  const int p = world().size(), r = world().rank();
  const auto hops = all_hops(p);
  const Doubles plain = backward<double>(rings, hops, random_own<double>(r, 64));
  const Doubles bumped = backward<double>(rings, hops, random_own<double>(r, 64), r == p - 1 ? 1.0 : 0.0);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(bumped[i] - plain[i], r == 0 ? 1.0 : 0.0, 1e-12);
}

TEST(Ring, PlanningVisitsEveryHopAndSendsNothing) {
  Context ctx;
  ctx.planning = true;
  auto& ring = world();
  auto dkv = ring.split(0, ring.rank());
  const auto hops = all_hops(ring.size());
  const TensorView empty{nullptr, DType::f32, DeviceKind::cpu, {7}};
  const auto before = ring.counters();
  std::vector<int> forward, backward;
  ring_forward(ctx, {ring, hops, empty, {empty, empty}},
               [&](int source, const TensorView&, bool) { forward.push_back(source); });
  const RingBackward args{ring,      *dkv, hops, empty, {empty, empty}, empty, empty, {empty, empty}, fill_zero<float>,
                          add<float>};
  ring_backward(ctx, args, [&](int source, const TensorView&, const TensorView&) { backward.push_back(source); });
  EXPECT_EQ(forward.size(), hops.size());
  EXPECT_EQ(backward, forward);
  EXPECT_EQ(ring.counters().num_shifts, before.num_shifts);
  EXPECT_EQ(dkv->counters().num_shifts, 0);
}

// A long chain of forward and backward rings on the mesh's communicators, each step feeding the next, so that one stale
// or torn buffer anywhere changes the end.
Floats chain(Mesh& mesh, int steps, std::mt19937* delays) {
  Context ctx;
  const Rings rings{mesh.kv_ring(), mesh.dkv_ring()};
  const auto hops = all_hops(mesh.size("sequence"));
  const std::size_t n = 2500;  // 10 kB: longer than what is sent eagerly
  Floats state = random_own<float>(world().rank(), n);
  for (int s = 0; s < steps; ++s) {
    if (delays && s % 3 == 0) testing::sleep_at_random(*delays, 500);
    Floats a = poisoned<float>(n), b = poisoned<float>(n), next(n);
    ring_forward(ctx, {rings.kv, hops, view(state), {view(a), view(b)}}, [&](int, const TensorView& buffer, bool) {
      if (delays) testing::sleep_at_random(*delays, 200);
      for (std::size_t i = 0; i < n; ++i) next[i] = 0.4f * next[i] + std::sin(buffer.as<float>()[i]);
    });
    state = backward<float>(rings, hops, next, 0, delays);
    for (float& x : state) x = std::fmod(x, 3.0f);
  }
  return state;
}

TEST(Ring, TwoRingsAtOnceUnderRandomDelaysGiveTheSameBits) {
  const int p = world().size();
  std::vector<std::vector<Axis>> meshes{{{"data", 1}, {"sequence", p}}};
  if (p == 4) meshes.push_back({{"data", 2}, {"sequence", 2}});
  MpiCommunicator small_pieces(MPI_COMM_WORLD, MpiOptions{4096});  // every message in several pieces
  for (const auto& axes : meshes) {
    Mesh mesh(world(), axes), pieces(small_pieces, axes);
    const int sequence = mesh.size("sequence");
    const int steps = 320 / std::max(1, 2 * sequence - 1) + 1;  // hops forward and backward, gradients beside them
    std::mt19937 random(static_cast<unsigned>(1000 + world().rank()));
    const Floats calm = chain(mesh, steps, nullptr);
    EXPECT_TRUE(std::all_of(calm.begin(), calm.end(), [](float x) { return std::isfinite(x); }));
    for (Mesh* m : {&mesh, &pieces}) {
      const Floats delayed = chain(*m, steps, &random);
      EXPECT_EQ(std::memcmp(calm.data(), delayed.data(), calm.size() * sizeof(float)), 0);
    }
    const auto hops_sent = mesh.kv_ring().counters().num_shifts + mesh.dkv_ring().counters().num_shifts;
    if (sequence > 1) {
      EXPECT_GE(hops_sent, 300);
    }
  }
}

}  // namespace
}  // namespace annulus::parallel
