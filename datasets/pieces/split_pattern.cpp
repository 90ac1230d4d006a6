#include "lockstep/datasets/split_pattern.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

using Kind = PatternStep::Kind;

constexpr size_t kMostSteps = 512;
constexpr uint32_t kMostRepeats = 100;
constexpr int kDeepest = 6;  // each level is read twice
/// Pairs of letters that equal one other character if case is ignored.
constexpr std::string_view kJoinedLetters[] = {"ss", "ff", "fi", "fl", "st"};

/// How often an item is repeated.
struct Repeats {
  uint32_t least = 1;
  std::optional<uint32_t> most = 1;
};

/// Writes the steps from the end of the pattern to its front, so that each knows its successor.
/// Every function reads a part of the pattern from `at_` on; if the part is repeated, it is called
/// again from the same place.
class PatternParser {
 public:
  PatternParser(std::string_view pattern, const std::string& place)
      : pattern_(pattern), place_(place) {}

  SplitPattern parse() {
    const uint32_t match = add({.kind = Kind::match});
    made_.first = alternatives(match, /*depth=*/0);
    if (at_ < pattern_.size()) refuse("a ')' without '('");
    return std::move(made_);
  }

 private:
  [[noreturn]] void refuse(std::string_view found) const {
    fail<FileError>(
        "{}: found {} at byte {} of '{}', allowed: what `lockstep` can cut by: "
        "characters, classes, \\s \\S \\r \\n \\t \\p{{L}} \\p{{Lu}} \\p{{Ll}} \\p{{Lt}} "
        "\\p{{Lm}} \\p{{Lo}} \\p{{M}} \\p{{N}} \\p{{P}} \\p{{S}}, groups, (?i:...), (?!...) of "
        "one class, | ? * + {{n,m}}",
        place_, found, at_, pattern_);
  }

  uint32_t add(PatternStep step) {
    if (made_.steps.size() >= kMostSteps) refuse("too many steps");
    made_.steps.push_back(step);
    return static_cast<uint32_t>(made_.steps.size() - 1);
  }

  uint32_t add_set(CharacterSet set) {
    const auto same = [&](const CharacterSet& other) { return equal_sets(set, other); };
    const auto found = std::find_if(made_.sets.begin(), made_.sets.end(), same);
    if (found != made_.sets.end()) return static_cast<uint32_t>(found - made_.sets.begin());
    made_.sets.push_back(std::move(set));
    return static_cast<uint32_t>(made_.sets.size() - 1);
  }

  bool comes(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }

  bool take(std::string_view text) {
    const bool there = comes(text);
    if (there) at_ += text.size();
    return there;
  }

  uint32_t alternatives(uint32_t next, int depth) {
    if (depth > kDeepest) refuse("groups in groups");
    std::vector<uint32_t> starts;
    do starts.push_back(sequence(next, depth));
    while (take("|"));
    uint32_t start = starts.back();
    for (size_t i = starts.size() - 1; i > 0; --i)
      start = add({.kind = Kind::fork, .next = starts[i - 1], .other = start});
    return start;
  }

  /// An item of a sequence: where it begins in the pattern, and how often it is repeated.
  struct Item {
    size_t begin = 0;
    Repeats repeats;
  };

  uint32_t sequence(uint32_t next, int depth) {
    std::vector<Item> items;
    while (at_ < pattern_.size() && !comes("|") && !comes(")")) {
      const size_t begin = at_;
      const bool may_be_empty = skip_item(depth);
      items.push_back({begin, repeats()});
      const auto& most = items.back().repeats.most;
      if (may_be_empty && (!most || *most > 1)) refuse("a repetition of what may be empty");
    }
    if (items.empty()) refuse("nothing to match");
    const size_t end = at_;
    for (; !items.empty(); items.pop_back()) next = repeated(items.back(), next, depth);
    at_ = end;
    return next;
  }

