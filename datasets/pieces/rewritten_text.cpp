#include "lockstep/datasets/rewritten_text.h"

namespace lockstep {

void RewrittenText::replace(size_t bytes, std::string_view by) {
  const size_t source =
      edits_.empty() ? text_.size() : edits_.back().source_end + (text_.size() - edits_.back().end);
  edits_.push_back({text_.size(), text_.size() + by.size(), source + bytes});
  text_ += by;
}

std::optional<size_t> RewrittenText::source_of(size_t place) const {
  if (passed_ > 0 && edits_[passed_ - 1].end > place) passed_ = 0;
  while (passed_ < edits_.size() && edits_[passed_].end <= place) ++passed_;
  if (passed_ < edits_.size() && edits_[passed_].begin < place) return std::nullopt;
  if (passed_ == 0) return place;
  const Edit& before = edits_[passed_ - 1];
  return before.source_end + (place - before.end);
}

std::optional<size_t> TextOrigin::given(size_t place) const {
  std::optional<size_t> found = place;
  for (const TextOrigin* text = this; text != nullptr && found; text = text->parent) {
    if (text->made != nullptr) found = text->made->source_of(*found);
    if (found) *found += text->begin;
  }
  return found;
}

}  // namespace lockstep
