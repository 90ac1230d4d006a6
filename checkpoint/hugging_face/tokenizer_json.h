#pragma once

// Internal.

#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/datasets/gpt2_vocabulary.h"
#include "lockstep/datasets/tokenizer.h"

/// Files by which transformers gives the ids that a tokenizer gives here. Needs no libtorch.
namespace lockstep {

/// The text of a tokenizer_config.json, `config`, that chooses the class of transformers that
/// follows tokenizer.json. If `config` has no eos_token, `end` becomes that, unless it is empty.
std::string with_tokenizer_class(nlohmann::json config, const std::string& end);

/// The text of the token that ends documents; empty if there is none, or texts cannot spell it out.
std::string text_of_end(Tokenizer& tokenizer);

/// tokenizer.json of GPT-2's encoding with merges, from encoder.json and vocab.bpe or the like. In
/// contrast to Gpt2Tokenizer, a text that spells out <|endoftext|> has that token.
std::string gpt2_tokenizer_json(const Gpt2Vocabulary& vocabulary);

}  // namespace lockstep
