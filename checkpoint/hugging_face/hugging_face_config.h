#pragma once

#include <string>
#include <string_view>

#include "lockstep/checkpoint/hugging_face_families.h"
#include "lockstep/core/config.h"

/// The `config.json` of Hugging Face's transformers for the families that GPTModel can represent.
/// Needs no libtorch.
namespace lockstep {

/// config.json of a resolved model whose weights are saved in `dtype`, as torch calls it.
/// ConfigError as for hugging_face_family().
std::string format_hugging_face_config(const TransformerConfig& model,
                                       const std::string& dtype = "float32");

/// The model that a config.json describes, resolved. FileError with `path`: not JSON, or a key that
/// is missing or has a value that GPTModel cannot have (what was found, what is allowed).
TransformerConfig parse_hugging_face_config(std::string_view text, const std::string& path);

}  // namespace lockstep
