#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Reads lines that each hold a JSON object, piece by piece, and passes on the strings under given
/// keys of the object itself. A line may be larger than memory: no more than one piece of a string
/// is kept, which no JSON library that keeps whole strings can promise. Accepts what Python's
/// json.loads() accepts, including NaN and Infinity, except half of a surrogate pair in an escape,
/// and more than 1000 levels. Needs no libtorch.
class JsonLineParser {
 public:
  /// Receives the strings, in UTF-8. The pieces for one key come between begin() and end(); if a
  /// key is repeated in the object, begin() is called again, and the last value counts.
  class Strings {
   public:
    virtual ~Strings() = default;
    virtual void begin(size_t key) = 0;
    virtual void append(std::string_view text) = 0;
    virtual void end(size_t key) = 0;
  };

  enum class Line {
    blank,   ///< nothing but white space
    object,  ///< with a string under each key
    bad      ///< see problem(); what was passed on is invalid
  };

  /// `strings` gets the values of `keys`, identified by index, and must outlive this object.
  JsonLineParser(std::vector<std::string> keys, Strings& strings);

  void begin_line();
  /// The next bytes of the line, without the newline.
  void feed(std::string_view piece);
  Line end_line();

  /// For a bad line: the byte (the first is 0), what was found there and what is allowed.
  const std::string& problem() const { return problem_; }

 private:
  enum class State : uint8_t {
    start,
    done,
    first_key,
    key,
    colon,
    value,
    first_value,
    after_value,
    string,
    escape,
    unicode,
    literal,
    minus,
    zero,
    digits,
    point,
    fraction,
    exponent,
    exponent_sign,
    exponent_digits
  };
  enum class Kind : uint8_t { none, string, object, array, number, literal };
  /// The use of the string that is being read.
  enum class Use : uint8_t { nothing, key, text };

  void take(char c);
  void open(char bracket);
  void close();
  void end_value();
  void begin_value(char c);
  void begin_string(Use use);
  const char* take_string(const char* at, const char* end);
  bool take_utf8(unsigned char byte);
  void take_escape(char c);
  void take_hex(char c);
  void take_code_unit(uint32_t unit);
  void take_literal(char c);
  /// Whether `c` belongs to the number; if not, the number has ended, or is bad.
  bool take_digit(char c);
  void end_string();
  void keep(std::string_view text);
  void keep_code_point(uint32_t code);
  void refuse(std::string_view found, std::string_view allowed);
  void refuse_char(char c);
  std::string_view allowed() const;
  void check_values();
  bool in_object() const { return !levels_.empty() && levels_.back() == '{'; }

  std::vector<std::string> keys_;
  size_t longest_key_ = 0;
  Strings& strings_;

  State state_ = State::start;
  std::string levels_;       ///< the open brackets
  std::vector<Kind> found_;  ///< under each key
  size_t current_key_ = 0;   ///< that of the object's current value; keys_.size() for any other
  Use use_ = Use::nothing;
  std::string kept_;                            ///< of the string that is being read
  int utf8_left_ = 0;                           ///< bytes missing from the current character
  unsigned char utf8_low_ = 0, utf8_high_ = 0;  ///< bounds of the next such byte
  uint32_t code_unit_ = 0, hex_digits_ = 0;
  uint32_t high_surrogate_ = 0;    ///< the first half of a pair, or 0
  const char* literal_ = nullptr;  ///< the expected rest of true, false ...
  int64_t before_ = 0;             ///< bytes of the line before this piece
  const char* piece_ = nullptr;
  const char* at_ = nullptr;
  std::string problem_;
};

}  // namespace lockstep
