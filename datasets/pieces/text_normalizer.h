#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/datasets/rewritten_text.h"

/// How a text is rewritten before it is cut. Texts are UTF-8 here. Needs no libtorch.
namespace lockstep {

/// Bytes that are no UTF-8 become U+FFFD, as of Python's errors="replace".
RewrittenText replace_malformed(std::string_view text);

/// Unicode's normalization form C, of the characters that Unicode 9 has, as PyPI's tokenizers does
/// it: later ones stay what and where they are.
struct ComposeCharacters {};

/// `by` instead of each `what`, which is not empty.
struct ReplaceText {
  std::string what;
  std::string by;
};

/// `front` before a text that is not empty.
struct PrependText {
  std::string front;
  bool unless_there = false;  ///< not where the text begins with it
};

using NormalizerStep = std::variant<ComposeCharacters, ReplaceText, PrependText>;

/// A part of a text, as it comes.
struct TextPart {
  std::string_view text;
  bool begins = true;  ///< it is the front of a whole
  bool closed = true;  ///< it is all that is left of it
};

/// The step's text. If the part is not closed, this is the front of it that does not depend on what
/// comes.
RewrittenText normalize(const NormalizerStep& step, const TextPart& part);

/// All steps, one after the other, of a whole text.
std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text);

}  // namespace lockstep
