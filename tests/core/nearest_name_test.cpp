#include "lockstep/core/nearest_name.h"

#include <gtest/gtest.h>

#include <random>

namespace lockstep {
namespace {

TEST(EditDistance, OfKnownPairs) {
  const std::tuple<const char*, const char*, size_t> cases[] = {
      {"", "", 0},
      {"", "abc", 3},
      {"abc", "abc", 0},
      {"abc", "abd", 1},
      {"abc", "ac", 1},
      {"modle", "model", 1},
      {"kitten", "sitting", 3},
      {"ca", "abc", 3},
      {"hidden_sise", "hidden_size", 1},
  };
  for (const auto& [a, b, distance] : cases) {
    EXPECT_EQ(edit_distance(a, b), distance) << a << " " << b;
    EXPECT_EQ(edit_distance(b, a), distance) << b << " " << a;
  }
}

/// The definition of the distance, without a table.
size_t distance_by_definition(std::string_view a, std::string_view b) {
  if (a.empty() || b.empty()) return a.size() + b.size();
  const auto shorter = [](std::string_view text, size_t by = 1) {
    return text.substr(0, text.size() - by);
  };
  size_t least = std::min(
      {distance_by_definition(shorter(a), b) + 1, distance_by_definition(a, shorter(b)) + 1,
       distance_by_definition(shorter(a), shorter(b)) + (a.back() == b.back() ? 0 : 1)});
  if (a.size() > 1 && b.size() > 1 && a.back() == b[b.size() - 2] && a[a.size() - 2] == b.back())
    least = std::min(least, distance_by_definition(shorter(a, 2), shorter(b, 2)) + 1);
  return least;
}

TEST(EditDistance, IsTheDefinitionOnShortWords) {
  std::mt19937 random(7);
  const auto word = [&] {
    std::string text(random() % 6, ' ');
    for (char& c : text) c = static_cast<char>('a' + random() % 3);
    return text;
  };
  for (int i = 0; i < 500; ++i) {
    const std::string a = word(), b = word();
    EXPECT_EQ(edit_distance(a, b), distance_by_definition(a, b)) << a << " " << b;
  }
}

TEST(NearestNames, AllOfTheSmallestDistance) {
  using Names = std::vector<std::string>;
  const Names known = {"train", "trace", "plan", "launch", "checkpoint"};
  EXPECT_EQ(nearest_names("trian", known), Names{"train"});
  EXPECT_EQ(nearest_names("trai", known), Names{"train"});
  EXPECT_EQ(nearest_names("chekpoint", known), Names{"checkpoint"});
  EXPECT_EQ(nearest_names("xyz", known), Names{});
  EXPECT_EQ(nearest_names("", known), Names{});
  EXPECT_EQ(nearest_names("a", {"b", "ab", "ac", "ad", "ae"}), (Names{"b", "ab", "ac"}));
  EXPECT_EQ(nearest_names("plan", {}), Names{});
  EXPECT_EQ(nearest_names(std::string(size_t{1} << 24, 'x'), known), Names{});
}

TEST(DidYouMean, IsASentence) {
  EXPECT_EQ(did_you_mean({}), "");
  EXPECT_EQ(did_you_mean({}, "; see --help"), "; see --help");
  EXPECT_EQ(did_you_mean({"a"}, "; see --help"), "; did you mean 'a'?");
  EXPECT_EQ(did_you_mean({"a", "b"}), "; did you mean 'a' or 'b'?");
  EXPECT_EQ(did_you_mean({"a", "b", "c"}), "; did you mean 'a', 'b' or 'c'?");
}

}  // namespace
}  // namespace lockstep
