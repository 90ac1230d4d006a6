#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

/// Reads the numbers and paths of the commands. The checks, for CLI::Option::check(), return an
/// empty text, or what was found and what is allowed. (CLI11 alone turns a number that is too large
/// into the largest one, and wraps a negative one.)
namespace lockstep {

/// The integers of `text`, separated by `separator`; empty if it has anything else.
std::vector<int64_t> parse_integers(const std::string& text, char separator);

/// Checks an integer, or a list of them such as 2,4.
std::string check_integer(const std::string& text);
std::string check_integers(const std::string& text);

/// The check of an integer that is at least `minimum`.
std::function<std::string(const std::string&)> check_at_least(int64_t minimum);

/// The check of an integer from `minimum` to `maximum`.
std::function<std::string(const std::string&)> check_between(int64_t minimum, int64_t maximum);

inline constexpr int64_t kLargestSeed = std::numeric_limits<int64_t>::max();

/// Checks a seed: an integer from 0 to the largest of 64 bits.
std::string check_seed(const std::string& text);

/// The check of a word that is one of `allowed`.
std::function<std::string(const std::string&)> check_one_of(std::vector<std::string> allowed);

/// Checks a finite number that is more than 0.
std::string check_positive(const std::string& text);

/// Checks a finite number that is 0 or more.
std::string check_not_negative(const std::string& text);

/// Checks a finite number that is more than 0 and at most 1.
std::string check_probability(const std::string& text);

/// Checks a timeout in seconds, within the bounds of parallel.distributed_timeout_seconds.
std::string check_timeout(const std::string& text);

/// Checks a path, which must not be empty.
std::string check_path(const std::string& text);

}  // namespace lockstep
