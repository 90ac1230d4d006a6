#include "lockstep/datasets/hugging_face_tokenizer.h"

#include <optional>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

using Begins = HuggingFaceTokenizer::Begins;
constexpr Begins kInside = {.text = false, .section = false, .part = false};

/// One call of encode_front().
class FrontEncoder {
 public:
  FrontEncoder(const HuggingFaceTokenizerFile& file, PieceEncoder& encoder, Begins begins,
               std::vector<int64_t>& ids)
      : file_(file), encoder_(encoder), begins_(begins), ids_(ids) {}

  /// How far the ids stand for the front of the text.
  struct Reached {
    size_t bytes = 0;
    size_t ids = 0;
    Begins begins;
  };

  Reached encode(std::string_view text, bool last) {
    reached_ = {0, ids_.size(), begins_};
    last_ = last;
    if (!last) text = text.substr(0, whole_characters(text));
    std::optional<RewrittenText> sound;
    if (!is_utf8(text)) sound = replace_malformed(text);
    const TextOrigin origin{.made = sound ? &*sound : nullptr};
    const TextPart whole{sound ? sound->text() : text, begins_.section, last};
    constexpr Begins kAfter = {.text = false, .section = true, .part = true};
    for_each_part(file_.tokens_in_text, whole, kAfter, origin, &FrontEncoder::section);
    return reached_;
  }

 private:
  using OnPart = void (FrontEncoder::*)(TextPart, const TextOrigin&);

  /// Calls `on_part` with the text between added tokens, and appends the ids of these tokens.
  void for_each_part(const AddedTokenFinder& tokens, const TextPart& whole, Begins after,
                     const TextOrigin& origin, OnPart on_part) {
    size_t used = 0;
    for (size_t searched = 0; searched < whole.text.size();) {
      const AddedTokenFinder::Found found = tokens.find(whole.text, searched, used, whole.closed);
      // Encoding must not resume after the front of a token.
      if (used > 0 && found.content_begin >= used) reach(used, origin, after);
      if (found.begin > used) {
        const bool closed = found.token != nullptr || whole.closed;
        const TextOrigin here{&origin, used};
        (this->*on_part)({whole.text.substr(used, found.begin - used), true, closed}, here);
      }
      if (found.token == nullptr) return;
      ids_.push_back(found.token->id);
      begins_ = after;
      used = found.end;
      searched = found.content_end;
    }
    if (used > 0) reach(used, origin, after);
  }

  void section(TextPart whole, const TextOrigin& origin) {
    whole.begins = begins_.section;
    rewrite(file_.normalizer, 0, whole, origin, &FrontEncoder::normalized_section);
  }

  void normalized_section(TextPart whole, const TextOrigin& origin) {
    constexpr Begins kAfter = {.text = false, .section = false, .part = true};
    for_each_part(file_.tokens_in_normalized, whole, kAfter, origin, &FrontEncoder::part);
  }

  void part(TextPart whole, const TextOrigin& origin) {
    whole.begins = file_.only_first_part_begins ? begins_.text : begins_.part;
    rewrite(file_.part_steps, 0, whole, origin, &FrontEncoder::rewritten_part);
  }

  void rewritten_part(TextPart whole, const TextOrigin& origin) {
    cut(0, whole.text, whole.closed, origin, 0, /*anywhere=*/true);
    if (whole.closed) begins_ = kInside;
  }

  void rewrite(const std::vector<NormalizerStep>& steps, size_t step, TextPart part,
               const TextOrigin& origin, OnPart then) {
    if (step == steps.size()) return (this->*then)(part, origin);
    const RewrittenText made = normalize(steps[step], part);
    const TextOrigin here{.parent = &origin, .made = &made};
    part.text = made.text();
    rewrite(steps, step + 1, part, here, then);
  }

  /// Cuts a piece by the stages from `stage` on and encodes the results. Returns how many bytes it
  /// encoded, all if the piece is closed. The piece begins at `begin` of the text that `origin` is
  /// about. `anywhere`: encoding may resume between any two pieces in it, which it may not inside a
  /// match.
  size_t cut(size_t stage, std::string_view text, bool closed, const TextOrigin& origin,
             size_t begin, bool anywhere) {
    if (stage == file_.stages.size()) return encode_piece(text, closed, origin, begin, anywhere);
    const auto& [cutter, keep_gaps] = file_.stages[stage];
    size_t used = 0;
    while (used < text.size()) {
      const PieceCutter::Piece piece = cutter.first(text.substr(used), closed);
      size_t inside = piece.length;
      if (piece.length > 0 && (piece.matched || keep_gaps))
        inside = cut(stage + 1, text.substr(used, piece.length), !piece.open, origin, begin + used,
                     anywhere && !piece.matched);
      used += inside;
      if (anywhere && inside > 0) reach(begin + used, origin, kInside);
      if (piece.open) break;
    }
    return used;
  }

