#include "data/output_file.h"

#include <gtest/gtest.h>

#include "data/files.h"

namespace annulus::data {
namespace {

using testing::expect_error;
using testing::TempFolder;

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::int64_t num_files(const TempFolder& folder) {
  return std::distance(std::filesystem::directory_iterator(folder.path()), {});
}

TEST(OutputFile, AppearsWholeOrNotAtAll) {
  const TempFolder folder;
  const std::string path = folder / "a";
  std::string wanted;
  {
    OutputFile file(path, false);
    for (int i = 0; i < 300000; ++i) {  // more than it keeps in memory
      const std::string line = std::to_string(i) + "\n";
      file.write(line);
      wanted += line;
    }
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_EQ(num_files(folder), 1);
    file.commit();
  }
  EXPECT_TRUE(content(path) == wanted);
  EXPECT_EQ(num_files(folder), 1);
  {
    OutputFile given_up(folder / "b", false);
    given_up.write("half");
  }
  EXPECT_EQ(num_files(folder), 1);
}

TEST(OutputFile, AnotherFileIsReplacedOnlyIfAsked) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  expect_error<UsageError>([&] { OutputFile(path, false); }, {path, "exists", "--force"});
  expect_error<UsageError>([&] { OutputFile(folder.path(), true); }, {folder.path(), "is a folder"});
  { OutputFile(path, true).write("new"); }
  EXPECT_EQ(content(path), "old");
  OutputFile file(path, true);
  file.write("new");
  file.commit();
  EXPECT_EQ(content(path), "new");
  expect_error<DataError>([&] { OutputFile(folder / "none/a", false); }, {"none/a", "there is no folder"});
}

}  // namespace
}  // namespace annulus::data
