#include "lockstep/datasets/json_line.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace lockstep {
namespace {

class KeptStrings : public JsonLineParser::Strings {
 public:
  explicit KeptStrings(size_t keys) : values(keys) {}

  void begin(size_t key) override { (current = &values.at(key))->clear(); }
  void append(std::string_view text) override {
    current->append(text);
    longest = std::max(longest, text.size());
  }
  void end(size_t) override { current = nullptr; }

  std::vector<std::string> values;
  std::string* current = nullptr;
  size_t longest = 0;
};

struct Parsed {
  JsonLineParser::Line line;
  std::vector<std::string> values;
  std::string problem;

  bool operator==(const Parsed&) const = default;
};

/// Feeds the line in pieces of `piece` bytes.
Parsed parse_line_by(const std::string& text, size_t piece, std::vector<std::string> keys) {
  KeptStrings strings(keys.size());
  JsonLineParser parser(std::move(keys), strings);
  parser.feed("[torn");  // the previous line
  parser.begin_line();
  for (size_t at = 0; at < text.size(); at += piece) parser.feed(text.substr(at, piece));
  const auto line = parser.end_line();
  if (line != JsonLineParser::Line::object) strings.values.clear();
  return {line, strings.values, parser.problem()};
}

/// Checks that the result is the same for all sizes of pieces.
Parsed parse_json_line(const std::string& text, const std::vector<std::string>& keys = {"text"}) {
  const Parsed whole = parse_line_by(text, text.size() + 1, keys);
  for (const size_t piece : {1, 2, 3, 7})
    EXPECT_EQ(parse_line_by(text, piece, keys), whole) << text;
  return whole;
}

TEST(JsonLine, GivesTheStringsUnderItsKeys) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"text": "hello"})", "hello"},
      {"\t {\"text\"\t:\"a\" }\r", "a"},
      {R"({"text": ""})", ""},
      {R"({"id": 1, "text": "b", "meta": {"text": "no", "list": [[], {}, [1, {"text": 2}]]}})",
       "b"},
      {R"({"te\u0078t": "key with an escape"})", "key with an escape"},
      {R"({"texts": "no", "tex": "no", "text": "yes", "": "no"})", "yes"},
      {R"({"text": "\"\\\/\b\f\n\r\t\u0000\u00e9\u20AC\ud83d\ude00"})",
       std::string("\"\\/\b\f\n\r\t\0\u00e9\u20AC\U0001F600", 18)},
      {"{\"text\": \"\u00e9 \u20AC \U0001F600 \x7F\"}", "\u00e9 \u20AC \U0001F600 \x7F"},
      {R"({"text": "first", "text": "last"})", "last"},
      {R"({"text": 1, "text": "last"})", "last"},
      {R"({"n": [0, -0, 1.5, -1e5, 1E+5, 2e-9, 10], "l": [true, false, null], "text": "n"})", "n"},
      {R"({"n": [NaN, Infinity, -Infinity], "text": "as Python writes them"})",
       "as Python writes them"}};
  for (const auto& [text, expected] : cases) {
    const Parsed parsed = parse_json_line(text);
    EXPECT_EQ(parsed.line, JsonLineParser::Line::object) << text << ": " << parsed.problem;
    EXPECT_EQ(parsed.values, std::vector{expected}) << text;
  }
  EXPECT_EQ(parse_json_line(R"({"b": "2", "c": "3", "a": "1"})", {"a", "b"}).values,
            (std::vector<std::string>{"1", "2"}));
  for (const char* blank : {"", " ", "\r", "\t \r"})
    EXPECT_EQ(parse_json_line(blank).line, JsonLineParser::Line::blank);
}

