// The version of the program and the libraries; the same as project(… VERSION) in CMakeLists.txt, which a test
// compares.
#pragma once

namespace annulus {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace annulus
