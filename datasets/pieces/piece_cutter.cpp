#include "lockstep/datasets/piece_cutter.h"

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

constexpr size_t kMostStates = 512;
constexpr size_t kMostClasses = 250;

}  // namespace

/// Makes the table. A state lists the steps that a match may have reached, the preferred first.
class PieceCutter::Builder {
 public:
  Builder(const SplitPattern& pattern, const std::string& place, PieceCutter& cutter)
      : pattern_(pattern), place_(place), cutter_(cutter), classes_(classify(pattern, place)) {}

  void build() {
    cutter_.columns_ = classes_.sets.size() + 1;
    state_of({});
    state_of({pattern_.first});
    for (size_t state = 0; state < states_.size(); ++state)
      for (size_t column = 0; column < cutter_.columns_; ++column)
        cutter_.table_.push_back(entry(std::vector<uint32_t>(states_[state]), column));
    const auto start = cutter_.table_.begin() + static_cast<std::ptrdiff_t>(cutter_.columns_);
    const bool empty = std::any_of(start, start + static_cast<std::ptrdiff_t>(cutter_.columns_),
                                   [](Entry entry) { return entry % 2 == 1; });
    require<FileError>(!empty, "{}: found a pattern that matches the empty text", place_);
    std::copy_n(classes_.of_point.begin(), cutter_.ascii_.size(), cutter_.ascii_.begin());
    cutter_.classes_ = std::move(classes_.of_point);
  }

 private:
  /// The class of each code point, which tells the sets that hold it; and the sets of each class.
  struct CharacterClasses {
    std::vector<uint8_t> of_point;
    std::vector<std::vector<bool>> sets;  ///< [class][set]
  };

  static CharacterClasses classify(const SplitPattern& pattern, const std::string& place);

  size_t state_of(const std::vector<uint32_t>& steps) {
    const auto [found, fresh] = numbers_.emplace(steps, states_.size());
    if (fresh) states_.push_back(steps);
    require<FileError>(states_.size() <= kMostStates,
                       "{}: found a pattern of more than {} states, allowed: fewer", place_,
                       kMostStates);
    return found->second;
  }

  Entry entry(const std::vector<uint32_t>& steps, size_t column) {
    seen_.assign(pattern_.steps.size(), false);
    next_.clear();
    matched_ = false;
    for (const uint32_t step : steps) follow(step, column);
    return static_cast<Entry>(state_of(next_) * cutter_.columns_ * 2 + matched_);
  }

  /// Continues from `first` with a character of class `column`, or with the end.
  void follow(uint32_t first, size_t column) {
    std::vector<uint32_t> waiting = {first};
    while (!waiting.empty() && !matched_) {
      const uint32_t number = waiting.back();
      waiting.pop_back();
      if (seen_[number]) continue;
      seen_[number] = true;
      const PatternStep& step = pattern_.steps[number];
      const bool inside = column < classes_.sets.size() && classes_.sets[column][step.set];
      switch (step.kind) {
        case PatternStep::Kind::match:
          matched_ = true;
          break;
        case PatternStep::Kind::character:
          if (inside && std::find(next_.begin(), next_.end(), step.next) == next_.end())
            next_.push_back(step.next);
          break;
        case PatternStep::Kind::not_before:
          if (!inside) waiting.push_back(step.next);
          break;
        case PatternStep::Kind::fork:
          waiting.push_back(step.other);
          waiting.push_back(step.next);
      }
    }
  }

  const SplitPattern& pattern_;
  const std::string& place_;
  PieceCutter& cutter_;
  CharacterClasses classes_;
  std::vector<std::vector<uint32_t>> states_;
  std::map<std::vector<uint32_t>, size_t> numbers_;
  std::vector<uint32_t> next_;
  std::vector<bool> seen_;
  bool matched_ = false;
};

PieceCutter::Builder::CharacterClasses PieceCutter::Builder::classify(const SplitPattern& pattern,
                                                                      const std::string& place) {
  std::map<uint32_t, std::vector<uint32_t>> changes;  // where sets begin or end
  changes[0];
  for (uint32_t set = 0; set < pattern.sets.size(); ++set)
    for (const CodePointRange& range : pattern.sets[set]) {
      changes[range.first].push_back(set);
      changes[range.last + 1].push_back(set);
    }
  CharacterClasses classes{std::vector<uint8_t>(kMalformed + 1), {}};
  std::map<std::vector<bool>, uint8_t> known;
  std::vector<bool> inside(pattern.sets.size());
  for (auto change = changes.begin(); change != changes.end(); ++change) {
    for (const uint32_t set : change->second) inside[set] = !inside[set];
    const auto [found, fresh] = known.emplace(inside, static_cast<uint8_t>(known.size()));
    require<FileError>(known.size() <= kMostClasses,
                       "{}: found more than {} classes of characters, allowed: fewer", place,
                       kMostClasses);
    if (fresh) classes.sets.push_back(inside);
    const auto next = std::next(change);
    const uint32_t end = next == changes.end() ? kMalformed + 1 : next->first;
    std::fill(classes.of_point.begin() + change->first, classes.of_point.begin() + end,
              found->second);
  }
  return classes;
}

PieceCutter::PieceCutter(const SplitPattern& pattern, const std::string& place) {
  Builder(pattern, place, *this).build();
}

PieceCutter::Piece PieceCutter::match(std::string_view text, size_t begin, bool last) const {
  const Entry* const table = table_.data();
  size_t found = begin, place = begin, row = columns_;
  while (place < text.size()) {
    const auto byte = static_cast<unsigned char>(text[place]);
    size_t bytes = 1, column = 0;
    if (byte < 0x80) {
      column = ascii_[byte];
    } else {
      const Utf8Character next = utf8_character(text, place);
      if (next.cut_off && !last) return {0, true, true};
      bytes = next.bytes;
      column = classes_[next.point];
    }
    const Entry entry = table[row + column];
    found = entry & 1 ? place : found;
    row = entry >> 1;
    if (row == 0) return {found - begin};
    place += bytes;
  }
  if (!last) return {0, true, true};
  if (table[row + columns_ - 1] & 1) found = place;
  return {found - begin};
}

PieceCutter::Piece PieceCutter::first(std::string_view text, bool last) const {
  for (size_t gap = 0; gap < text.size();) {
    const Piece found = match(text, gap, last);
    if (gap == 0 && (found.open || found.length > 0)) return found;
    if (found.open || found.length > 0) return {gap, false, found.open};
    gap += utf8_character(text, gap).bytes;
  }
  return {text.size(), false, !last};
}

}  // namespace lockstep
