#include "lockstep/datasets/gpt2_tokenizer.h"

#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/piece_cutter.h"

namespace lockstep {
namespace {

std::shared_ptr<const PieceVocabulary> pieces_of(Gpt2Vocabulary& vocabulary) {
  auto pieces = std::make_shared<PieceVocabulary>();
  pieces->alphabet.bytes = vocabulary.byte_ids;
  pieces->merges = MergeTable(std::exchange(vocabulary.merges, {}));
  if (vocabulary.keep_pieces)
    pieces->whole_pieces.insert(vocabulary.ids.begin(), vocabulary.ids.end());
  return pieces;
}

}  // namespace

struct Gpt2Tokenizer::Tables {
  Gpt2Vocabulary vocabulary;
  PieceCutter cutter{parse_split_pattern(kGpt2Pattern, "GPT-2"), "GPT-2"};
};

Gpt2Tokenizer::Gpt2Tokenizer(Gpt2Vocabulary vocabulary) : encoder_(pieces_of(vocabulary)) {
  vocabulary.ids.clear();
  tables_ = std::make_shared<const Tables>(Tables{.vocabulary = std::move(vocabulary)});
}

Gpt2Tokenizer::Gpt2Tokenizer(const std::string& folder)
    : Gpt2Tokenizer(read_gpt2_vocabulary(folder)) {}

int64_t Gpt2Tokenizer::vocabulary_size() const {
  return static_cast<int64_t>(tables_->vocabulary.tokens.size());
}

size_t Gpt2Tokenizer::encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) {
  size_t used = 0;
  while (used < text.size()) {
    const PieceCutter::Piece piece = tables_->cutter.first(text.substr(used), last);
    if (piece.open) break;
    encoder_.encode(text.substr(used, piece.length), ids);
    used += piece.length;
  }
  return used;
}

std::string Gpt2Tokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text;
  for (const int64_t id : ids) {
    require<UsageError>(id >= 0 && id < vocabulary_size(),
                        "Gpt2Tokenizer: token id: found {}, allowed: 0 to {}", id,
                        vocabulary_size() - 1);
    text += tables_->vocabulary.tokens[static_cast<size_t>(id)];
  }
  return text;
}

std::unique_ptr<Tokenizer> Gpt2Tokenizer::clone() const {
  return std::make_unique<Gpt2Tokenizer>(*this);
}

int64_t Gpt2Tokenizer::end_of_document() const {
  const Gpt2Vocabulary& vocabulary = tables_->vocabulary;
  require<FileError>(vocabulary.end_of_text.has_value(),
                     "'{}': found no token '<|endoftext|>', which ends documents", vocabulary.path);
  return *vocabulary.end_of_text;
}

}  // namespace lockstep
