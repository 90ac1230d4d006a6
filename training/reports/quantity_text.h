#pragma once

#include <cstddef>
#include <string>
#include <string_view>

/// Numbers as people read them, and lengths of text. Needs no libtorch.
namespace lockstep {

/// "1:02:03", "2:03"
std::string format_duration(double seconds);

/// "731", "35.1k", "2.04M"
std::string with_unit(double value);

/// Characters of a text in UTF-8.
size_t utf8_length(std::string_view text);

}  // namespace lockstep
