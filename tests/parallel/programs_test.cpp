// Whole programs: this executable starts itself under mpirun, with one disabled test as the program's body, and looks
// at exit code and output. A stopped or stuck rank ends the job with exit code 6, and is named; a slow one does not.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "parallel/mpi_runtime.h"
#include "parallel/watchdog.h"

namespace annulus::parallel {
namespace {

using Clock = std::chrono::steady_clock;

struct Outcome {
  int exit_code = -1;
  std::string output;
  double seconds = 0;
};

Outcome run_program(const std::string& name, int ranks) {  // 0: without mpirun
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return {};
  std::string command = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; exec timeout -k 1 60 ";
  if (ranks > 0) command += "mpirun --oversubscribe --bind-to none -np " + std::to_string(ranks) + " ";
  command += std::string(self) + " --gtest_also_run_disabled_tests --gtest_filter=Program.DISABLED_" + name + " 2>&1";
  Outcome outcome;
  const auto start = Clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return outcome;
  char text[4096];
  for (std::size_t n; (n = fread(text, 1, sizeof(text), pipe)) > 0;) outcome.output.append(text, n);
  const int status = pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return outcome;
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Runs `step` in a job with a watchdog of one second, and leaves without the test framework, as a program would.
template <class F>
[[noreturn]] void with_watchdog(const F& step) {
  MpiRuntime runtime(nullptr, nullptr);
  {
    int id = getppid();  // mpirun's: one path for the job, another for the next
    Context ctx;
    runtime.world().wait(ctx, runtime.world().broadcast(ctx, host_view(&id, {1}), 0));
    Heartbeat heartbeat(runtime.host(), runtime.world().rank(), runtime.world().size(),
                        ::testing::TempDir() + "annulus_heartbeat_" + std::to_string(id));
    Watchdog watchdog(heartbeat, 1.0, 0.05);
    step(runtime);
  }
  runtime.world().barrier();
  runtime.abort(0);  // everybody is here: ends them all at once, without failures
}

TEST(Program, DISABLED_StoppedRank) {
  with_watchdog([](MpiRuntime& runtime) {
    for (int step = 0;; ++step) {
      Heartbeat::publish(step, Phase::forward, 3, 1);
      if (step == 12 && runtime.world().rank() == 1) raise(SIGSTOP);
      runtime.world().barrier();
    }
  });
}

TEST(Program, StoppedRankEndsTheJobAndIsNamed) {
  const Outcome outcome = run_program("StoppedRank", 2);
  EXPECT_EQ(outcome.exit_code, 6) << outcome.output;
  EXPECT_LT(outcome.seconds, 20);
  EXPECT_NE(
      outcome.output.find("watchdog: rank 1 has not moved for 1 s: step 12, forward, layer 3, hop 1 (its process"),
      std::string::npos)
      << outcome.output;
}

TEST(Program, DISABLED_StuckRank) {
  with_watchdog([](MpiRuntime& runtime) {
    for (int step = 0;; ++step) {
      Heartbeat::publish(step, Phase::backward, 7);
      while (step == 5 && runtime.world().rank() == 0) sleep_ms(1000);  // runs, but gets nowhere
      runtime.world().barrier();
    }
  });
}

TEST(Program, StuckRankIsNamed) {
  const Outcome outcome = run_program("StuckRank", 2);
  EXPECT_EQ(outcome.exit_code, 6) << outcome.output;
  EXPECT_NE(outcome.output.find("watchdog: rank 0 has not moved for 1 s: step 5, backward, layer 7\n"),
            std::string::npos)
      << outcome.output;
  EXPECT_EQ(outcome.output.find("has not moved"), outcome.output.rfind("has not moved"))
      << "reported by both ranks: " << outcome.output;
  EXPECT_NE(outcome.output.find("rank 1 is at step 5, backward, layer 7 (waiting for other ranks)"), std::string::npos)
      << outcome.output;
}

TEST(Program, DISABLED_SlowRank) {
  with_watchdog([](MpiRuntime& runtime) {
    Heartbeat::publish(1, Phase::checkpoint);
    for (int i = 0; i < 50 && runtime.world().rank() == 0; ++i) {  // longer than the watchdog's time, but moving
      sleep_ms(50);
      Heartbeat::touch();
    }
    runtime.world().barrier();
  });
}

TEST(Program, SlowRankIsLeftAlone) {
  const Outcome outcome = run_program("SlowRank", 2);
  EXPECT_EQ(outcome.output.find("watchdog"), std::string::npos) << outcome.output;
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

TEST(Program, DISABLED_Aborts) {
  MpiRuntime runtime(nullptr, nullptr);
  if (runtime.world().rank() == runtime.world().size() - 1) runtime.abort(5);
  for (;;) runtime.world().barrier();
}

TEST(Program, AbortEndsEveryRankWithItsCode) {
  EXPECT_EQ(run_program("Aborts", 2).exit_code, 5);
  const Outcome alone = run_program("Aborts", 0);
  EXPECT_EQ(alone.exit_code, 5) << alone.output;
  EXPECT_EQ(alone.output.find("MPI_ABORT"), std::string::npos) << alone.output;
}

TEST(Program, DISABLED_Throws) {
  try {
    MpiRuntime runtime(nullptr, nullptr);
    if (runtime.world().rank() == 0) throw Error("one rank fails");
    for (;;) runtime.world().barrier();
  } catch (const Error&) {
    std::_Exit(0);  // not reached: the runtime aborts the job while the exception passes
  }
}

TEST(Program, AnExceptionPastTheRuntimeEndsTheJob) { EXPECT_EQ(run_program("Throws", 2).exit_code, 1); }

TEST(Program, DISABLED_Alone) {
  MpiRuntime runtime(nullptr, nullptr);
  ASSERT_EQ(runtime.world().size(), 1);
  ASSERT_EQ(runtime.local_rank(), 0);
  ASSERT_EQ(runtime.local_size(), 1);
  runtime.world().barrier();
}

TEST(Program, RunsWithoutMpirun) {
  const Outcome outcome = run_program("Alone", 0);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

}  // namespace
}  // namespace annulus::parallel
