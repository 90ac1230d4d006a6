#include "lockstep/core/xml_text.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(XmlText, EscapesWhatXmlReads) {
  EXPECT_EQ(xml_text("a<b>&\"c'"), "a&lt;b&gt;&amp;&quot;c&apos;");
  EXPECT_EQ(xml_text(""), "");
}

TEST(XmlText, KeepsUtf8) {
  for (const char* text : {"größe", "漢字", "🙂", "tab\tline\n"}) EXPECT_EQ(xml_text(text), text);
}

TEST(XmlText, ReplacesWhatXmlDoesNotAllow) {
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(xml_text(std::string_view("a\0b\x1b[\x7F", 6)), "a" + bad + "b" + bad + "[" + bad);
  EXPECT_EQ(xml_text("\xFFx\xC0\x80"), bad + "x" + bad + bad);
  EXPECT_EQ(xml_text("\xE2\x82"), bad + bad);            // cut off
  EXPECT_EQ(xml_text("\xED\xA0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(xml_text("\xE0\x80\xAF"), bad + bad + bad);  // an overlong encoding
  EXPECT_EQ(xml_text("\xEF\xBF\xBF"), bad + bad + bad);  // U+FFFF
  EXPECT_EQ(xml_text("\xF4\x90\x80\x80"), bad + bad + bad + bad);
}

}  // namespace
}  // namespace lockstep
