#pragma once

#include <string>

namespace lockstep {

/// The folder, next to the checkpoint, in which an import keeps the tokenizer's files.
inline constexpr const char* kKeptFolder = "hugging_face";

/// data.tokenizer of an imported checkpoint whose folder may have been moved since. If nothing is
/// at the path `name`, which was in a folder hugging_face, and a file of that name is in the folder
/// hugging_face next to `checkpoint`, returns that one; otherwise `name`. FileError if it cannot be
/// determined what is there.
std::string find_moved_tokenizer(const std::string& name, const std::string& checkpoint);

}  // namespace lockstep
