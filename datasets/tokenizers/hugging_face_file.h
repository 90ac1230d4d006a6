#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/datasets/added_tokens.h"
#include "lockstep/datasets/apart_cutter.h"
#include "lockstep/datasets/byte_pairs.h"
#include "lockstep/datasets/piece_cutter.h"
#include "lockstep/datasets/text_normalizer.h"

/// The contents of Hugging Face's tokenizer.json, as far as they can be followed exactly. Needs no
/// libtorch.
namespace lockstep {

/// A step that cuts pieces into smaller ones.
struct PieceStage {
  PieceCutter cutter;
  bool keep_gaps = true;  ///< what is between the matches is a piece, too; else it is left out
};

/// How ids are turned back into text.
struct TokenBytes {
  std::vector<std::string> of_token;  ///< by id
  /// Removed from the front of the whole text, at most `strips` times.
  std::string stripped;
  uint32_t strips = 0;
  /// Used instead: the bytes of the first token of a text, by id; empty if they are the same as
  /// elsewhere.
  std::vector<std::string> of_first_token;
};

struct HuggingFaceTokenizerFile {
  std::string path;
  int64_t vocabulary_size = 0;  ///< the largest id + 1
  std::optional<uint32_t> end_of_document;
  std::optional<uint32_t> begin_of_text;
  AddedTokenFinder tokens_in_text;  ///< found before the text is normalized
  AddedTokenFinder tokens_in_normalized;
  std::vector<NormalizerStep> normalizer;  ///< for what is between the tokens in the text
  std::vector<NormalizerStep> part_steps;  ///< for what is between tokens of either kind
  bool only_first_part_begins = false;     ///< a step prepends only to the beginning of a text
  std::vector<PieceStage> stages;
  std::optional<ApartCutter> apart;  ///< cuts pieces further if they start out as characters
  PieceVocabulary vocabulary;
  TokenBytes bytes;
};

/// Reads a tokenizer.json, `text`, and, if it exists, the tokenizer_config.json next to it, whose
/// eos_token ends documents; otherwise documents end with the first of <|endoftext|>, </s>,
/// <|end_of_text|>, <|end▁of▁sentence|> (with the wide bars of DeepSeek) and <eos> that is a token.
/// Its bos_token, if that is a token, begins texts.
///
/// Allowed are the model BPE without dropout and without word prefixes and suffixes; the
/// normalizers NFC, Replace of a string, Prepend and their Sequence; the pre-tokenizers ByteLevel,
/// Split (Isolated, or Removed with invert), Digits, Metaspace and their Sequence; the decoders
/// ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip and their Sequence; the post-processors
/// ByteLevel, TemplateProcessing and the like, which add tokens only on request; added tokens that
/// need not be single words, with the ids that PyPI's tokenizers 0.23.3 gives them, and each
/// content once or in equal entries. Truncation and padding are ignored.
/// FileError, with the path and the field's path in the file, for anything else and for damage.
HuggingFaceTokenizerFile parse_hugging_face_tokenizer(
    std::string_view text, const std::string& path,
    const std::optional<std::string>& config = std::nullopt, const std::string& config_path = "");

/// The same for the file at `path`. FileError also as for read_file().
HuggingFaceTokenizerFile read_hugging_face_tokenizer(const std::string& path);

}  // namespace lockstep