TEST(JsonLine, SaysWhatIsWrongAndWhere) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"plain text", "byte 0: found 'p', allowed: an object, as in {\"text\": \"...\"}"},
      {R"(["text"])", "byte 0: found '[', allowed: an object"},
      {R"({"text": "a"} {"text": "b"})", "byte 14: found '{', allowed: the end of the line"},
      {R"({"text": "a")", "byte 12: found the end of the line, allowed: a comma, or }"},
      {R"({"text": "a)", "byte 11: found the end of the line, allowed: the end of the string"},
      {R"({"text": "a",})", "byte 13: found '}', allowed: a key in quotes"},
      {R"({text: "a"})", "byte 1: found 't', allowed: a key in quotes, or }"},
      {R"({"text" "a"})", "byte 8: found '\"', allowed: a colon"},
      {R"({"n": 01})", "byte 7: found '1', allowed: a comma, or }"},
      {R"({"n": 1.})", "byte 8: found '}', allowed: a digit"},
      {R"({"n": -})", "byte 7: found '}', allowed: a digit"},
      {R"({"n": 12)", "byte 8: found the end of the line, allowed: a comma, or }"},
      {R"({"n": [1 2]})", "byte 9: found '2', allowed: a comma, or ]"},
      {R"({"n": [1,]})", "byte 9: found ']', allowed: a value"},
      {R"({"n": nul})", "byte 9: found '}', allowed: true, false, null"},
      {R"({"n": +1})", "byte 6: found '+', allowed: a value"},
      {"{\"text\": \"a\tb\"}", "byte 11: found the control character 0x09, allowed: an escape"},
      {R"({"text": "\x41"})", "byte 11: found 'x', allowed: one of \"\\/bfnrtu after a backslash"},
      {R"({"text": "\u12g4"})", "byte 14: found 'g', allowed: four hexadecimal digits"},
      {R"({"text": "\ud83d"})", "byte 16: found half of a surrogate pair, allowed: its other half"},
      {R"({"text": "\ud83d\n"})", "byte 17: found half of a surrogate pair"},
      {R"({"text": "\ud83d\ud83d"})", "byte 21: found half of a surrogate pair"},
      {R"({"text": "\ude00"})", "byte 15: found half of a surrogate pair"},
      {R"({"id": "\ude00", "text": ""})", "byte 13: found half of a surrogate pair"},
      {"{\"text\": \"\xff\"}", "byte 10: found the byte 0xFF, allowed: UTF-8"},
      {"{\"text\": \"\xc0\xaf\"}", "byte 10: found the byte 0xC0, allowed: UTF-8"},
      {"{\"text\": \"\xed\xa0\x80\"}", "byte 11: found the byte 0xA0, allowed: UTF-8"},
      {"{\"text\": \"\xf4\x90\x80\x80\"}", "byte 11: found the byte 0x90, allowed: UTF-8"},
      {"{\"text\": \"\xe2\x82\"}", "byte 12: found the byte 0x22, allowed: UTF-8"},
      {"{\"t\xff\": 1}", "byte 3: found the byte 0xFF, allowed: UTF-8"},
      {"{\"text\": \"a\"}\x01", "byte 13: found the byte 0x01, allowed: the end of the line"},
      {R"({})", "found no key 'text'"},
      {R"({"Text": "a"})", "found no key 'text'"},
      {R"({"text": null})",
       "key 'text': found true, false, null, NaN or Infinity, allowed: a string"},
      {R"({"text": 7})", "key 'text': found a number, allowed: a string"},
      {R"({"text": ["a"]})", "key 'text': found a list, allowed: a string"},
      {R"({"text": {"text": "a"}})", "key 'text': found an object, allowed: a string"},
      {R"({"text": "a", "text": 1})", "key 'text': found a number, allowed: a string"}};
  for (const auto& [text, expected] : cases) {
    const Parsed parsed = parse_json_line(text);
    EXPECT_EQ(parsed.line, JsonLineParser::Line::bad) << text;
    EXPECT_EQ(parsed.problem.substr(0, expected.size()), expected) << text;
  }
}

TEST(JsonLine, LevelsAreCounted) {
  const auto nested = [](size_t levels) {
    return R"({"text": "", "n": )" + std::string(levels, '[') + std::string(levels, ']') + "}";
  };
  EXPECT_EQ(parse_line_by(nested(999), 100, {"text"}).line, JsonLineParser::Line::object);
  EXPECT_EQ(parse_line_by(nested(1000), 100, {"text"}).problem,
            "byte 1017: found another level, allowed: up to 1000 levels");
}

TEST(JsonLine, HandsOutALongStringInPieces) {
  KeptStrings strings(1);
  JsonLineParser parser({"text"}, strings);
  parser.feed(R"({"text": ")");
  for (int i = 0; i < 1000; ++i)
    parser.feed("All work \\n\\u00e9 and no play makes Jack a dull boy");
  parser.feed("\"}");
  EXPECT_EQ(parser.end_line(), JsonLineParser::Line::object);
  EXPECT_EQ(strings.values[0].size(), 1000 * 46u);
  parser.begin_line();
  parser.feed(R"({"text": ")");
  for (int i = 0; i < 1000; ++i) parser.feed(std::string(10000, 'x'));
  parser.feed("\", \"" + std::string(100000, 'k') + "\": 1}");
  EXPECT_EQ(parser.end_line(), JsonLineParser::Line::object);
  EXPECT_EQ(strings.values[0].size(), 10000000u);
  EXPECT_LE(strings.longest, 1u << 16);
}

TEST(JsonLine, AcceptsWhatALibraryAccepts) {
  const std::string good =
      R"({"a": [1, -2.5e3, true, null, {"b": "\u00e9\ud83d\ude00"}], "text": "x\n€"})";
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (size_t n = random() % 3; n-- > 0;) {
      const size_t place = random() % text.size();
      const std::string some = "\"{}[],:\\u019eE+-.tnfd \xe2\x80";
      if (random() % 2 == 0)
        text[place] = some[random() % some.size()];
      else
        text.erase(place, random() % 4);
    }
    const auto oracle = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const bool expected =
        oracle.is_object() && oracle.contains("text") && oracle["text"].is_string();
    const Parsed parsed = parse_line_by(text, 5, {"text"});
    ASSERT_EQ(parsed.line == JsonLineParser::Line::object, expected) << text << parsed.problem;
    if (!expected) continue;
    ++accepted;
    ASSERT_EQ(parsed.values[0], oracle["text"].get<std::string>());
  }
  EXPECT_GT(accepted, 5000);
}

}  // namespace
}  // namespace lockstep
