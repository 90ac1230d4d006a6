#include "lockstep/datasets/piece_cutter.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/datasets/apart_cutter.h"
#include "lockstep/datasets/text_normalizer.h"
#include "lockstep/datasets/utf8.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Pieces = std::vector<std::string>;

PieceCutter cutter_of(std::string_view pattern) {
  return {parse_split_pattern(pattern, "place"), "place"};
}

/// The matched pieces. Text between matches is in brackets.
Pieces pieces_of(std::string_view pattern, std::string_view text) {
  const PieceCutter cutter = cutter_of(pattern);
  Pieces found;
  for (size_t place = 0; place < text.size();) {
    const auto piece = cutter.first(text.substr(place), /*last=*/true);
    const std::string part(text.substr(place, piece.length));
    found.push_back(piece.matched ? part : "[" + part + "]");
    place += piece.length;
  }
  return found;
}

TEST(PieceCutter, PrefersAsARegularExpressionDoes) {
  EXPECT_EQ(pieces_of("a|ab|abc", "abc"), (Pieces{"a", "[bc]"}));
  EXPECT_EQ(pieces_of("abc|a", "abab"), (Pieces{"a", "[b]", "a", "[b]"}));
  EXPECT_EQ(pieces_of("(?:a|ab)(?:c|bcd)", "abcd"), (Pieces{"abcd"}));
  EXPECT_EQ(pieces_of("a{2,3}", "aaaaaaa"), (Pieces{"aaa", "aaa", "[a]"}));
  EXPECT_EQ(pieces_of("a{2}|b{2,}", "aaabbbb"), (Pieces{"aa", "[a]", "bbbb"}));
  EXPECT_EQ(pieces_of("x*y", "xxxy xx"), (Pieces{"xxxy", "[ xx]"}));
  EXPECT_EQ(pieces_of("\\s+(?!\\S)|\\s+|a", "   a  "), (Pieces{"  ", " ", "a", "  "}));
  EXPECT_EQ(pieces_of("\\s*[\\r\\n]+|\\s", " \n  \n \n  x"),
            (Pieces{" \n  \n \n", " ", " ", "[x]"}));
}

TEST(PieceCutter, KnowsClassesOfCharacters) {
  EXPECT_EQ(pieces_of("\\p{L}+|\\p{N}|\\p{P}|\\p{S}|\\p{M}", "aé中1½.,+\u0301"),
            (Pieces{"aé中", "1", "½", ".", ",", "+", "\u0301"}));
  EXPECT_EQ(pieces_of("\\p{Lu}+|\\p{Ll}+|\\p{Lt}|\\p{Lm}|\\p{Lo}", "\u00c4Baß\u01c5\u02b0中1"),
            (Pieces{"\u00c4B", "aß", "\u01c5", "\u02b0", "中", "[1]"}));
  EXPECT_EQ(pieces_of("[\\p{Lu}\\p{Lo}]*[\\p{Ll}\\p{Lo}]+", "ABcDe中F"),
            (Pieces{"ABc", "De中", "[F]"}));
  EXPECT_EQ(pieces_of("[^a-c\\-]+", "xa-bé"), (Pieces{"x", "[a-b]", "é"}));
  EXPECT_EQ(pieces_of("[+-]|[\\]x]", "-]+y"), (Pieces{"-", "]", "+", "[y]"}));
  EXPECT_EQ(pieces_of("(?i:'s|[k])", "'S'\u017F'sk\u212AK"),
            (Pieces{"'S", "'\u017F", "'s", "k", "\u212A", "K"}));
  EXPECT_EQ(pieces_of("\\P{L}+", "a1\xFFz"), (Pieces{"[a]", "1\xFF", "[z]"}));
}

