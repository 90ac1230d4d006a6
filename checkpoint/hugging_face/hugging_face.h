#pragma once

#include <string>

namespace lockstep {

/// Writes `out`/config.json and `out`/model.safetensors from the newest checkpoint of `folder`, in
/// fp32, so that Hugging Face's transformers loads them. They appear together, at the end; an
/// earlier export is whole until then, and other files of the folder stay. Returns what cannot be
/// removed of earlier exports, and why; empty if there is nothing. ConfigError names a field of the
/// model that no family of transformers has; FileError.
std::string export_to_hugging_face(const std::string& folder, const std::string& out);

/// Makes a checkpoint of iteration 0 in `folder` from `in`/config.json and `in`/model.safetensors
/// (or the files that `in`/model.safetensors.index.json lists): weights without state of an
/// optimizer, for checkpoint.finetune, `evaluate` and `generate`. Returns its path. FileError names
/// what is missing, damaged or not possible, and a tensor that is not finite.
std::string import_from_hugging_face(const std::string& in, const std::string& folder);

}  // namespace lockstep
