#pragma once

// Internal.

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

/// "1 document", "2 documents", "3 batches": a number with a noun whose plural is regular.
inline std::string counted(int64_t count, std::string_view noun) {
  const char* const ending = noun.ends_with('s') || noun.ends_with("ch") ? "es" : "s";
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : ending);
}

}  // namespace lockstep
