#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/datasets/hugging_face_file.h"
#include "lockstep/datasets/json_field.h"

/// Parts of read_hugging_face_tokenizer(). Needs no libtorch.
namespace lockstep {

/// The names of the tokens.
struct TokenNames {
  std::vector<std::string> names;  ///< by id; empty for an id without a token
  std::unordered_map<std::string, uint32_t, StringHash, std::equal_to<>> ids;
};

/// Fills in `vocabulary` and `apart` from the field `model`.
TokenNames read_model(const JsonField& model, bool by_bytes, HuggingFaceTokenizerFile& file);

/// Fills in the token finders from the field `added_tokens`, and adds these tokens to `tokens`.
void read_added_tokens(const JsonField& added, TokenNames& tokens, HuggingFaceTokenizerFile& file);

/// Fills in `normalizer` from the field of the same name.
void read_normalizer(const JsonField& normalizer, HuggingFaceTokenizerFile& file);

/// Fills in the `stages` and `part_steps` from the field `pre_tokenizer`. Returns whether pieces
/// start out as their bytes.
bool read_pre_tokenizer(const JsonField& pre_tokenizer, HuggingFaceTokenizerFile& file);

/// FileError for an unknown post-processor.
void check_post_processor(const JsonField& post_processor);

/// The bytes of the tokens, according to the field `decoder`; without a decoder, their names.
TokenBytes read_decoder(const JsonField& decoder, const TokenNames& tokens);

}  // namespace lockstep
