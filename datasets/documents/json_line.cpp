#include "lockstep/datasets/json_line.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr size_t kMostLevels = 1000;

bool is_json_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

bool is_json_digit(char c) { return c >= '0' && c <= '9'; }

std::string shown_char(char c) {
  const auto byte = static_cast<unsigned char>(c);
  if (byte > 0x20 && byte < 0x7F) return fmt::format("'{}'", c);
  return fmt::format("the byte 0x{:02X}", byte);
}

}  // namespace

JsonLineParser::JsonLineParser(std::vector<std::string> keys, Strings& strings)
    : keys_(std::move(keys)), strings_(strings) {
  for (const std::string& key : keys_) longest_key_ = std::max(longest_key_, key.size());
  begin_line();
}

void JsonLineParser::begin_line() {
  state_ = State::start;
  levels_.clear();
  found_.assign(keys_.size(), Kind::none);
  current_key_ = keys_.size();
  use_ = Use::nothing;
  kept_.clear();
  utf8_left_ = 0;
  high_surrogate_ = 0;
  before_ = 0;
  problem_.clear();
}

void JsonLineParser::feed(std::string_view piece) {
  piece_ = at_ = piece.data();
  for (const char* const end = at_ + piece.size(); at_ != end && problem_.empty();) {
    if (state_ == State::string) {
      at_ = take_string(at_, end);
    } else {
      take(*at_);
      ++at_;
    }
  }
  before_ += static_cast<int64_t>(piece.size());
}

JsonLineParser::Line JsonLineParser::end_line() {
  if (!problem_.empty()) return Line::bad;
  if (state_ == State::start) return Line::blank;
  at_ = piece_;
  if (state_ != State::done) {
    refuse("the end of the line", allowed());
    return Line::bad;
  }
  check_values();
  return problem_.empty() ? Line::object : Line::bad;
}

void JsonLineParser::check_values() {
  constexpr const char* kNames[] = {"",       "",         "an object",
                                    "a list", "a number", "true, false, null, NaN or Infinity"};
  for (size_t key = 0; key < keys_.size(); ++key) {
    if (found_[key] == Kind::string) continue;
    problem_ = found_[key] == Kind::none
                   ? fmt::format("found no key '{}'", keys_[key])
                   : fmt::format("key '{}': found {}, allowed: a string", keys_[key],
                                 kNames[static_cast<size_t>(found_[key])]);
    return;
  }
}

void JsonLineParser::refuse(std::string_view found, std::string_view allowed) {
  problem_ =
      fmt::format("byte {}: found {}, allowed: {}", before_ + (at_ - piece_), found, allowed);
}

void JsonLineParser::refuse_char(char c) { refuse(shown_char(c), allowed()); }

std::string_view JsonLineParser::allowed() const {
  switch (state_) {
    case State::start:
      return "an object, as in {\"text\": \"...\"}";
    case State::done:
      return "the end of the line, because the object is complete";
    case State::first_key:
      return "a key in quotes, or }";
    case State::key:
      return "a key in quotes";
    case State::colon:
      return "a colon";
    case State::value:
      return "a value";
    case State::first_value:
      return "a value, or ]";
    case State::after_value:
    case State::zero:
    case State::digits:
    case State::fraction:
    case State::exponent_digits:
      return in_object() ? "a comma, or }" : "a comma, or ]";
    case State::string:
      return "the end of the string";
    case State::escape:
      return "one of \"\\/bfnrtu after a backslash";
    case State::unicode:
      return "four hexadecimal digits after \\u";
    case State::literal:
      return "true, false, null, NaN or Infinity";
    default:
      return "a digit of the number";
  }
}

void JsonLineParser::take(char c) {
  if (state_ == State::escape) return take_escape(c);
  if (state_ == State::unicode) return take_hex(c);
  if (state_ == State::literal) return take_literal(c);
  if (state_ >= State::minus && (take_digit(c) || !problem_.empty())) return;
  if (is_json_space(c)) return;
  switch (state_) {
    case State::start:
      return c == '{' ? open(c) : refuse_char(c);
    case State::first_key:
    case State::key:
      if (c == '"') return begin_string(Use::key);
      return c == '}' && state_ == State::first_key ? close() : refuse_char(c);
    case State::colon:
      if (c != ':') return refuse_char(c);
      state_ = State::value;
      return;
    case State::first_value:
      if (c == ']') return close();
      return begin_value(c);
    case State::value:
      return begin_value(c);
    case State::after_value:
      if (c == (in_object() ? '}' : ']')) return close();
      if (c != ',') return refuse_char(c);
      state_ = in_object() ? State::key : State::value;
      return;
    default:
      return refuse_char(c);
  }
}

void JsonLineParser::open(char bracket) {
  if (levels_.size() == kMostLevels)
    return refuse("another level", fmt::format("up to {} levels", kMostLevels));
  levels_.push_back(bracket);
  state_ = bracket == '{' ? State::first_key : State::first_value;
}

void JsonLineParser::close() {
  levels_.pop_back();
  end_value();
}

void JsonLineParser::end_value() { state_ = levels_.empty() ? State::done : State::after_value; }

void JsonLineParser::begin_value(char c) {
  const auto begin = [&](Kind kind, State state) {
    if (levels_.size() == 1 && current_key_ < keys_.size()) found_[current_key_] = kind;
    state_ = state;
  };
  const auto literal = [&](const char* rest) {
    literal_ = rest;
    begin(Kind::literal, State::literal);
  };
  switch (c) {
    case '"':
      begin(Kind::string, State::string);
      return begin_string(levels_.size() == 1 && current_key_ < keys_.size() ? Use::text
                                                                             : Use::nothing);
    case '{':
    case '[':
      begin(c == '{' ? Kind::object : Kind::array, state_);
      return open(c);
    case 't':
      return literal("rue");
    case 'f':
      return literal("alse");
    case 'n':
      return literal("ull");
    case 'N':
      return literal("aN");
    case 'I':
      return literal("nfinity");
    case '-':
      return begin(Kind::number, State::minus);
    case '0':
      return begin(Kind::number, State::zero);
    default:
      return is_json_digit(c) ? begin(Kind::number, State::digits) : refuse_char(c);
  }
}

void JsonLineParser::take_literal(char c) {
  if (c != *literal_) return refuse_char(c);
  if (*++literal_ == '\0') end_value();
}

bool JsonLineParser::take_digit(char c) {
  const bool digit = is_json_digit(c);
  const bool exponent = c == 'e' || c == 'E';
  const auto go = [&](State state) {
    state_ = state;
    return true;
  };
  switch (state_) {
    case State::minus:
      if (c == 'I') literal_ = "nfinity";
      if (c == 'I') return go(State::literal);
      if (digit) return go(c == '0' ? State::zero : State::digits);
      break;
    case State::zero:
    case State::digits:
      if (digit && state_ == State::digits) return true;
      if (c == '.') return go(State::point);
      if (exponent) return go(State::exponent);
      end_value();
      return false;
    case State::fraction:
      if (digit) return true;
      if (exponent) return go(State::exponent);
      end_value();
      return false;
    case State::point:
      if (digit) return go(State::fraction);
      break;
    case State::exponent:
      if (c == '+' || c == '-') return go(State::exponent_sign);
      [[fallthrough]];
    case State::exponent_sign:
      if (digit) return go(State::exponent_digits);
      break;
    default:
      if (digit) return true;
      end_value();
      return false;
  }
  refuse_char(c);
  return false;
}

}  // namespace lockstep
