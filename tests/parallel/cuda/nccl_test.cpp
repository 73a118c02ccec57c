// NcclCommunicator on two ranks or more, against what the host computes: values, pieces, order on the stream with a
// late producer, transfers of two communicators in flight at once.
#include "parallel/nccl_communicator.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "core/cuda/device.h"
#include "core/rng.h"
#include "support/require_gpus.h"

namespace annulus::testing {
namespace {

using parallel::Communicator;
using parallel::Handle;
using parallel::ReduceOp;

const auto* const kRequireGpus = ::testing::AddGlobalTestEnvironment(new RequireGpus);

constexpr auto kDelay = std::chrono::milliseconds(150);

struct Rank {  // this rank's GPU and communicators: made once, since NCCL takes its time
  ComputeDevice device = make_compute_device(DeviceKind::cuda, runtime().local_rank());
  Context ctx = make_device_context(device);
  std::unique_ptr<Communicator> comm = parallel::make_nccl_communicator(runtime().world(), device);
  std::unique_ptr<Communicator> in_pieces =
      parallel::make_nccl_communicator(runtime().world(), device, {.max_message = 4096});
  int rank = comm->rank(), size = comm->size();
};
Rank& here() {
  static auto* const rank = new Rank;  // lives until the process ends: NCCL must not outlive MPI's host communicator
  return *rank;
}

template <class T>
class Buffer {  // on the GPU, poisoned with 0xff
 public:
  explicit Buffer(std::int64_t n) : arena_("test", DeviceKind::cuda, here().device.allocator), n_(n) {
    arena_.allocate("buffer", dtype_of<T>(), {n});
    arena_.commit();
    view_ = arena_.allocate("buffer", dtype_of<T>(), {n});
    put(std::vector<T>(static_cast<std::size_t>(n), std::bit_cast<T>(filled())));
  }
  void put(std::vector<T> values) {
    copy(here().ctx, host_view(values.data(), {n_}), view_);
    synchronize(here().ctx);
  }
  std::vector<T> get() const {
    std::vector<T> out(static_cast<std::size_t>(n_));
    copy(here().ctx, view_, host_view(out.data(), {n_}));
    synchronize(here().ctx);
    return out;
  }
  const TensorView& view() const { return view_; }
  TensorView part(std::int64_t i, std::int64_t n) const { return view_.rows(i * n, n); }

 private:
  static std::array<std::byte, sizeof(T)> filled() {
    std::array<std::byte, sizeof(T)> bytes;
    bytes.fill(std::byte{0xff});
    return bytes;
  }
  Arena arena_;
  std::int64_t n_;
  TensorView view_;
};

// Small whole numbers, exact in every type also after a sum over ranks; different on every rank.
template <class T>
T value(int rank, std::int64_t i) {
  const auto whole = static_cast<int>((i * 7 + rank * 5 + i / 11) % 16);
  if constexpr (std::is_same_v<T, BFloat16>) return to_bfloat16(static_cast<float>(whole));
  else return static_cast<T>(whole);
}
template <class T>
double number(T x) {
  if constexpr (std::is_same_v<T, BFloat16>) return to_float(x);
  else return static_cast<double>(x);
}
template <class T>
std::vector<T> values(int rank, std::int64_t n) {
  std::vector<T> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(value<T>(rank, i));
  return out;
}
template <class T>
void expect_equal(const std::vector<T>& ours, const std::function<double(std::int64_t)>& expected) {
  for (std::size_t i = 0; i < ours.size(); ++i)
    ASSERT_EQ(number(ours[i]), expected(static_cast<std::int64_t>(i))) << "element " << i;
}
template <class T>
double sum_of_ranks(std::int64_t i) {
  double sum = 0;
  for (int r = 0; r < here().size; ++r) sum += number(value<T>(r, i));
  return sum;
}

template <class T>
class NcclTyped : public ::testing::Test {};
using Types = ::testing::Types<float, double, BFloat16, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(NcclTyped, Types);

// 4999 elements go in one piece or in several, the last of them short.
template <class Body>
void both_ways(const Body& body) {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{4999}}) {
    body(*here().comm, n);
    body(*here().in_pieces, n);
  }
}

TYPED_TEST(NcclTyped, Shift) {
  using T = TypeParam;
  Rank& me = here();
  both_ways([&](Communicator& comm, std::int64_t n) {
    for (int distance = 1; distance < me.size; ++distance) {
      Buffer<T> send(n), recv(n);
      send.put(values<T>(me.rank, n));
      comm.wait(me.ctx, comm.shift(me.ctx, send.view(), recv.view(), distance));
      const int from = (me.rank - distance + me.size) % me.size;
      expect_equal<T>(recv.get(), [&](std::int64_t i) { return number(value<T>(from, i)); });
    }
  });
}

