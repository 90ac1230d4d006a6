#include "lockstep/training/stop_strings.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  for (const std::string& string : strings_)
    require<ConfigError>(!string.empty(), "--stop: is empty, allowed: at least one character");
}

size_t StopStrings::held_length() const {
  size_t longest = 0;
  for (const std::string& string : strings_)
    for (size_t length = std::min(string.size() - 1, held_.size()); length > longest; --length)
      if (held_.ends_with(std::string_view(string).substr(0, length))) longest = length;
  return longest;
}

std::string StopStrings::add(std::string_view piece) {
  if (found_) return "";
  held_ += piece;
  size_t begin = std::string::npos, end = std::string::npos;
  for (const std::string& string : strings_) {
    const size_t at = held_.find(string);
    if (at == std::string::npos) continue;
    const size_t after = at + string.size();
    if (after > end || (after == end && at > begin)) continue;
    begin = at;
    end = after;
  }
  found_ = end != std::string::npos;
  const size_t certain = found_ ? begin : held_.size() - held_length();
  std::string text = held_.substr(0, certain);
  held_.erase(0, found_ ? std::string::npos : certain);
  return text;
}

std::string StopStrings::rest() { return std::exchange(held_, {}); }

}  // namespace lockstep
