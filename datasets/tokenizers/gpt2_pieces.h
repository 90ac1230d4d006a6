#pragma once

#include <cstddef>
#include <string_view>

namespace lockstep {

/// The pieces into which GPT-2 cuts a text before it merges bytes, as by the regular expression
///   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// with the Unicode classes of unicode_ranges.h. A byte that is no UTF-8 counts as a character that
/// is neither letter nor number nor space.
///
/// The length in bytes of the first piece of `text`, which is not empty.
size_t gpt2_piece_length(std::string_view text);

/// A piece that ends so many bytes before the end of what is there is the same whatever follows.
inline constexpr size_t kGpt2LookAhead = 8;

}  // namespace lockstep
