// The watchdog's decision, on made-up slots.
#include <gtest/gtest.h>

#include "parallel/watchdog.h"

namespace annulus::parallel {
namespace {

class Host {  // two ranks or more, looked at every half second by a detector of 10 s
 public:
  explicit Host(int ranks, bool has_all = true) : slots(static_cast<std::size_t>(ranks)), detector_(10, has_all) {
    for (int r = 0; r < ranks; ++r) {
      auto& s = slots[static_cast<std::size_t>(r)];
      s.present = true;
      s.world_rank = r;
      s.moves = 2;
      s.position = {12, Phase::forward, 3, 1};
    }
    beating.assign(slots.size(), true);
    moving.assign(slots.size(), false);
  }
  std::optional<std::string> run(double seconds) {
    for (double t = 0; t < seconds; t += 0.5) {
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (beating[i]) ++slots[i].watchdog_beats;
        if (moving[i]) ++slots[i].moves;
      }
      if (auto report = detector_.observe(slots, 0.5)) return report;
    }
    return std::nullopt;
  }
  std::vector<Heartbeat::SlotState> slots;
  std::vector<bool> beating, moving;

 private:
  HangDetector detector_;
};

TEST(HangDetector, NamesTheStoppedProcessAtTheSamePosition) {
  Host host(3);
  host.beating[1] = false;
  for (auto& s : host.slots) s.waiting = true;  // also the stopped one was in a wait
  EXPECT_FALSE(host.run(9.5));
  const auto report = host.run(2);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->find(
                "watchdog: rank 1 has not moved for 10 s: step 12, forward, layer 3, hop 1 (its process is stopped)"),
            0u)
      << *report;
  EXPECT_NE(report->find("rank 0 is at step 12, forward, layer 3, hop 1 (waiting for other ranks)"), std::string::npos)
      << *report;
}

TEST(HangDetector, NamesTheOneThatDoesNotWaitEvenWhenAhead) {
  Host host(2);
  host.slots[0].waiting = true;
  host.slots[1].order = 7;
  host.slots[1].position.hop = 2;
  const auto report = host.run(20);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->find("watchdog: rank 1 has not moved"), 0u) << *report;
}

TEST(HangDetector, NamesTheFurthestBehindByOrderNotByLayer) {
  Host host(2);
  for (auto& s : host.slots) s.position = {12, Phase::backward, 5, 0};
  host.slots[0].position.layer = 2;  // backward runs down the layers: ahead
  host.slots[0].order = 40;
  host.slots[1].order = 31;
  const auto report = host.run(20);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->find("watchdog: rank 1 has not moved for 10 s: step 12, backward, layer 5"), 0u) << *report;
}

TEST(HangDetector, SlowIsNotHung) {
  Host host(2);
  host.slots[0].waiting = true;  // rank 1 works for minutes, touching: no alarm
  host.moving[1] = true;
  EXPECT_FALSE(host.run(300));
  host.moving[1] = false;  // then hangs
  const auto report = host.run(20);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->find("watchdog: rank 1 has not moved for 10 s"), 0u) << *report;
}

TEST(HangDetector, FinishedAndAbsentRanksAreNotExpectedToMove) {
  Host host(3);
  host.slots[0].position.phase = Phase::finished;
  host.slots[1].present = false;
  host.moving[2] = true;
  EXPECT_FALSE(host.run(100));
  host.slots[2].position.phase = Phase::finished;
  host.moving[2] = false;
  EXPECT_FALSE(host.run(100));
}

TEST(HangDetector, SaysWhenTheCulpritIsElsewhere) {
  Host partial(2, false), whole(2, true);
  for (Host* host : {&partial, &whole}) {
    for (auto& s : host->slots) s.waiting = true;
  }
  const auto report = partial.run(20), alone = whole.run(20);
  ASSERT_TRUE(report && alone);
  EXPECT_NE(report->find("on another host"), std::string::npos) << *report;
  EXPECT_EQ(alone->find("on another host"), std::string::npos) << *alone;
}

}  // namespace
}  // namespace annulus::parallel
