#pragma once

#include <string>

namespace lockstep::testing {

/// 4,000 letters with a pattern that a small model learns in a few steps.
inline std::string synthetic_text() {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += static_cast<char>('a' + (i * i / 7 + i % 11) % 26);
  return text;
}

}  // namespace lockstep::testing
