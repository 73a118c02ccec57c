// Shared by reader.cpp and newest.cpp.
#pragma once

#include "checkpoint/store.h"

namespace annulus::checkpoint {

std::string read_manifest(const std::string& path);  // its text; CheckpointError where there is none

}  // namespace annulus::checkpoint
