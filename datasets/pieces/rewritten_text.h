#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A text that is made of another one, the source, from its front to its end, and which places of
/// the two are the same. Places are in bytes. Needs no libtorch.
class RewrittenText {
 public:
  /// Takes over the next part of the source as it is.
  void keep(std::string_view part) { text_ += part; }

  /// Puts `by` in place of `bytes` bytes of the source, which may be 0.
  void replace(size_t bytes, std::string_view by);

  std::string_view text() const { return text_; }

  /// Where `place` of the text is in the source; none inside of what was replaced. Calls with
  /// ascending places are cheap.
  std::optional<size_t> source_of(size_t place) const;

 private:
  struct Edit {
    size_t begin, end;  ///< in the text
    size_t source_end;
  };

  std::string text_;
  std::vector<Edit> edits_;
  mutable size_t passed_ = 0;  ///< edits that end before the place asked for last
};

/// A text, where it begins in the one that it is a part or a rewriting of, and so on up to the text
/// that somebody gave.
struct TextOrigin {
  const TextOrigin* parent = nullptr;   ///< of the text that this is a part of
  size_t begin = 0;                     ///< the part's place there
  const RewrittenText* made = nullptr;  ///< of that part; nullptr if it is as it was

  /// Where `place` is in the text given; none where it is inside of what was replaced.
  std::optional<size_t> given(size_t place) const;
};

}  // namespace lockstep
