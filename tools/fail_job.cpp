#include <fmt/core.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "commands.h"

namespace annulus::tools {

namespace {

constexpr int kErrorTag = 32'749;  // no other message of the program has it; every MPI has tags up to 32,767
using Clock = std::chrono::steady_clock;

// Whether another rank has said its error, waiting for that at most until `deadline`.
bool somebody_spoke(Clock::time_point deadline) {
  do {
    int arrived = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, kErrorTag, MPI_COMM_WORLD, &arrived, MPI_STATUS_IGNORE);
    if (arrived) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  } while (Clock::now() < deadline);
  return false;
}

void tell_others(int rank, int size) {
  std::vector<MPI_Request> requests;
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    MPI_Isend(nullptr, 0, MPI_BYTE, other, kErrorTag, MPI_COMM_WORLD, &requests.emplace_back());
  }
  // Others may never receive, but the empty messages leave at once; a moment to push them out.
  int done = 0;
  for (int i = 0; i < 10 && !done; ++i) {
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

// Often all ranks fail alike, within moments: a config that all of them read, a loss that all of them see. Rank 0
// speaks at once; another rank waits its turn and stays silent when it hears that one has spoken. That rank aborts the
// job.
void fail_job(parallel::MpiRuntime& runtime, const std::string& message, int code) {
  const int rank = runtime.world().rank(), size = runtime.world().size();
  using std::chrono::milliseconds;
  if (size > 1) {
    const auto turn = milliseconds(rank == 0 ? 0 : 300 + 50 * std::min(rank, 40));
    if (somebody_spoke(Clock::now() + turn)) {
      std::this_thread::sleep_for(std::chrono::seconds(5));  // the speaker's abort ends this process first
      runtime.abort(code);
    }
  }
  std::fflush(stdout);
  fmt::print(stderr, "annulus: error: {}\n", message);
  if (size > 1) tell_others(rank, size);
  runtime.abort(code);
}

}  // namespace annulus::tools
