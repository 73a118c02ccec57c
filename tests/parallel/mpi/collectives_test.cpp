// Every collective against brute force, on odd sizes and types, whole and in small pieces; order of additions; same
// bits over repeats; exact byte counts, against a record of what MPI was really given.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel/mpi_runtime.h"
#include "parallel/shards.h"
#include "world.h"

namespace annulus::parallel::testing {

WireLog wire;

void sleep_at_random(std::mt19937& random, int max_microseconds) {
  usleep(std::uniform_int_distribution<useconds_t>(0, static_cast<useconds_t>(max_microseconds))(random));
}

}  // namespace annulus::parallel::testing

// MPI's profiling interface: these stand before the library's own.
extern "C" int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  auto& wire = annulus::parallel::testing::wire;
  ++wire.messages;
  wire.bytes += count;  // all messages are MPI_BYTE
  wire.largest = std::max<std::int64_t>(wire.largest, count);
  return PMPI_Isend(buffer, count, type, to, tag, comm, request);
}
extern "C" int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  ++annulus::parallel::testing::wire.tests;
  return PMPI_Test(request, done, status);
}

namespace annulus::parallel {
namespace {

using testing::value_of;
using testing::view;
using testing::wire;
using testing::world;

constexpr std::int64_t kWhole = std::int64_t{1} << 30;
const std::vector<std::int64_t> kSizes{1, 2, 3, 17, 64, 1001, 40'003};

template <class T>
T element(int rank, std::int64_t i) {  // exact under any order of additions
  return static_cast<T>((rank + 1) * 3 + (i * 7 + rank * 5) % 11 - 5);
}

template <class T>
class Typed : public ::testing::Test {};
using Types = ::testing::Types<float, double, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(Typed, Types);

std::unique_ptr<MpiCommunicator> make(std::int64_t max_message) {
  return std::make_unique<MpiCommunicator>(MPI_COMM_WORLD, MpiOptions{max_message});
}

TYPED_TEST(Typed, AllReduce) {
  using T = TypeParam;
  Context ctx;
  for (const std::int64_t limit : {kWhole, std::int64_t{40}}) {
    auto c = make(limit);
    for (const std::int64_t n : kSizes) {
      if (limit == 40 && n > 2000) continue;
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
        std::vector<T> data, expected;
        for (std::int64_t i = 0; i < n; ++i) {
          data.push_back(element<T>(c->rank(), i));
          T e = element<T>(0, i);
          for (int r = 1; r < c->size(); ++r) {
            const T x = element<T>(r, i);
            e = op == ReduceOp::sum ? e + x : op == ReduceOp::min ? std::min(e, x) : std::max(e, x);
          }
          expected.push_back(e);
        }
        c->wait(ctx, c->all_reduce(ctx, view(data), op));
        ASSERT_EQ(data, expected) << "n " << n << " pieces of " << limit;
      }
    }
  }
}

TYPED_TEST(Typed, ReduceScatterAndAllGather) {
  using T = TypeParam;
  Context ctx;
  for (const std::int64_t limit : {kWhole, std::int64_t{40}}) {
    auto c = make(limit);
    for (const std::int64_t n : kSizes) {
      if (limit == 40 && n > 2000) continue;
      for (const bool in_place : {false, true}) {
        const auto un = static_cast<std::size_t>(n);
        std::vector<T> whole(un * static_cast<std::size_t>(c->size())), part(un, T{77}), expected(un);
        for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = element<T>(c->rank(), static_cast<std::int64_t>(i));
        const auto untouched = whole;
        for (std::int64_t i = 0; i < n; ++i) {
          for (int r = 0; r < c->size(); ++r) expected[static_cast<std::size_t>(i)] += element<T>(r, c->rank() * n + i);
        }
        const TensorView own = view(whole).rows(c->rank() * n, n);
        c->wait(ctx, c->reduce_scatter(ctx, view(whole), in_place ? own : view(part)));
        if (in_place) std::copy_n(own.as<T>(), n, part.begin());
        else ASSERT_EQ(whole, untouched);
        ASSERT_EQ(part, expected) << "n " << n << " pieces of " << limit;

        std::vector<T> gathered(whole.size(), T{77}), all;
        for (int r = 0; r < c->size(); ++r) {
          for (std::int64_t i = 0; i < n; ++i) all.push_back(element<T>(r, i));
        }
        for (std::int64_t i = 0; i < n; ++i) part[static_cast<std::size_t>(i)] = element<T>(c->rank(), i);
        TensorView place = view(gathered).rows(c->rank() * n, n);
        if (in_place) std::copy_n(part.begin(), n, place.as<T>());
        c->wait(ctx, c->all_gather(ctx, in_place ? place : view(part), view(gathered)));
        ASSERT_EQ(gathered, all) << "n " << n << " pieces of " << limit;
      }
    }
  }
}

TYPED_TEST(Typed, ShiftAndBroadcast) {
  using T = TypeParam;
  Context ctx;
  for (const std::int64_t limit : {kWhole, std::int64_t{40}}) {
    auto c = make(limit);
    for (const std::int64_t n : kSizes) {
      if (limit == 40 && n > 2000) continue;
      const auto un = static_cast<std::size_t>(n);
      const auto of = [&](int rank) {
        std::vector<T> values;
        for (std::int64_t i = 0; i < n; ++i) values.push_back(element<T>(rank, i));
        return values;
      };
      for (int distance = 1; distance < c->size(); ++distance) {
        std::vector<T> send = of(c->rank()), recv(un, T{77});
        c->wait(ctx, c->shift(ctx, view(send), view(recv), distance));
        ASSERT_EQ(recv, of((c->rank() - distance + c->size()) % c->size()));
      }
      for (int root = 0; root < c->size(); ++root) {
        std::vector<T> data = c->rank() == root ? of(root) : std::vector<T>(un, T{77});
        c->wait(ctx, c->broadcast(ctx, view(data), root));
        ASSERT_EQ(data, of(root));
      }
    }
  }
}

[[gnu::noinline]] float share(int rank, std::int64_t i) {  // no product may fuse with the addition that follows
  return static_cast<float>(std::sin(0.37 * static_cast<double>(i % 10'007) + rank)) * (rank % 2 ? 1e4f : 1.0f);
}

// Longer than one piece of the reduction pipeline, several blocks of them, and parts that do not end with a piece.
TEST(Collectives, LongReductionsAreInTheDocumentedOrder) {
  Context ctx;
  auto& c = world();
  const int p = c.size();
  const std::int64_t n = 650'001;
  std::vector<float> whole(static_cast<std::size_t>(n * p)), part(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n * p; ++i) whole[static_cast<std::size_t>(i)] = share(c.rank(), i);
  auto reduced = whole;
  c.wait(ctx, c.reduce_scatter(ctx, view(whole), view(part)));
  c.wait(ctx, c.all_reduce(ctx, view(reduced), ReduceOp::sum));
  for (std::int64_t i = 0; i < n * p; ++i) {
    const int owner = static_cast<int>(i / n);
    float sum = share((owner + 1) % p, i);
    for (int k = 2; k <= p; ++k) sum += share((owner + k) % p, i);
    ASSERT_EQ(reduced[static_cast<std::size_t>(i)], sum) << i;
    if (owner == c.rank()) {
      ASSERT_EQ(part[static_cast<std::size_t>(i - owner * n)], sum) << i;
    }
  }
}

TEST(Collectives, SameBitsOverRepeatsAlignmentsAndDelays) {
  Context ctx;
  auto c = make(1000);
  std::mt19937 random(static_cast<unsigned>(c->rank()));
  for (const std::int64_t n : {5, 3001}) {
    std::vector<float> first;
    for (int repeat = 0; repeat < 6; ++repeat) {
      std::vector<float> storage(static_cast<std::size_t>(n + 16));
      float* data = storage.data() + repeat;  // another alignment each time
      for (std::int64_t i = 0; i < n; ++i) data[i] = static_cast<float>(value_of(c->rank(), i));
      testing::sleep_at_random(random, 300);
      c->wait(ctx, c->all_reduce(ctx, host_view(data, {n}), ReduceOp::sum));
      const std::vector<float> result(data, data + n);
      if (repeat == 0) first = result;
      ASSERT_EQ(std::memcmp(result.data(), first.data(), result.size() * 4), 0);
    }
    std::vector<float> everyone(first.size() * static_cast<std::size_t>(c->size()));
    c->wait(ctx, c->all_gather(ctx, view(first), view(everyone)));
    for (int r = 0; r < c->size(); ++r) {
      ASSERT_EQ(std::memcmp(everyone.data() + r * n, first.data(), first.size() * 4), 0)
          << "rank " << r << " has other bits";
    }
  }
}

TEST(Collectives, PiecesAreNeverLongerThanAllowedAndCountersAreExact) {
  Context ctx;
  for (const std::int64_t limit : {std::int64_t{24}, std::int64_t{1000}, kWhole}) {
    auto c = make(limit);
    const int p = c->size(), r = c->rank();
    const std::int64_t n = 509, bytes = n * 8;
    std::vector<double> data(static_cast<std::size_t>(n), 1), other(data), whole(static_cast<std::size_t>(n * p), 1);
    wire = {};
    c->wait(ctx, c->all_gather(ctx, view(data), view(whole)));
    EXPECT_EQ(c->counters().all_gather, bytes * (p - 1));
    EXPECT_EQ(wire.bytes, c->counters().all_gather);
    c->wait(ctx, c->reduce_scatter(ctx, view(whole), view(data)));
    EXPECT_EQ(c->counters().reduce_scatter, bytes * (p - 1));
    EXPECT_EQ(wire.bytes, c->counters().all_gather + c->counters().reduce_scatter);
    wire.bytes = 0;
    c->wait(ctx, c->all_reduce(ctx, view(data), ReduceOp::sum));
    EXPECT_EQ(wire.bytes, c->counters().all_reduce);
    EXPECT_EQ(c->counters().all_reduce > 0, p > 1);
    wire.bytes = 0;
    c->wait(ctx, c->broadcast(ctx, view(data), p - 1));
    EXPECT_EQ(c->counters().broadcast, p > 1 && r != p - 2 ? bytes : 0);
    EXPECT_EQ(wire.bytes, c->counters().broadcast);
    wire.bytes = wire.messages = 0;
    if (p > 1) c->wait(ctx, c->shift(ctx, view(data), view(other), 1));
    EXPECT_EQ(c->counters().shift, p > 1 ? bytes : 0);
    EXPECT_EQ(c->counters().num_shifts, p > 1 ? 1 : 0);
    EXPECT_EQ(wire.bytes, c->counters().shift);
    const std::int64_t per_message = limit / 8;
    if (p > 1) {
      EXPECT_EQ(wire.messages, (n + per_message - 1) / per_message);
    }
    EXPECT_LE(wire.largest, limit);
    c->barrier();
  }
}

TEST(Collectives, PlanningSendsNothing) {
  Context ctx;
  ctx.planning = true;
  auto c = make(kWhole);
  TensorView part{nullptr, DType::f32, DeviceKind::cpu, {5}},
      whole{nullptr, DType::f32, DeviceKind::cpu, {5 * c->size()}};
  wire = {};
  c->wait(ctx, c->all_reduce(ctx, part, ReduceOp::sum));
  c->wait(ctx, c->all_gather(ctx, part, whole));
  c->wait(ctx, c->reduce_scatter(ctx, whole, part));
  if (c->size() > 1) c->wait(ctx, c->shift(ctx, part, part, 1));
  c->wait(ctx, c->broadcast(ctx, part, 0));
  EXPECT_EQ(wire.messages, 0);
  const ByteCounters& b = c->counters();
  EXPECT_EQ(b.all_reduce + b.all_gather + b.reduce_scatter + b.shift + b.broadcast + b.num_shifts, 0);
}

TEST(Collectives, MinAndMaxKeepNaN) {
  Context ctx;
  auto& c = world();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int where = 0; where < c.size(); ++where) {
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
      std::vector<float> data(3, c.rank() == where ? nan : 1.0f);
      c.wait(ctx, c.all_reduce(ctx, view(data), op));
      for (const float x : data) EXPECT_TRUE(std::isnan(x)) << "NaN of rank " << where << " was lost";
    }
  }
}

TEST(Collectives, SeveralInFlightWaitedForInAnyOrder) {
  Context ctx;
  auto a = make(4096), b = make(kWhole);
  const int p = a->size(), r = a->rank();
  const std::size_t n = 30'000;
  std::vector<double> x(n, r), y(n, r + 10), from_x(n), from_y(n), sum(n, 1), sum2(n, 2);
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::fill(sum.begin(), sum.end(), 1);
    std::fill(sum2.begin(), sum2.end(), 2);
    Handle hx, hy;
    if (p > 1) hx = a->shift(ctx, view(x), view(from_x), 1);
    if (p > 1) hy = a->shift(ctx, view(y), view(from_y), p - 1);
    const Handle hs = b->all_reduce(ctx, view(sum), ReduceOp::sum), ha = a->all_reduce(ctx, view(sum2), ReduceOp::sum);
    if (r % 2) {  // ranks wait in different orders
      a->wait(ctx, ha);
      b->wait(ctx, hs);
    } else {
      b->wait(ctx, hs);
      a->wait(ctx, ha);
    }
    a->wait(ctx, hy);
    a->wait(ctx, hx);
    EXPECT_EQ(sum, std::vector<double>(n, p));
    EXPECT_EQ(sum2, std::vector<double>(n, 2 * p));
    if (p > 1) {
      EXPECT_EQ(from_x, std::vector<double>(n, (r + p - 1) % p));
      EXPECT_EQ(from_y, std::vector<double>(n, (r + 1) % p + 10));
    }
  }
}

// A kernel polls between tiles; that alone must finish a message too long to be sent eagerly.
TEST(Collectives, ProgressMovesLongMessages) {
  Context ctx;
  auto c = make(kWhole);
  if (c->size() == 1) return;
  std::vector<double> send(300'000, c->rank()), recv(send.size(), -1);
  const Handle handle = c->shift(ctx, view(send), view(recv), 1);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (std::int64_t before = -1; before != wire.tests && std::chrono::steady_clock::now() < deadline;) {
    usleep(100);
    before = wire.tests;
    mpi_progress();  // nothing left to test: done
  }
  EXPECT_EQ(recv, std::vector<double>(send.size(), (c->rank() + c->size() - 1) % c->size()));
  const auto before = wire.tests;
  c->wait(ctx, handle);
  EXPECT_EQ(wire.tests, before) << "the message was not finished by mpi_progress()";
}

TEST(Collectives, WrongUseIsRefused) {
  Context ctx;
  auto c = make(kWhole);
  std::vector<BFloat16> half(4);
  EXPECT_THROW(c->all_reduce(ctx, view(half), ReduceOp::sum), Error);
  std::vector<float> a(4), b(5), whole(static_cast<std::size_t>(4 * c->size() + 1));
  EXPECT_THROW(c->all_gather(ctx, view(a), view(whole)), Error);
  EXPECT_THROW(c->shift(ctx, view(a), view(a), c->size()), Error);
  EXPECT_THROW(c->broadcast(ctx, view(a), c->size()), Error);
  EXPECT_THROW(c->wait(ctx, Handle{3}), Error);
  if (c->size() > 1) {
    EXPECT_THROW(c->shift(ctx, view(a), view(b), 1), Error);
  }
  TensorView gpu = view(a);
  gpu.device = DeviceKind::cuda;
  EXPECT_THROW(c->all_reduce(ctx, gpu, ReduceOp::sum), Error);
}

TEST(Collectives, SizesThatDifferBetweenRanksAreAnError) {
  Context ctx;
  if (world().size() == 1) return;
  auto c = make(kWhole);
  const auto n = static_cast<std::size_t>(10 + c->rank());
  std::vector<float> send(n, 1), recv(n, 2);
  const Handle handle = c->shift(ctx, view(send), view(recv), 1);
  try {
    c->wait(ctx, handle);
    ADD_FAILURE() << "a neighbour's message of another size went unnoticed";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("disagree on sizes"), std::string::npos) << e.what();
  }
  world().barrier();
}

TEST(Shards, ReduceGradientsAndGatherParameters) {
  Context ctx;
  auto& c = world();
  const OptimizerShards shards(1001, c.rank(), c.size());
  std::vector<float> flat(static_cast<std::size_t>(shards.total()));
  for (std::size_t i = 0; i < flat.size(); ++i) flat[i] = element<float>(c.rank(), static_cast<std::int64_t>(i));
  shards.reduce_gradients(ctx, c, view(flat));
  const auto sum = [&](std::int64_t i) {
    float s = 0;
    for (int r = 0; r < c.size(); ++r) s += element<float>(r, i);
    return s;
  };
  for (std::int64_t i = shards.begin(); i < shards.end(); ++i) ASSERT_EQ(flat[static_cast<std::size_t>(i)], sum(i));
  for (std::int64_t i = 0; i < shards.total(); ++i) {
    if (i < shards.begin() || i >= shards.end()) flat[static_cast<std::size_t>(i)] = NAN;
  }
  shards.gather_parameters(ctx, c, view(flat));
  for (std::int64_t i = 0; i < shards.total(); ++i) ASSERT_EQ(flat[static_cast<std::size_t>(i)], sum(i));
}

}  // namespace
}  // namespace annulus::parallel
