// What the tests of this folder share: a communicator over all ranks, and a record of every message that MPI was given
// (collectives_test.cpp defines MPI_Isend and MPI_Test over MPI's profiling interface).
#pragma once

#include <mpi.h>

#include <memory>
#include <random>
#include <vector>

#include "parallel/mpi_communicator.h"

namespace annulus::parallel::testing {

struct WireLog {
  std::int64_t messages = 0, bytes = 0, largest = 0, tests = 0;
};
extern WireLog wire;  // since it was last assigned {}

inline MpiCommunicator& world() {
  static auto* communicator = new MpiCommunicator(MPI_COMM_WORLD);  // outlives MPI
  return *communicator;
}

template <class T>
TensorView view(std::vector<T>& values) {
  return host_view(values.data(), {static_cast<std::int64_t>(values.size())});
}

// The same values on every rank, so that each rank can compute what the others contribute.
inline double value_of(int rank, std::int64_t index) {
  std::minstd_rand random(static_cast<unsigned>(rank * 7919 + index * 104729 + 1));
  random.discard(3);
  return std::uniform_real_distribution<double>(-1, 1)(random);
}

void sleep_at_random(std::mt19937& random, int max_microseconds);

}  // namespace annulus::parallel::testing
