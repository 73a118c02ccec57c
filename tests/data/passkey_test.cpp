// Passkey documents: the key is told once, at the depth that was asked for, and its digits at the end are the targets.
#include "data/passkey.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "data/files.h"

namespace annulus::data {
namespace {

using testing::expect_error;

std::string text_of(const MaskedDocument& document) { return {document.tokens.begin(), document.tokens.end()}; }

TEST(Passkey, AsksForWhatItTold) {
  std::set<std::string> keys;
  std::set<std::size_t> places;
  for (const std::int64_t digits : {1, 5, 12}) {
    for (std::int64_t i = 0; i < 40; ++i) {
      const PasskeyOptions o{.length = 400, .digits = digits, .seed = 3};
      const MaskedDocument document = passkey_document(o, i);
      const std::string text = text_of(document);
      ASSERT_EQ(std::ssize(text), o.length);
      ASSERT_EQ(document.mask.size(), text.size());
      const auto n = static_cast<std::size_t>(digits);
      const std::string key = text.substr(text.size() - n);
      EXPECT_EQ(key.find_first_not_of("0123456789"), std::string::npos) << key;
      EXPECT_NE(key[0], '0');
      const std::string told = "The pass key is " + key + ". Remember it. " + key + " is the pass key. ";
      const std::size_t at = text.find(told);
      ASSERT_NE(at, std::string::npos) << text;
      EXPECT_TRUE(text.ends_with("What is the pass key? The pass key is " + key));
      const std::string filler =
          text.substr(0, at) + text.substr(at + told.size(), text.find("What is") - at - told.size());
      std::string sentences;
      while (sentences.size() < filler.size()) {
        sentences += "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";
      }
      EXPECT_EQ(filler, sentences.substr(0, filler.size()));
      for (std::size_t p = 0; p < text.size(); ++p) EXPECT_EQ(document.mask[p], p >= text.size() - n) << p;
      keys.insert(key);
      places.insert(at);
    }
  }
  EXPECT_GT(keys.size(), 80u);  // 9 of one digit, then all different
  EXPECT_GT(places.size(), 60u);
}

TEST(Passkey, DepthIsAShareOfTheFiller) {
  PasskeyOptions o{.length = 1000};
  const std::int64_t filler =
      1000 - std::ssize(std::string("The pass key is 12345. Remember it. 12345 is the pass key. "
                                    "What is the pass key? The pass key is 12345"));
  for (const double depth : {0.0, 0.25, 1.0}) {
    o.depth = depth;
    const auto at = static_cast<std::int64_t>(text_of(passkey_document(o, 7)).find("The pass key"));
    EXPECT_EQ(at, std::llround(depth * static_cast<double>(filler))) << depth;
  }
  o.length -= filler;  // none at all
  EXPECT_EQ(text_of(passkey_document(o, 7)).find("The pass key"), 0u);
}

TEST(Passkey, SeedAndNumberChooseADocument) {
  const PasskeyOptions o{.seed = 1};
  PasskeyOptions other = o;
  other.seed = 2;
  EXPECT_EQ(passkey_document(o, 4).tokens, passkey_document(o, 4).tokens);
  EXPECT_NE(passkey_document(o, 4).tokens, passkey_document(o, 5).tokens);
  EXPECT_NE(passkey_document(o, 4).tokens, passkey_document(other, 4).tokens);
}

TEST(Passkey, RefusesWhatDoesNotFit) {
  const auto refused = [](const PasskeyOptions& o, const char* text) {
    expect_error<ConfigError>([&] { o.validate(); }, {text});
  };
  refused({.documents = 0}, "--documents = 0");
  refused({.digits = 0}, "--digits = 0");
  refused({.depth = 1.5}, "--depth = 1.5: expected a share of the filler from 0 to 1");
  refused({.depth = NAN}, "--depth = nan");
  refused({.seed = -1}, "--seed = -1");
  refused({.length = 50}, "--length = 50: expected at least 102 bytes for a key of 5 digits");
  PasskeyOptions{.length = 102}.validate();
}

}  // namespace
}  // namespace annulus::data
