#include "core/version.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

TEST(Version, IsTheProjects) {
  const auto root = std::filesystem::path(ANNULUS_ROOT);
  std::ifstream file(root / "CMakeLists.txt");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find("project(annulus VERSION " + std::string(annulus::kVersion) + " "), std::string::npos)
      << "src/core/version.h says " << annulus::kVersion;
}