TEST(PieceCutter, APieceIsOpenWhileItMayGrow) {
  const PieceCutter cutter = cutter_of("a+|bc");
  EXPECT_TRUE(cutter.first("aaa", false).open);
  EXPECT_EQ(cutter.first("aaab", false).length, 3U);
  EXPECT_FALSE(cutter.first("aaab", false).open);
  const auto gap = cutter.first("xxb", false);
  EXPECT_TRUE(gap.open);
  EXPECT_FALSE(gap.matched);
  EXPECT_EQ(gap.length, 2U);
  EXPECT_EQ(cutter.first("xxb", true).length, 3U);
  EXPECT_TRUE(cutter_of("\\p{L}").first("\xE4\xB8", false).open);
  EXPECT_FALSE(cutter_of("\\p{L}").first("\xE4\xB8", true).matched);
}

TEST(SplitPattern, OthersAreRefusedByName) {
  const auto refused = [](std::string_view pattern, const std::string& part) {
    return throws_with<FileError>([&] { cutter_of(pattern); }, part);
  };
  EXPECT_TRUE(refused("a++", "place: found a second repetition at byte 2 of 'a++', allowed:"));
  EXPECT_TRUE(refused("a+?", "a second repetition"));
  EXPECT_TRUE(refused("(?<=a)b", "a group of this kind"));
  EXPECT_TRUE(refused("(?=a)b", "a group of this kind"));
  EXPECT_TRUE(refused("^a", "a special character at byte 0"));
  EXPECT_TRUE(refused("a.b", "a special character at byte 1"));
  EXPECT_TRUE(refused("\\d+", "found '\\d' at byte 1"));
  EXPECT_TRUE(refused("\\p{Greek}", "found the class 'Greek' at byte 3"));
  EXPECT_TRUE(refused("(?i:\\p{Lu})", "the class 'Lu' in any case"));
  EXPECT_TRUE(refused("[a[b]]", "a class in a class"));
  EXPECT_TRUE(refused("[a&&b]", "a class in a class"));
  EXPECT_TRUE(refused("[z-a]", "a range that ends wrongly"));
  EXPECT_TRUE(refused("[]", "a class without characters"));
  EXPECT_TRUE(refused("[a", "the end"));
  EXPECT_TRUE(refused("(a", "a '(' without ')'"));
  EXPECT_TRUE(refused("a)", "a ')' without '('"));
  EXPECT_TRUE(refused("a||b", "nothing to match"));
  EXPECT_TRUE(refused("", "nothing to match"));
  EXPECT_TRUE(refused("(?:a?)+b", "a repetition of what may be empty at byte 7"));
  EXPECT_TRUE(refused("a{101}", "too many repetitions"));
  EXPECT_TRUE(refused("(?:a{100}){100}", "too many steps"));
  EXPECT_TRUE(refused("a{3,2}", "a repetition that ends wrongly"));
  EXPECT_TRUE(refused("(?i:ss)", "'ss' in any case"));
  EXPECT_TRUE(refused("(?i:(?:a|b)ss)", "'ss' in any case"));
  EXPECT_TRUE(refused("(?i:\\)x|[)]y|(x)Ss)", "'ss' in any case"));
  EXPECT_TRUE(refused("(?i:é)", "beyond ASCII in any case"));
  EXPECT_TRUE(refused("a*", "place: found a pattern that matches the empty text"));
  EXPECT_TRUE(refused("a\xFF", "bytes that are not UTF-8"));
  EXPECT_TRUE(refused("(?:a|b)*a(?:a|b){12}", "more than 512 states"));
}

/// PyPI's tokenizers 0.23.3 cuts the one character by each of the refused patterns.
TEST(SplitPattern, LettersInAnyCaseAreJoinedAcrossInnerGroups) {
  for (const char* pattern : {"(?i:s(?:s))", "(?i:(?:s)s)", "(?i:s{1}s)"})
    EXPECT_TRUE(throws_with<FileError>([&] { cutter_of(pattern); }, "'ss' in any case")) << pattern;
  EXPECT_EQ(pieces_of("(?i:(?:a|s)[s]|s{2})ss", "SSss ASss"), (Pieces{"SSss", "[ ]", "ASss"}));
}

