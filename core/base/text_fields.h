#pragma once

// Internal.

#include <charconv>
#include <string>
#include <string_view>

#include "lockstep/core/check.h"

/// Several texts as one, for what ranks send each other. A field may hold any bytes.
namespace lockstep {

/// Appends `field` to `text`: its length, a colon, its bytes.
inline void append_field(std::string& text, std::string_view field) {
  text += std::to_string(field.size());
  text += ':';
  text += field;
}

/// Takes the first field off `text`. CommunicationError naming `what`: `text` does not begin with a
/// whole field.
inline std::string_view take_field(std::string_view& text, const char* what) {
  size_t size = 0;
  const char* const end = text.data() + text.size();
  const auto [colon, bad] = std::from_chars(text.data(), end, size);
  const bool whole = bad == std::errc() && colon != end && *colon == ':' &&
                     size <= static_cast<size_t>(end - colon - 1);
  require<CommunicationError>(
      whole,
      "{}: what a rank sent is damaged: found '{}', allowed: a length, a colon and as many "
      "bytes",
      what, text.substr(0, 24));
  const std::string_view field(colon + 1, size);
  text.remove_prefix(static_cast<size_t>(colon + 1 - text.data()) + size);
  return field;
}

}  // namespace lockstep
