#pragma once

#include <string>

namespace lockstep {

/// The folder, beside the checkpoint, in which an import keeps the tokenizer's files.
inline constexpr const char* kKeptFolder = "hugging_face";

/// data.tokenizer of a checkpoint of an import whose folder has been moved since: where nothing is
/// at the path of `name`, which lay in a folder hugging_face, and a file of that name lies in the
/// folder hugging_face beside `checkpoint`, that one; otherwise `name`. FileError where it cannot
/// be found out what is there.
std::string find_moved_tokenizer(const std::string& name, const std::string& checkpoint);

}  // namespace lockstep