  size_t encode_piece(std::string_view text, bool closed, const TextOrigin& origin, size_t begin,
                      bool anywhere) {
    if (!file_.apart) {
      if (!closed) return 0;
      encoder_.encode(text, ids_);
      if (anywhere) reach(begin + text.size(), origin, kInside);
      return text.size();
    }
    size_t used = 0;
    while (used < text.size()) {
      const size_t length = file_.apart->first(text.substr(used), closed);
      if (length == 0) break;
      encoder_.encode(text.substr(used, length), ids_);
      used += length;
      if (anywhere) reach(begin + used, origin, kInside);
    }
    return used;
  }

  /// Notes that the ids stand for all text before `place`, if that is a place of the given text.
  void reach(size_t place, const TextOrigin& origin, Begins begins) {
    begins_ = begins;
    if (last_) return;
    const std::optional<size_t> given = origin.given(place);
    if (given && *given > reached_.bytes) reached_ = {*given, ids_.size(), begins};
  }

  const HuggingFaceTokenizerFile& file_;
  PieceEncoder& encoder_;
  Begins begins_;
  std::vector<int64_t>& ids_;
  Reached reached_;
  bool last_ = false;
};

}  // namespace

HuggingFaceTokenizer::HuggingFaceTokenizer(HuggingFaceTokenizerFile file)
    : file_(std::make_shared<const HuggingFaceTokenizerFile>(std::move(file))),
      encoder_(std::shared_ptr<const PieceVocabulary>(file_, &file_->vocabulary)) {}

HuggingFaceTokenizer::HuggingFaceTokenizer(const std::string& path)
    : HuggingFaceTokenizer(read_hugging_face_tokenizer(path)) {}

int64_t HuggingFaceTokenizer::end_of_document() const {
  require<FileError>(file_->end_of_document.has_value(),
                     "'{}': found no token that ends documents; allowed: eos_token in "
                     "tokenizer_config.json beside it, or a token <|endoftext|> or </s>",
                     file_->path);
  return *file_->end_of_document;
}

int64_t HuggingFaceTokenizer::begin_of_text() const {
  return file_->begin_of_text ? *file_->begin_of_text : end_of_document();
}

size_t HuggingFaceTokenizer::encode_front(std::string_view text, bool last,
                                          std::vector<int64_t>& ids) {
  const FrontEncoder::Reached reached =
      FrontEncoder(*file_, encoder_, begins_, ids).encode(text, last);
  begins_ = last ? Begins{} : reached.begins;
  if (last) return text.size();
  ids.resize(reached.ids);
  return reached.bytes;
}

std::string HuggingFaceTokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text = decode_more(ids);
  const TokenBytes& bytes = file_->bytes;
  if (!ids.empty() && !bytes.of_first_token.empty()) {
    const auto first = static_cast<size_t>(ids[0]);
    return text.replace(0, bytes.of_token[first].size(), bytes.of_first_token[first]);
  }
  size_t begin = 0;
  for (uint32_t i = 0;
       i < bytes.strips && text.compare(begin, bytes.stripped.size(), bytes.stripped) == 0; ++i)
    begin += bytes.stripped.size();
  return text.substr(begin);
}

std::string HuggingFaceTokenizer::decode_more(const std::vector<int64_t>& ids) const {
  std::string text;
  for (const int64_t id : ids) {
    require<UsageError>(id >= 0 && id < vocabulary_size(),
                        "HuggingFaceTokenizer: token id: found {}, allowed: 0 to {}", id,
                        vocabulary_size() - 1);
    text += file_->bytes.of_token[static_cast<size_t>(id)];
  }
  return text;
}

std::unique_ptr<Tokenizer> HuggingFaceTokenizer::clone() const {
  auto other = std::make_unique<HuggingFaceTokenizer>(*this);
  other->restart();
  return other;
}

}  // namespace lockstep
