#include "lockstep/datasets/added_tokens.h"

#include <algorithm>
#include <utility>

#include "lockstep/datasets/unicode_ranges.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

bool is_space(uint32_t point) {
  return std::any_of(
      std::begin(kSpaceRanges), std::end(kSpaceRanges),
      [&](const CodePointRange& range) { return range.first <= point && point <= range.last; });
}

size_t end_of_spaces(std::string_view text, size_t place) {
  while (place < text.size()) {
    const Utf8Character next = utf8_character(text, place);
    if (!is_space(next.point)) break;
    place += next.bytes;
  }
  return place;
}

/// Where the white space that ends at `end` begins, but not before `from`.
size_t begin_of_spaces(std::string_view text, size_t from, size_t end) {
  while (end > from) {
    size_t place = end - 1;
    while (place > from && static_cast<unsigned char>(text[place]) >> 6 == 2) --place;
    if (!is_space(utf8_character(text, place).point)) break;
    end = place;
  }
  return end;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  const auto content = [](const AddedToken& token) { return std::string_view(token.content); };
  std::ranges::stable_sort(tokens_, {}, content);
  const auto same = std::ranges::unique(tokens_, {}, content);
  tokens_.erase(same.begin(), same.end());
  for (const AddedToken& token : tokens_) {
    begins_[static_cast<unsigned char>(token.content[0])] = true;
    any_lstrip_ = any_lstrip_ || token.lstrip;
  }
}

AddedTokenFinder::Candidate AddedTokenFinder::candidate(std::string_view text, size_t place) const {
  auto begin = tokens_.begin(), end = tokens_.end();
  Candidate found;
  for (size_t depth = 0; begin != end; ++depth) {
    if (begin->content.size() == depth) found.token = &*begin++;
    if (begin == end) break;
    if (place + depth == text.size()) {
      found.longer = true;
      break;
    }
    const auto byte = static_cast<unsigned char>(text[place + depth]);
    const auto at_depth = [&](const AddedToken& token) {
      return static_cast<unsigned char>(token.content[depth]);
    };
    const auto range = std::ranges::equal_range(begin, end, byte, {}, at_depth);
    begin = range.begin();
    end = range.end();
  }
  return found;
}

AddedTokenFinder::Found AddedTokenFinder::find(std::string_view text, size_t from, size_t used,
                                               bool closed) const {
  const auto spaces_before = [&](size_t place) {
    return any_lstrip_ ? begin_of_spaces(text, used, place) : place;
  };
  size_t place = tokens_.empty() ? text.size() : from;
  for (; place < text.size(); ++place) {
    if (!begins_[static_cast<unsigned char>(text[place])]) continue;
    const auto [token, longer] = candidate(text, place);
    if (longer && !closed) break;
    if (token == nullptr) continue;
    const size_t content_end = place + token->content.size();
    const size_t end = token->rstrip ? end_of_spaces(text, content_end) : content_end;
    if (token->rstrip && end == text.size() && !closed) break;
    return {token, token->lstrip ? begin_of_spaces(text, used, place) : place, end, place,
            content_end};
  }
  return {nullptr, closed ? text.size() : spaces_before(place), 0, place, place};
}

}  // namespace lockstep
