#include "lockstep/core/text_fields.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lockstep {
namespace {

std::vector<std::string> take_all(std::string_view text) {
  std::vector<std::string> fields;
  while (!text.empty()) fields.emplace_back(take_field(text, "test"));
  return fields;
}

TEST(TextFields, AnyBytesComeBack) {
  const std::vector<std::string> hard = {"", "3:abc", "\t\n", std::string(3, '\0'), ":", "12"};
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<std::string> fields = hard;
    for (int i = 0; i < 5; ++i) {
      fields.emplace_back(random() % 40, 'x');
      for (char& byte : fields.back()) byte = static_cast<char>(random() % 256);
    }
    std::shuffle(fields.begin(), fields.end(), random);
    std::string text;
    for (const std::string& field : fields) append_field(text, field);
    EXPECT_EQ(take_all(text), fields);
  }
}

TEST(TextFields, ATextThatIsCutOffIsRefusedAtEveryByte) {
  std::string whole;
  append_field(whole, "first");
  const size_t boundary = whole.size();
  append_field(whole, "second field");
  for (size_t size = 1; size < whole.size(); ++size) {
    if (size == boundary) continue;
    EXPECT_THROW(take_all(whole.substr(0, size)), CommunicationError) << size;
  }
}

TEST(TextFields, LengthsThatAreNoneAreRefused) {
  for (const char* text : {":", "x", "-1:a", "5:abcd", "999999999999999999999:a",
                           "18446744073709551615:a", " 1:a", "1 :a", "1"}) {
    std::string_view rest = text;
    try {
      take_field(rest, "ties");
      ADD_FAILURE() << text;
    } catch (const CommunicationError& error) {
      EXPECT_EQ(std::string(error.what()),
                std::string("ties: what a rank sent is damaged: found '") + text +
                    "', allowed: a length, a colon and as many bytes");
    }
  }
}

}  // namespace
}  // namespace lockstep
