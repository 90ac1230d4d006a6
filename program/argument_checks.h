#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// How the commands read numbers and paths. The checks are for CLI::Option::check(): empty, or what
/// was found and what is allowed. (CLI11 alone takes a number that is too large for the largest
/// one, and wraps a negative one.)
namespace lockstep {

/// Integers separated by `separator`; empty unless all of `text` is that.
std::vector<int64_t> parse_integers(const std::string& text, char separator);

/// Of an integer, and of a list as in 2,4.
std::string check_integer(const std::string& text);
std::string check_integers(const std::string& text);

/// Of an integer that is `minimum` or more.
std::function<std::string(const std::string&)> check_at_least(int64_t minimum);

/// Of an integer from `minimum` to `maximum`.
std::function<std::string(const std::string&)> check_between(int64_t minimum, int64_t maximum);

/// Of a finite number that is more than 0.
std::string check_positive(const std::string& text);

/// Of a finite number that is 0 or more.
std::string check_not_negative(const std::string& text);

/// Of a finite number that is more than 0 and at most 1.
std::string check_probability(const std::string& text);

/// Of a path: not empty.
std::string check_path(const std::string& text);

}  // namespace lockstep