TYPED_TEST(NcclTyped, AllReduce) {
  using T = TypeParam;
  Rank& me = here();
  both_ways([&](Communicator& comm, std::int64_t n) {
    Buffer<T> data(n);
    data.put(values<T>(me.rank, n));
    comm.wait(me.ctx, comm.all_reduce(me.ctx, data.view(), ReduceOp::sum));
    expect_equal<T>(data.get(), sum_of_ranks<T>);
  });
}

TYPED_TEST(NcclTyped, AllGather) {
  using T = TypeParam;
  Rank& me = here();
  both_ways([&](Communicator& comm, std::int64_t n) {
    Buffer<T> send(n), recv(n * me.size), in_place(n * me.size);
    send.put(values<T>(me.rank, n));
    comm.wait(me.ctx, comm.all_gather(me.ctx, send.view(), recv.view()));
    copy(me.ctx, send.view(), in_place.part(me.rank, n));
    comm.wait(me.ctx, comm.all_gather(me.ctx, in_place.part(me.rank, n), in_place.view()));
    const auto expected = [&](std::int64_t i) { return number(value<T>(static_cast<int>(i / n), i % n)); };
    expect_equal<T>(recv.get(), expected);
    expect_equal<T>(in_place.get(), expected);
  });
}

TYPED_TEST(NcclTyped, ReduceScatter) {
  using T = TypeParam;
  Rank& me = here();
  both_ways([&](Communicator& comm, std::int64_t n) {
    Buffer<T> send(n * me.size), recv(n);
    send.put(values<T>(me.rank, n * me.size));
    comm.wait(me.ctx, comm.reduce_scatter(me.ctx, send.view(), recv.view()));
    const auto expected = [&](std::int64_t i) { return sum_of_ranks<T>(me.rank * n + i); };
    expect_equal<T>(recv.get(), expected);
    expect_equal<T>(send.get(), [&](std::int64_t i) { return number(value<T>(me.rank, i)); });  // stays
    comm.wait(me.ctx, comm.reduce_scatter(me.ctx, send.view(), send.part(me.rank, n)));
    copy(me.ctx, send.part(me.rank, n), recv.view());
    expect_equal<T>(recv.get(), expected);
  });
}

TYPED_TEST(NcclTyped, Broadcast) {
  using T = TypeParam;
  Rank& me = here();
  both_ways([&](Communicator& comm, std::int64_t n) {
    for (int root = 0; root < me.size; ++root) {
      Buffer<T> data(n);
      data.put(values<T>(me.rank, n));
      comm.wait(me.ctx, comm.broadcast(me.ctx, data.view(), root));
      expect_equal<T>(data.get(), [&](std::int64_t i) { return number(value<T>(root, i)); });
    }
  });
}

TEST(Nccl, MinAndMaxOfWholeNumbersOnly) {
  Rank& me = here();
  constexpr std::int64_t kN = 100;
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    Buffer<std::int64_t> data(kN);
    data.put(values<std::int64_t>(me.rank, kN));
    me.comm->wait(me.ctx, me.comm->all_reduce(me.ctx, data.view(), op));
    expect_equal<std::int64_t>(data.get(), [&](std::int64_t i) {
      double best = number(value<std::int64_t>(0, i));
      for (int r = 1; r < me.size; ++r) {
        const double x = number(value<std::int64_t>(r, i));
        best = op == ReduceOp::min ? std::min(best, x) : std::max(best, x);
      }
      return best;
    });
    Buffer<float> floats(kN);
    EXPECT_THROW(me.comm->all_reduce(me.ctx, floats.view(), op), Error);  // NCCL would drop a NaN
  }
}

TEST(Nccl, SumsHaveTheSameBitsEverywhereAndAgain) {
  Rank& me = here();
  constexpr std::int64_t kN = 100'003;
  const CounterRng rng(11, "nccl " + std::to_string(me.rank));
  std::vector<float> mine(kN), first;
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<float>(rng.normal(i));
  for (int again = 0; again < 3; ++again) {
    Buffer<float> data(kN);
    data.put(mine);
    me.comm->wait(me.ctx, me.comm->all_reduce(me.ctx, data.view(), ReduceOp::sum));
    const auto sum = data.get();
    if (again == 0) first = sum;
    ASSERT_EQ(std::memcmp(sum.data(), first.data(), kN * sizeof(float)), 0);
  }
  std::vector<float> root = first;
  Context host;
  runtime().world().wait(host, runtime().world().broadcast(host, host_view(root.data(), {kN}), 0));
  EXPECT_EQ(std::memcmp(root.data(), first.data(), kN * sizeof(float)), 0);
}

