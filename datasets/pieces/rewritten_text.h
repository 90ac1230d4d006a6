#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A text that is made from another one, the source, from front to end, and the correspondence of
/// positions in the two. Positions are in bytes. Needs no libtorch.
class RewrittenText {
 public:
  /// Copies the next part of the source unchanged.
  void keep(std::string_view part) { text_ += part; }

  /// Puts `by` in place of `bytes` bytes of the source, which may be 0.
  void replace(size_t bytes, std::string_view by);

  std::string_view text() const { return text_; }

  /// The position in the source of `place` in the text; none inside a replacement. Calls with
  /// ascending places are cheap.
  std::optional<size_t> source_of(size_t place) const;

 private:
  struct Edit {
    size_t begin, end;  ///< in the text
    size_t source_end;
  };

  std::string text_;
  std::vector<Edit> edits_;
  mutable size_t passed_ = 0;  ///< edits that end before the last queried place
};

/// Where a text begins in the text that it is a part or a rewriting of, and so on up to the
/// original input.
struct TextOrigin {
  const TextOrigin* parent = nullptr;   ///< of the text that this is a part of
  size_t begin = 0;                     ///< the part's position there
  const RewrittenText* made = nullptr;  ///< from that part; nullptr if it is unchanged

  /// The position of `place` in the original input; none if it is inside a replacement.
  std::optional<size_t> given(size_t place) const;
};

}  // namespace lockstep