TEST(ApartCutter, CutsWhereNoTokenJoins) {
  const ApartCutter cutter({{'a', 0}, {'b', 1}, {' ', 2}, {0xE9, 3}}, {"ab", " a", "aé"});
  const auto first = [&](std::string_view text, bool last) { return cutter.first(text, last); };
  EXPECT_EQ(first("ab a", true), 2U);
  EXPECT_EQ(first(" ab", true), 3U);
  EXPECT_EQ(first("aéa", true), 3U);
  EXPECT_EQ(first("ba", true), 1U);
  EXPECT_EQ(first("ab", false), 0U);
  EXPECT_EQ(first("xyzé", true), 3U);  // letters without ids
}

TEST(ApartCutter, JoinsOverCharactersThatVanish) {
  const ApartCutter cutter({{'a', 0}, {'b', 1}}, {"ab"}, /*skip_unknown=*/true);
  const auto first = [&](std::string_view text, bool last) { return cutter.first(text, last); };
  EXPECT_EQ(first("axéb", true), 5U);
  EXPECT_EQ(first("bxa", true), 2U);
  EXPECT_EQ(first("ax", false), 0U);
  EXPECT_EQ(first("xx", true), 2U);
}

/// The results are those of Python's unicodedata.
TEST(TextNormalizer, MarksAreOrderedByTheirClasses) {
  const std::vector<NormalizerStep> steps = {ComposeCharacters{}};
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
           {"a\u0301\u0323\u0327\u0308", "\u1ea1\u0327\u0301\u0308"},
           {"x\u0344\u0323\u0f71\u0f73\u0301\u0341\u0327",
            "\u1e8d\u0f71\u0f71\u0f72\u0327\u0323\u0301\u0301\u0301"},
           {"\u1e69\u0327\u0301", "\u015f\u0323\u0307\u0301"},
           {"\uac00\u11a8\u0301\u0323", "\uac01\u0323\u0301"},
           {"\u0f73\u0f72\u0f71\u0f80", "\u0f71\u0f71\u0f72\u0f72\u0f80"}})
    EXPECT_EQ(normalize(steps, text), expected) << text;
  // A time that is quadratic in the length would be minutes.
  constexpr size_t kRun = 300000;
  std::string text = "x", first, then;
  for (size_t i = 0; i < kRun; ++i) {
    text += "\u0301\u0323";
    first += "\u0323";
    then += "\u0301";
  }
  EXPECT_TRUE(normalize(steps, text) == "x" + first + then);
}

TEST(Utf8, MalformedBytesAreTakenAsPythonDoes) {
  const auto sizes = [](std::string_view text) {
    std::vector<size_t> found;
    for (size_t place = 0; place < text.size(); place += found.back())
      found.push_back(utf8_character(text, place).bytes);
    return found;
  };
  using Sizes = std::vector<size_t>;
  EXPECT_EQ(sizes("a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80"), (Sizes{1, 2, 3, 4}));
  EXPECT_EQ(sizes("\xF0\x9F\x98z"), (Sizes{3, 1}));
  EXPECT_EQ(sizes("\xC0\xAF"), (Sizes{1, 1}));
  EXPECT_EQ(sizes("\xED\xA0\x80"), (Sizes{1, 1, 1}));
  EXPECT_EQ(sizes("\xF4\x90\x80"), (Sizes{1, 1, 1}));
  EXPECT_EQ(sizes("\xE4\xE4\xB8\xAD"), (Sizes{1, 3}));
  EXPECT_EQ(whole_characters("a\xF0\x9F"), 1U);
  EXPECT_EQ(whole_characters("a\xFF\x9F"), 3U);
  for (const uint32_t point : {0x7Fu, 0x80u, 0x7FFu, 0x800u, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
    std::string text;
    append_utf8(point, text);
    EXPECT_EQ(utf8_character(text, 0).point, point);
    EXPECT_EQ(utf8_character(text, 0).bytes, text.size());
  }
}

}  // namespace
}  // namespace lockstep