void delay(void*) { std::this_thread::sleep_for(kDelay); }

// The last rank's producer is late. A transfer that did not wait for it would send what was there before; a consumer
// that did not wait for the transfer would read it on the other ranks. The host waits for neither.
TEST(Nccl, OrdersTheStreamAndNotTheHost) {
  Rank& me = here();
  constexpr std::int64_t kN = 1 << 16;
  Buffer<std::int32_t> fresh(kN), send(kN), recv(kN), seen(kN);
  fresh.put(values<std::int32_t>(me.rank, kN));
  me.comm->wait(me.ctx, me.comm->shift(me.ctx, fresh.view(), recv.view(), 1));  // the first call connects the ranks
  synchronize(me.ctx);
  for (int again = 0; again < 5; ++again) {
    send.put(std::vector<std::int32_t>(kN, -1));
    recv.put(std::vector<std::int32_t>(kN, -2));
    runtime().world().barrier();
    const auto begin = std::chrono::steady_clock::now();
    if (me.rank == me.size - 1) ANNULUS_CUDA_TRY(cudaLaunchHostFunc(me.device.cuda->stream, delay, nullptr));
    copy(me.ctx, fresh.view(), send.view());
    const Handle handle = me.comm->shift(me.ctx, send.view(), recv.view(), 1);
    me.comm->wait(me.ctx, handle);
    copy(me.ctx, recv.view(), seen.view());
    const auto host_time = std::chrono::steady_clock::now() - begin;
    expect_equal<std::int32_t>(
        seen.get(), [&](std::int64_t i) { return number(value<std::int32_t>((me.rank + me.size - 1) % me.size, i)); });
    EXPECT_LT(host_time, kDelay / 2) << "the host was blocked";
  }
}

TEST(Nccl, TwoCommunicatorsPassEachOther) {
  Rank& me = here();
  constexpr std::int64_t kN = 1 << 20;
  const auto other = me.comm->split(0, me.size - me.rank);  // ranks in reverse
  ASSERT_EQ(other->rank(), me.size - 1 - me.rank);
  ASSERT_EQ(other->size(), me.size);
  Buffer<float> send(kN), there(kN), back(kN);
  send.put(values<float>(me.rank, kN));
  for (int again = 0; again < 10; ++again) {
    const Handle a = me.comm->shift(me.ctx, send.view(), there.view(), 1);
    const Handle b = other->shift(me.ctx, send.view(), back.view(), 1);
    other->wait(me.ctx, b);
    me.comm->wait(me.ctx, a);
  }
  expect_equal<float>(there.get(),
                      [&](std::int64_t i) { return number(value<float>((me.rank + me.size - 1) % me.size, i)); });
  expect_equal<float>(back.get(), [&](std::int64_t i) { return number(value<float>((me.rank + 1) % me.size, i)); });
}

TEST(Nccl, CountsBytesAndLimitsHandles) {
  Rank& me = here();
  constexpr std::int64_t kN = 1000;
  const auto comm = me.comm->split(0, me.rank);
  Buffer<float> part(kN), whole(kN * me.size), other(kN);
  Context planning = me.ctx;
  planning.planning = true;
  EXPECT_LT(comm->all_reduce(planning, part.view(), ReduceOp::sum).id, 0);
  EXPECT_EQ(comm->counters().all_reduce, 0);
  comm->wait(me.ctx, comm->all_gather(me.ctx, part.view(), whole.view()));
  comm->wait(me.ctx, comm->reduce_scatter(me.ctx, whole.view(), part.view()));
  EXPECT_EQ(comm->counters().all_gather, 4 * kN * (me.size - 1));
  EXPECT_EQ(comm->counters().reduce_scatter, 4 * kN * (me.size - 1));
  std::vector<Handle> open;
  for (int i = 0; i < parallel::kMaxInFlight; ++i) open.push_back(comm->shift(me.ctx, part.view(), other.view(), 1));
  EXPECT_THROW(comm->shift(me.ctx, part.view(), other.view(), 1), Error);
  for (const Handle& handle : open) comm->wait(me.ctx, handle);
  EXPECT_THROW(comm->wait(me.ctx, open.front()), Error);
  synchronize(me.ctx);
}

TEST(Nccl, RefusesHostTensors) {
  float x = 0;
  EXPECT_THROW(here().comm->all_reduce(here().ctx, host_view(&x, {1}), ReduceOp::sum), Error);
}

}  // namespace
}  // namespace annulus::testing