  /// Reads an item without keeping its steps. Returns whether it matches the empty text.
  bool skip_item(int depth) {
    const size_t before = made_.steps.size();
    constexpr uint32_t kEnd = 0;
    std::vector<uint32_t> waiting = {item(kEnd, depth)};
    std::vector<bool> seen(made_.steps.size());
    while (!waiting.empty() && !seen[kEnd]) {
      const uint32_t number = waiting.back();
      waiting.pop_back();
      const PatternStep& step = made_.steps[number];
      if (seen[number] || step.kind == Kind::character) continue;
      seen[number] = true;
      if (number == kEnd) break;
      waiting.push_back(step.next);
      if (step.kind == Kind::fork) waiting.push_back(step.other);
    }
    made_.steps.resize(before);
    return seen[kEnd];
  }

  uint32_t repeated(const Item& part, uint32_t next, int depth) {
    const auto once = [&](uint32_t then) {
      at_ = part.begin;
      return item(then, depth);
    };
    const auto [least, most] = part.repeats;
    if (!most) {
      const uint32_t loop = add({.kind = Kind::fork, .other = next});
      made_.steps[loop].next = once(loop);
      next = loop;
    } else {
      const uint32_t end = next;
      for (uint32_t i = least; i < *most; ++i)
        next = add({.kind = Kind::fork, .next = once(next), .other = end});
    }
    for (uint32_t i = 0; i < least; ++i) next = once(next);
    return next;
  }

  Repeats repeats() {
    Repeats found;
    if (take("?"))
      found = {0, 1};
    else if (take("*"))
      found = {0, std::nullopt};
    else if (take("+"))
      found = {1, std::nullopt};
    else if (take("{"))
      found = counted();
    else
      return found;
    if (comes("?") || comes("+") || comes("*") || comes("{")) refuse("a second repetition");
    return found;
  }

  Repeats counted() {
    Repeats found;
    found.least = number();
    found.most = found.least;
    if (take(",")) found.most = comes("}") ? std::nullopt : std::optional(number());
    if (!take("}") || (found.most && *found.most < std::max(found.least, 1u)))
      refuse("a repetition that ends wrongly");
    return found;
  }

  uint32_t number() {
    const size_t begin = at_;
    uint32_t value = 0;
    for (; at_ < pattern_.size() && pattern_[at_] >= '0' && pattern_[at_] <= '9'; ++at_) {
      value = value * 10 + static_cast<uint32_t>(pattern_[at_] - '0');
      if (value > kMostRepeats) refuse("too many repetitions");
    }
    if (at_ == begin) refuse("no number");
    return value;
  }

  uint32_t item(uint32_t next, int depth) {
    if (take("(?!")) return not_before(next);
    if (!comes("(")) {
      const uint32_t set = add_set(character_class());
      return add({.kind = Kind::character, .next = next, .set = set});
    }
    const bool before = any_case_;
    if (take("(?i:"))
      begin_any_case();
    else if (!take("(?:")) {
      take("(");
      if (comes("?")) refuse("a group of this kind");
    }
    const uint32_t start = alternatives(next, depth + 1);
    any_case_ = before;
    if (!take(")")) refuse("a '(' without ')'");
    return start;
  }

  /// The rest of the group that has begun, without inner groups' brackets and without repetitions
  /// like {1}: Oniguruma also joins letters across these.
  std::string inside_group() const {
    std::string inside;
    int open = 0;
    bool in_class = false;
    for (size_t i = at_; i < pattern_.size(); ++i) {
      const char c = pattern_[i];
      if (c == '\\') {
        inside += pattern_.substr(i++, 2);
      } else if (in_class || c == '[') {
        in_class = c != ']';
        inside += c;
      } else if (c == '(') {
        ++open;
        if (pattern_.substr(i + 1).starts_with("?:")) i += 2;
      } else if (c == ')') {
        if (open-- == 0) break;
      } else if (c == '{') {
        i = std::min(pattern_.find('}', i), pattern_.size());
      } else {
        inside += c;
      }
    }
    return inside;
  }

  void begin_any_case() {
    any_case_ = true;
    std::string inside = inside_group();
    for (char& c : inside)
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    for (const std::string_view pair : kJoinedLetters)
      if (inside.find(pair) != inside.npos) refuse(fmt::format("'{}' in any case", pair));
  }

