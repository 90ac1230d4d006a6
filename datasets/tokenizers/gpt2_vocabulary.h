#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/byte_pairs.h"

/// The vocabulary of a byte-level byte-pair encoding, from either of its two forms. Needs no
/// libtorch.
namespace lockstep {

struct Gpt2Vocabulary {
  std::string path;                                  ///< of the file that lists the tokens
  std::vector<std::string> tokens;                   ///< their bytes, by id
  std::map<std::string, uint32_t, std::less<>> ids;  ///< by bytes
  std::array<uint32_t, 256> byte_ids = {};
  std::vector<PairMerge> merges;        ///< each pair once
  std::optional<uint32_t> end_of_text;  ///< the id of <|endoftext|>
  /// A piece that is a token stays whole, whatever the merges would make of it, as tiktoken does.
  bool keep_pieces = false;
};

/// GPT-2's files: encoder.json (the name of each token in GPT-2's alphabet, and its id) and
/// vocab.bpe (the merges, the most frequent first). FileError with the path, and the line or token,
/// for damage: ids that are not 0 to n - 1, characters outside the alphabet, a byte without a
/// token, a merge of or into something that is not a token, a merge that occurs twice.
Gpt2Vocabulary parse_gpt2_vocabulary(std::string_view encoder, const std::string& encoder_path,
                                     std::string_view merges, const std::string& merges_path);

/// tiktoken's ranks: lines with a token's bytes in base64 and its id, which is also its rank: two
/// neighbours may become any token that their bytes together form. The one id in between that no
/// line has, or otherwise the next id after the last, is <|endoftext|>. FileError with the path and
/// the line for damage: not base64, a token of no bytes or more than 1024, a token or an id that
/// occurs twice, a byte without a token, ids with more than one gap.
Gpt2Vocabulary parse_tiktoken_ranks(std::string_view text, const std::string& path);

/// The vocabulary of a folder: encoder.json and vocab.bpe if one of them exists, otherwise
/// vocab.json and merges.txt, which are the same files under other names, otherwise ranks for
/// GPT-2's rule for cutting text: gpt2.tiktoken, r50k_base.tiktoken or p50k_base.tiktoken.
/// FileError as above, and with the folder if it has none of them.
Gpt2Vocabulary read_gpt2_vocabulary(const std::string& folder);

}  // namespace lockstep
