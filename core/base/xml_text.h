#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// `text` as it is written between two tags or inside an attribute of XML: the five special
/// characters are escaped; bytes that are not UTF-8 and control characters, which XML does not
/// allow, become U+FFFD. Needs no libtorch.
std::string xml_text(std::string_view text);

}  // namespace lockstep
