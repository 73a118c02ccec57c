// A folder that appears whole or not at all, also when two processes want the same one.
#include "checkpoint/new_folder.h"

#include "fixture.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;
namespace fs = std::filesystem;

class NewFolderTest : public ::testing::Test {
 protected:
  std::string path() const { return place_ / "new"; }
  std::string tmp() const { return path() + ".tmp"; }
  static void spit(const std::string& file, const std::string& text) { std::ofstream(file) << text; }
  static std::string slurp(const std::string& file) {
    std::ostringstream out;
    out << std::ifstream(file).rdbuf();
    return out.str();
  }
  std::string refusal() const {
    return checkpoint_error([&] { NewFolder again(path()); });
  }

  TempFolder place_;
};

TEST_F(NewFolderTest, AppearsWithWhatWasWritten) {
  {
    NewFolder out(path() + "//");
    EXPECT_EQ(out.path(), path());
    EXPECT_EQ(out.tmp(), tmp());
    spit(out.tmp() + "/a", "text");
    EXPECT_FALSE(fs::exists(path()));
    out.commit();
  }
  EXPECT_EQ(slurp(path() + "/a"), "text");
  EXPECT_FALSE(fs::exists(tmp()));
}

TEST_F(NewFolderTest, NothingStaysOfWhatWasNotCommitted) {
  { spit(NewFolder(path()).tmp() + "/a", "text"); }
  EXPECT_FALSE(fs::exists(path()));
  EXPECT_FALSE(fs::exists(tmp()));
}

TEST_F(NewFolderTest, WhatAnEndedProcessLeftIsDeleted) {
  fs::create_directories(tmp() + "/deep/er");
  spit(tmp() + "/deep/old", "text");
  NewFolder out(path());
  EXPECT_TRUE(fs::is_empty(out.tmp()));
}

TEST_F(NewFolderTest, ASecondOneIsRefusedAndLeavesTheFirstAlone) {
  NewFolder first(path());
  spit(first.tmp() + "/a", "first");
  EXPECT_NE(refusal().find("another process is writing " + path()), std::string::npos) << refusal();
  EXPECT_EQ(slurp(tmp() + "/a"), "first");
  first.commit();
  EXPECT_NE(refusal().find("is there already"), std::string::npos) << refusal();
  EXPECT_EQ(slurp(path() + "/a"), "first");
}

TEST_F(NewFolderTest, ANameTakenMeanwhileIsNotReplaced) {
  NewFolder out(path());
  spit(out.tmp() + "/a", "ours");
  fs::create_directory(path());  // empty: rename() alone would replace it
  EXPECT_NE(checkpoint_error([&] { out.commit(); }).find("has appeared meanwhile"), std::string::npos);
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(NewFolderTest, AFileOrLinkInItsWayIsNamed) {
  spit(tmp(), "a file");
  EXPECT_NE(refusal().find(tmp()), std::string::npos) << refusal();
  fs::remove(tmp());
  fs::create_directory(place_ / "other");
  spit(place_ / "other/a", "mine");
  fs::create_directory_symlink(place_ / "other", tmp());
  EXPECT_NE(refusal().find(tmp()), std::string::npos) << refusal();
  EXPECT_EQ(slurp(place_ / "other/a"), "mine");
}

}  // namespace
}  // namespace annulus::checkpoint