  uint32_t not_before(uint32_t next) {
    const uint32_t set = add_set(character_class());
    if (!take(")")) refuse("(?! of more than one character");
    return add({.kind = Kind::not_before, .next = next, .set = set});
  }

  CharacterSet character_class() {
    if (take("[")) return bracket();
    constexpr std::string_view kSpecial = "^$.?*+{})|";
    if (at_ < pattern_.size() && kSpecial.find(pattern_[at_]) != kSpecial.npos)
      refuse("a special character");
    return in_any_case(single());
  }

  CharacterSet in_any_case(CharacterSet set) const {
    return any_case_ ? with_other_case(set) : set;
  }

  CharacterSet bracket() {
    const bool opposite = take("^");
    CharacterSet all;
    while (!take("]")) {
      if (comes("[") || comes("&&")) refuse("a class in a class");
      const bool escaped = comes("\\");
      CharacterSet part = single();
      if (comes("-") && !pattern_.substr(at_).starts_with("-]")) {
        take("-");
        if (comes("[")) refuse("a class in a class");
        const CharacterSet last = single();
        const bool points = is_single(part) && is_single(last) && part[0].first <= last[0].first;
        if (!points) refuse("a range that ends wrongly");
        part = {{part[0].first, last[0].first}};
      } else if (!escaped && is_single(part) && part[0].first == '-' && !all.empty() &&
                 !comes("]")) {
        refuse("a '-' that is not a range");
      }
      all = union_of(all, part);
    }
    if (all.empty()) refuse("a class without characters");
    all = in_any_case(std::move(all));
    return opposite ? opposite_of(all) : all;
  }

  /// One character, or an escaped class.
  CharacterSet single() {
    if (at_ >= pattern_.size()) refuse("the end");
    if (take("\\")) return escaped();
    const Utf8Character next = utf8_character(pattern_, at_);
    if (next.point == kMalformed) refuse("bytes that are not UTF-8");
    if (any_case_ && next.point >= 0x80) refuse("a character beyond ASCII in any case");
    at_ += next.bytes;
    return {{next.point, next.point}};
  }

  CharacterSet escaped() {
    if (at_ >= pattern_.size()) refuse("the end");
    const char c = pattern_[at_];
    const auto only = [&](char point) {
      ++at_;
      return CharacterSet{{static_cast<uint32_t>(point), static_cast<uint32_t>(point)}};
    };
    if (take("s")) return space_set();
    if (take("S")) return opposite_of(space_set());
    if (take("p{")) return category();
    if (take("P{")) return opposite_of(category());
    if (c == 'r') return only('\r');
    if (c == 'n') return only('\n');
    if (c == 't') return only('\t');
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter || static_cast<unsigned char>(c) >= 0x80) refuse(fmt::format("'\\{}'", c));
    return only(c);
  }

  CharacterSet category() {
    const size_t end = pattern_.find('}', at_);
    const std::string_view name = pattern_.substr(at_, end == pattern_.npos ? 0 : end - at_);
    const std::optional<CharacterSet> found = category_set(name);
    if (!found) refuse(fmt::format("the class '{}'", name));
    if (any_case_ && (name == "Lu" || name == "Ll" || name == "Lt"))
      refuse(fmt::format("the class '{}' in any case", name));
    at_ = end + 1;
    return *found;
  }

  std::string_view pattern_;
  const std::string& place_;
  size_t at_ = 0;
  bool any_case_ = false;
  SplitPattern made_;
};

}  // namespace

SplitPattern parse_split_pattern(std::string_view pattern, const std::string& place) {
  return PatternParser(pattern, place).parse();
}

SplitPattern literal_split_pattern(std::string_view text, const std::string& place) {
  std::string pattern;
  for (const char c : text) {
    const bool plain = static_cast<unsigned char>(c) >= 0x80 || (c >= '0' && c <= '9') ||
                       (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '\r' || c == '\n';
    pattern += plain ? std::string(1, c) : std::string{'\\', c};
  }
  return parse_split_pattern(pattern, place);
}

}  // namespace lockstep
