#pragma once

// Internal.

#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/hugging_face_families.h"
#include "lockstep/checkpoint/json_keys.h"
#include "lockstep/core/config.h"

namespace lockstep {

/// Reads base and scaling of the rotary frequencies of a config.json. Of the two objects that may
/// hold them, transformers uses rope_scaling if it is not empty, otherwise rope_parameters.
/// FileError.
void parse_hugging_face_rope(const JsonKeys& keys, const HuggingFaceFamilyInfo& info,
                             TransformerConfig& model);

/// The object rope_scaling; null without scaling.
nlohmann::ordered_json hugging_face_rope_scaling(const TransformerConfig& model);

}  // namespace lockstep
