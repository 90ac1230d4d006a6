#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

/// The bytes of a token's name in GPT-2's alphabet, which has a printable character for each byte;
/// none if the name has any other character. Needs no libtorch.
std::optional<std::string> bytes_of_name(std::string_view name);

/// A byte's character in that alphabet.
std::string name_of_byte(unsigned char byte);

}  // namespace lockstep
