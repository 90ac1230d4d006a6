#include <algorithm>
#include <array>

#include "lockstep/core/check.h"
#include "lockstep/datasets/json_line.h"

namespace lockstep {
namespace {

constexpr size_t kKeptAtMost = 1 << 16;
constexpr uint32_t kHighSurrogates = 0xD800, kLowSurrogates = 0xDC00, kAfterSurrogates = 0xE000;

/// Whether a byte stands for itself in a string: ASCII without quotes, backslash and controls.
constexpr std::array<bool, 256> make_plain_bytes() {
  std::array<bool, 256> plain = {};
  for (size_t byte = 0x20; byte < 0x80; ++byte) plain[byte] = byte != '"' && byte != '\\';
  return plain;
}

constexpr std::array<bool, 256> kPlainBytes = make_plain_bytes();

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

void JsonLineParser::begin_string(Use use) {
  state_ = State::string;
  use_ = use;
  kept_.clear();
  if (use == Use::text) strings_.begin(current_key_);
}

const char* JsonLineParser::take_string(const char* at, const char* end) {
  const char* const begin = at;
  for (; at != end; ++at) {
    const auto byte = static_cast<unsigned char>(*at);
    if (utf8_left_ == 0 && kPlainBytes[byte] && high_surrogate_ == 0) continue;
    const bool whole = utf8_left_ == 0;
    if (whole && (byte < 0x80 || high_surrogate_ != 0)) break;
    if (take_utf8(byte)) continue;
    at_ = at;
    refuse(fmt::format("the byte 0x{:02X}", byte), "UTF-8");
    return at;
  }
  keep({begin, static_cast<size_t>(at - begin)});
  if (at == end) return at;
  at_ = at;
  if (high_surrogate_ != 0 && *at != '\\')
    refuse("half of a surrogate pair", "its other half, as in \\ud83d\\ude00");
  else if (*at == '"')
    end_string();
  else if (*at == '\\')
    state_ = State::escape;
  else
    refuse(fmt::format("the control character 0x{:02X}", *at), "an escape for it, as in \\n");
  return at + 1;
}

bool JsonLineParser::take_utf8(unsigned char byte) {
  if (utf8_left_ > 0) {
    if (byte < utf8_low_ || byte > utf8_high_) return false;
    utf8_low_ = 0x80;
    utf8_high_ = 0xBF;
    --utf8_left_;
    return true;
  }
  if (byte < 0xC2 || byte > 0xF4) return false;
  utf8_left_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  utf8_low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  utf8_high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  return true;
}

void JsonLineParser::take_escape(char c) {
  constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
  if (c == 'u') {
    state_ = State::unicode;
    code_unit_ = hex_digits_ = 0;
    return;
  }
  if (high_surrogate_ != 0)
    return refuse("half of a surrogate pair", "its other half, as in \\ud83d\\ude00");
  const size_t which = kNames.find(c);
  if (which == std::string_view::npos) return refuse_char(c);
  keep(kValues.substr(which, 1));
  state_ = State::string;
}

void JsonLineParser::take_hex(char c) {
  const int value = hex_value(c);
  if (value < 0) return refuse_char(c);
  code_unit_ = code_unit_ << 4 | static_cast<uint32_t>(value);
  if (++hex_digits_ < 4) return;
  state_ = State::string;
  take_code_unit(code_unit_);
}

void JsonLineParser::take_code_unit(uint32_t unit) {
  const bool low = unit >= kLowSurrogates && unit < kAfterSurrogates;
  if (low != (high_surrogate_ != 0))
    return refuse("half of a surrogate pair", "its other half, as in \\ud83d\\ude00");
  if (low) {
    keep_code_point(0x10000 + ((high_surrogate_ - kHighSurrogates) << 10) + unit - kLowSurrogates);
    high_surrogate_ = 0;
  } else if (unit >= kHighSurrogates && unit < kLowSurrogates) {
    high_surrogate_ = unit;
  } else {
    keep_code_point(unit);
  }
}

void JsonLineParser::keep_code_point(uint32_t code) {
  std::array<char, 4> bytes;
  size_t size = 0;
  const auto put = [&](uint32_t byte) { bytes[size++] = static_cast<char>(byte); };
  const auto continuation = [&](int shift) { put(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    continuation(6);
  } else {
    put(0xF0 | code >> 18);
    continuation(12);
    continuation(6);
  }
  if (code >= 0x80) continuation(0);
  keep({bytes.data(), size});
}

void JsonLineParser::keep(std::string_view text) {
  if (use_ == Use::nothing || text.empty()) return;
  if (use_ == Use::key) {  // one that is too long is none of ours, whatever follows
    kept_.append(text.substr(0, longest_key_ + 1 - std::min(longest_key_ + 1, kept_.size())));
    return;
  }
  if (kept_.size() + text.size() > kKeptAtMost) {
    strings_.append(kept_);
    kept_.clear();
    if (text.size() > kKeptAtMost) return strings_.append(text);
  }
  kept_.append(text);
}

void JsonLineParser::end_string() {
  const Use use = use_;
  use_ = Use::nothing;
  if (use == Use::key) {
    if (levels_.size() == 1)
      current_key_ =
          static_cast<size_t>(std::find(keys_.begin(), keys_.end(), kept_) - keys_.begin());
    state_ = State::colon;
    return;
  }
  if (use == Use::text) {
    strings_.append(kept_);
    strings_.end(current_key_);
  }
  end_value();
}

}  // namespace lockstep
