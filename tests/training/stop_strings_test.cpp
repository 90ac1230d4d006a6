#include "lockstep/training/stop_strings.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

/// The output for `text` in pieces of `size`.
std::string stopped(const std::string& text, const std::vector<std::string>& strings, size_t size) {
  StopStrings stop(strings);
  std::string result;
  for (size_t i = 0; i < text.size(); i += size) result += stop.add(text.substr(i, size));
  return result + stop.rest();
}

TEST(StopStrings, EndTheTextBeforeTheFirstOfThemWhereverItIsCut) {
  const std::vector<std::string> strings = {"\n\n", "aab", "é"};
  for (const auto& [text, expected] : {std::pair<std::string, std::string>{"one\n\ntwo", "one"},
                                       {"aaab\n\n", "a"},
                                       {"aaaaaab", "aaaa"},
                                       {"caf\xc3\xa8\xc3\xa9", "caf\xc3\xa8"},
                                       {"nothing\n", "nothing\n"},
                                       {"aa", "aa"},
                                       {"", ""},
                                       {"\n\n", ""}})
    for (size_t size = 1; size <= 8; ++size)
      EXPECT_EQ(stopped(text, strings, size), expected) << text << " in pieces of " << size;
  EXPECT_EQ(stopped("text", {}, 2), "text");
}

TEST(StopStrings, TheOneThatIsCompleteFirstCountsWhereverTheTextIsCut) {
  const struct {
    std::string text;
    std::vector<std::string> strings;
    std::string expected;
  } cases[] = {
      {"abcd!", {"abcd", "bc"}, "a"},    {"a</s>b", {"</s>", "s"}, "a</"},
      {"xabc", {"bc", "abc"}, "x"},  // complete at the same place: the longest
      {"xabc", {"abc", "c", "bc"}, "x"}, {"abcabd", {"abd", "bca", "abcabd"}, "a"},
      {"aab", {"aaab", "b"}, "aa"},  // what was held back for one ends with another
  };
  for (const auto& [text, strings, expected] : cases)
    for (size_t size = 1; size <= 8; ++size)
      EXPECT_EQ(stopped(text, strings, size), expected) << text << " in pieces of " << size;
}

TEST(StopStrings, HoldBackNoMoreThanMayBeTheBeginningOfOne) {
  StopStrings stop({"aab"});
  EXPECT_EQ(stop.add("xa"), "x");
  EXPECT_EQ(stop.add("a"), "");
  EXPECT_EQ(stop.add("a"), "a");
  EXPECT_EQ(stop.add("c"), "aac");
  EXPECT_FALSE(stop.found());
  EXPECT_EQ(stop.add("zaaby"), "z");
  EXPECT_TRUE(stop.found());
  EXPECT_EQ(stop.add("more"), "");
  EXPECT_EQ(stop.rest(), "");
}

TEST(StopStrings, AreNotEmpty) {
  EXPECT_TRUE(testing::throws_with<ConfigError>([] { StopStrings({""}); }, "--stop: is empty"));
}

}  // namespace
}  // namespace lockstep
