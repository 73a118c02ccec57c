// Included by every test program that needs a GPU: where there is none the program ends with 77 before its first test,
// which ctest counts as skipped, not passed (SKIP_RETURN_CODE).
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <cstdlib>

#include "core/device_memory.h"

namespace annulus::testing {

class RequireGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    if (device_count(DeviceKind::cuda) > 0) return;
    std::fputs("no GPU: skipped\n", stderr);
    MPI_Finalize();
    std::exit(77);
  }
};

inline const auto* const kRequireGpu = ::testing::AddGlobalTestEnvironment(new RequireGpu);

}  // namespace annulus::testing
