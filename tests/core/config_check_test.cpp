#include "core/config_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/error.h"

namespace annulus {
namespace {

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ConfigCheck, EditDistanceCountsInsertDeleteReplaceSwap) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("steps", "step"), 1);
  EXPECT_EQ(edit_distance("step", "stop"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("trian", "train"), 1);  // neighbours swapped: one slip
  EXPECT_EQ(edit_distance("ca", "abc"), 3);       // a swapped pair is not edited again
}

TEST(ConfigCheck, NearestWordHasALimit) {
  const std::vector<std::string> words = {"steps", "seed", "precision", "learning_rate"};
  EXPECT_EQ(nearest_word("step", words), "steps");
  EXPECT_EQ(nearest_word("precison", words), "precision");
  EXPECT_EQ(nearest_word("learnig_rat", words), "learning_rate");
  EXPECT_EQ(nearest_word("xyz", words), "");
  EXPECT_EQ(nearest_word("ped", words), "");  // two edits from "seed" are too many for three letters
  EXPECT_EQ(nearest_word(std::string(5000, 'a'), words), "");
  EXPECT_EQ(did_you_mean("sed", words), " (did you mean \"seed\"?)");
  EXPECT_EQ(did_you_mean("xyz", words), "");
}

TEST(ConfigCheck, ChoicesAndRanges) {
  const std::vector<std::string> choices = {"auto", "cpu", "cuda"};
  check_choice("parallel.device", "cuda", choices);
  EXPECT_EQ(message_of([&] { check_choice("parallel.device", "cdua", choices); }),
            "parallel.device = \"cdua\": expected \"auto\", \"cpu\" or \"cuda\" (did you mean \"cuda\"?)");
  check_range("k", std::int64_t{2}, 2);
  EXPECT_EQ(message_of([] { check_range("k", std::int64_t{1}, 2); }), "k = 1: expected an integer >= 2");
  EXPECT_EQ(message_of([] { check_range("k", std::int64_t{9}, 2, 8); }), "k = 9: expected an integer from 2 to 8");
  check_range("x", 0.0, 0, Low::closed);
  EXPECT_EQ(message_of([] { check_range("x", 0.0, 0, Low::open); }), "x = 0: expected a finite number > 0");
  EXPECT_EQ(message_of([] { check_range("x", 1.5, 0, Low::closed, 1); }),
            "x = 1.5: expected a finite number >= 0 and <= 1");
  EXPECT_EQ(message_of([] { check_range("x", std::nan(""), 0, Low::closed); }),
            "x = nan: expected a finite number >= 0");
  EXPECT_EQ(message_of([] { check_range("x", INFINITY, 0, Low::closed); }), "x = inf: expected a finite number >= 0");
}

}  // namespace
}  // namespace annulus
