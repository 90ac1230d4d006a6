#pragma once

#include <string>

namespace lockstep::testing {

/// 4,000 letters with a pattern that a small model learns in a few steps.
inline std::string synthetic_text() {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += static_cast<char>('a' + (i * i / 7 + i % 11) % 26);
  return text;
}

/// 200 conversations of a few bytes as JSON lines.
inline std::string synthetic_conversations() {
  std::string lines;
  for (int i = 0; i < 200; ++i) {
    const auto length = static_cast<size_t>(i * i % 9);
    lines += R"({"prompt": ")" + std::to_string(i % 10) + R"(?", "completion": ")" +
             std::string(length, static_cast<char>('a' + i % 10)) + "\"}\n";
  }
  return lines;
}

}  // namespace lockstep::testing
