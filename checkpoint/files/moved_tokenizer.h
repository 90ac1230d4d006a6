#pragma once

#include <string>

namespace lockstep {

/// The folder, next to the checkpoint, in which an import keeps the tokenizer's files.
inline constexpr const char* kKeptFolder = "hugging_face";

/// data.tokenizer of an imported checkpoint whose folder may have been moved since. If the path
/// `name` is in a folder hugging_face, and a file of that name is in the folder hugging_face next
/// to `checkpoint`, returns that one, even if another import has put its own at the path `name`;
/// otherwise `name`. FileError if it cannot be determined what is there.
std::string find_moved_tokenizer(const std::string& name, const std::string& checkpoint);

}  // namespace lockstep
