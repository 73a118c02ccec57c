// The mesh's coordinates and sub-communicators, agreement between ranks, and the heartbeat page they share.
#include "parallel/mesh.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <map>

#include "parallel/agreement.h"
#include "parallel/heartbeat.h"
#include "parallel/mpi_runtime.h"
#include "world.h"

namespace annulus::parallel {
namespace {

using testing::view;
using testing::world;
using Ints = std::vector<std::int32_t>;

Ints members(Communicator& c) {  // world ranks, in the communicator's order
  Context ctx;
  Ints own{world().rank()}, all(static_cast<std::size_t>(c.size()));
  c.wait(ctx, c.all_gather(ctx, view(own), view(all)));
  return all;
}

TEST(Mesh, CoordinatesAndMembers) {
  const int p = world().size(), r = world().rank();
  if (p == 4) {
    Mesh mesh(world(), {{"data", 2}, {"sequence", 2}});
    EXPECT_EQ(mesh.coordinate("data"), r / 2);
    EXPECT_EQ(mesh.coordinate("sequence"), r % 2);
    EXPECT_EQ(members(mesh.host("data")), (r % 2 ? Ints{1, 3} : Ints{0, 2}));
    EXPECT_EQ(members(mesh.host("sequence")), (r < 2 ? Ints{0, 1} : Ints{2, 3}));
    EXPECT_EQ(members(mesh.device("sequence")), members(mesh.host("sequence")));
    EXPECT_EQ(members(mesh.kv_ring()), members(mesh.host("sequence")));
    EXPECT_EQ(members(mesh.dkv_ring()), members(mesh.host("sequence")));
    EXPECT_EQ(members(mesh.device_world()), (Ints{0, 1, 2, 3}));
    Mesh three(world(), {{"data", 2}, {"other", 1}, {"sequence", 2}});  // another axis can join
    EXPECT_EQ(members(three.host("sequence")), members(mesh.host("sequence")));
    EXPECT_EQ(three.size("other"), 1);
    EXPECT_EQ(three.coordinate("other"), 0);
    Mesh swapped(world(), {{"sequence", 2}, {"data", 2}});
    EXPECT_EQ(swapped.coordinate("sequence"), r / 2);
    EXPECT_EQ(members(swapped.host("sequence")), (r % 2 ? Ints{1, 3} : Ints{0, 2}));
  }
  Mesh line(world(), {{"data", 1}, {"sequence", p}});
  EXPECT_EQ(line.coordinate("sequence"), r);
  EXPECT_EQ(line.size("data"), 1);
  EXPECT_EQ(line.kv_ring().rank(), r);
  EXPECT_NE(&line.kv_ring(), &line.dkv_ring());
  Mesh replicas(world(), {{"data", p}});
  EXPECT_EQ(replicas.coordinate("data"), r);
  EXPECT_EQ(replicas.kv_ring().size(), 1);
  EXPECT_THROW(line.size("nothing"), Error);
}

TEST(Mesh, DeviceCommunicatorsComeFromTheFactory) {
  int made = 0;
  Mesh mesh(world(), {{"data", 1}, {"sequence", world().size()}}, [&](Communicator& host) {
    ++made;
    return host.split(0, host.size() - host.rank());  // reversed, to be told apart
  });
  EXPECT_EQ(made, 5);  // world, two axes, two rings: none shares another's order of launches
  EXPECT_EQ(mesh.device_world().rank(), world().size() - 1 - world().rank());
  EXPECT_EQ(mesh.host("sequence").rank(), world().rank());
}

TEST(Mesh, AProductThatDoesNotMatchIsRefusedWithWhatFits) {
  const int p = world().size();
  try {
    Mesh mesh(world(), {{"data", 2}, {"sequence", 7}});
    ADD_FAILURE() << "14 ranks on " << p;
  } catch (const ConfigError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("data x sequence = 2 x 7"), std::string::npos) << text;
    EXPECT_NE(text.find(std::to_string(p) + " rank"), std::string::npos) << text;
    EXPECT_NE(text.find("1 x " + std::to_string(p)), std::string::npos) << text;
    if (p == 4) {
      EXPECT_NE(text.find("1 x 4, 2 x 2, 4 x 1"), std::string::npos) << text;
    }
  }
  EXPECT_THROW(Mesh(world(), {{"data", 0}, {"sequence", p}}), ConfigError);
  EXPECT_THROW(Mesh(world(), {{"data", -1}, {"sequence", -p}}), ConfigError);
}

TEST(Split, OrdersByKeyAndKeepsGroupsApart) {
  const int p = world().size(), r = world().rank();
  auto reversed = world().split(0, -r);
  EXPECT_EQ(reversed->rank(), p - 1 - r);
  auto parity = world().split(r % 2, r);
  EXPECT_EQ(parity->size(), r % 2 ? p / 2 : (p + 1) / 2);
  Context ctx;
  std::vector<std::int64_t> sum{r};
  parity->wait(ctx, parity->all_reduce(ctx, view(sum), ReduceOp::sum));
  std::int64_t expected = 0;
  for (int i = r % 2; i < p; i += 2) expected += i;
  EXPECT_EQ(sum[0], expected);
}

std::string disagreement(const Ints& tokens) {
  try {
    check_equal(world(), "batch", std::span<const std::int32_t>(tokens));
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

TEST(Agreement, NamesTheRankThatDiffersOnEveryRank) {
  const int p = world().size(), r = world().rank();
  const Ints common(1001, 7);
  EXPECT_EQ(disagreement(common), "");
  if (p == 1) return;
  for (int odd = p == 2 ? 1 : 0; odd < p; ++odd) {  // of two ranks neither has a majority: rank 0 is taken for right
    Ints mine = common;
    if (r == odd) mine[1000] = 8;
    const std::string text = disagreement(mine);
    EXPECT_NE(text.find("disagree on the batch: rank " + std::to_string(odd) + " of"), std::string::npos) << text;
  }
  Ints longer = common;
  if (r == p - 1) longer.push_back(7);
  EXPECT_NE(disagreement(longer), "");
}

class HeartbeatTest : public ::testing::Test {
 protected:
  HeartbeatTest() : host_(world().split_by_host()) {
    Context ctx;
    std::vector<std::int64_t> id{getpid()};
    world().wait(ctx, world().broadcast(ctx, view(id), 0));
    path_ = ::testing::TempDir() + "annulus_heartbeat_" + std::to_string(id[0]);
  }
  std::unique_ptr<MpiCommunicator> host_;
  std::string path_;
};

TEST_F(HeartbeatTest, EveryRankSeesWhereTheOthersAre) {
  const int r = world().rank();
  Heartbeat heartbeat(*host_, r, world().size(), path_);
  Heartbeat::publish(100 + r, Phase::forward);
  Heartbeat::publish(100 + r, Phase::forward, 3);
  Heartbeat::publish(100 + r, Phase::forward, 3, r);
  host_->barrier();
  EXPECT_NE(access(path_.c_str(), F_OK), 0) << "the file was left behind";
  const auto slots = heartbeat.read();
  ASSERT_EQ(slots.size(), static_cast<std::size_t>(host_->size()));
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int rank = slots[i].world_rank;
    EXPECT_TRUE(slots[i].present);
    EXPECT_EQ(to_string(slots[i].position), fmt::format("step {}, forward, layer 3, hop {}", 100 + rank, rank));
    EXPECT_EQ(slots[i].order, 2);
  }
  host_->barrier();
  const auto mine = static_cast<std::size_t>(heartbeat.local_rank());
  const auto before = heartbeat.read()[mine];
  EXPECT_FALSE(before.waiting);
  Heartbeat::touch();
  EXPECT_NE(heartbeat.read()[mine].moves, before.moves);
  {
    const Heartbeat::Waiting waiting;
    const auto now = heartbeat.read()[mine];
    EXPECT_TRUE(now.waiting);
    EXPECT_EQ(now.moves, before.moves + 1) << "waiting must not look like moving";
  }
  EXPECT_FALSE(heartbeat.read()[mine].waiting);
  host_->barrier();
}

TEST_F(HeartbeatTest, WaitingForOthersDoesNotTouch) {
  Heartbeat heartbeat(*host_, world().rank(), world().size(), path_);
  const auto mine = static_cast<std::size_t>(heartbeat.local_rank());
  const auto before = heartbeat.read()[mine].moves;
  if (world().rank() == 0) usleep(50'000);  // the others wait here
  world().barrier();
  EXPECT_EQ(heartbeat.read()[mine].moves, before);
}

TEST_F(HeartbeatTest, ReadersNeverSeeHalves) {
  Heartbeat heartbeat(*host_, world().rank(), world().size(), path_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  std::int64_t step = 0, reads = 0;
  while (std::chrono::steady_clock::now() < until) {
    for (int k = 0; k < 1000; ++k, ++step) {
      Heartbeat::publish(step, Phase::forward, static_cast<int>(step % 1'000'003), static_cast<int>(step % 1'000'033));
    }
    for (const auto& s : heartbeat.read()) {
      if (s.position.layer < 0 || !s.whole) continue;  // has not begun, or stands in the middle of a publication
      ++reads;
      ASSERT_EQ(s.position.layer, s.position.step % 1'000'003);
      ASSERT_EQ(s.position.hop, s.position.step % 1'000'033);
    }
  }
  EXPECT_GT(reads, 0);
  host_->barrier();
}

TEST_F(HeartbeatTest, AFileThatCannotBeMadeIsAnErrorOnEveryRank) {
  EXPECT_THROW(Heartbeat(*host_, world().rank(), world().size(), path_ + "/no/such/folder"), Error);
}

TEST(HeartbeatOff, CallsWithoutAHeartbeatDoNothing) {
  Heartbeat::publish(1, Phase::forward);
  Heartbeat::touch();
  const Heartbeat::Waiting waiting;
}

}  // namespace
}  // namespace annulus::parallel
