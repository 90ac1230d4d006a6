#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/datasets/rewritten_text.h"

/// How a text is rewritten before it is cut. Texts are UTF-8 here. Needs no libtorch.
namespace lockstep {

/// Bytes that are not UTF-8 become U+FFFD, as with Python's errors="replace".
RewrittenText replace_malformed(std::string_view text);

/// Unicode's normalization form C for the characters of Unicode 9, as in PyPI's tokenizers: later
/// characters stay unchanged and in place.
struct ComposeCharacters {};

/// Replaces each `what`, which must not be empty, with `by`.
struct ReplaceText {
  std::string what;
  std::string by;
};

/// Puts `front` before a text that is not empty.
struct PrependText {
  std::string front;
  bool unless_there = false;  ///< not if the text already begins with it
};

using NormalizerStep = std::variant<ComposeCharacters, ReplaceText, PrependText>;

/// A part of a text, as it arrives.
struct TextPart {
  std::string_view text;
  bool begins = true;  ///< it is the beginning of the whole
  bool closed = true;  ///< it is all that is left of the whole
};

/// The step's result. If the part is not closed, this is the beginning of the result, as far as it
/// does not depend on what follows.
RewrittenText normalize(const NormalizerStep& step, const TextPart& part);

/// Applies all steps, one after the other, to a whole text.
std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text);

}  // namespace lockstep
