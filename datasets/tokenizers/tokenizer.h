#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Text to token ids and back. Needs no libtorch. One object serves one thread.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// All ids are below this, including that of the end of a document.
  virtual int64_t vocabulary_size() const = 0;

  /// The id that ends a document. FileError if the vocabulary has none.
  virtual int64_t end_of_document() const = 0;

  /// The id before the first token of a text that nothing comes before: the one that begins texts,
  /// if the vocabulary names one, otherwise end_of_document().
  virtual int64_t begin_of_text() const { return end_of_document(); }

  /// Appends the ids of a front part of `text` to `ids` and returns how many bytes they cover: all
  /// of it if nothing follows (`last`), otherwise as much as does not depend on what follows. For a
  /// long text, call it repeatedly, each time starting with what the previous call left over;
  /// together the calls give the same ids as encode(). The first call after one with `last` begins
  /// another text.
  virtual size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) = 0;

  /// The bytes that the ids represent. UsageError names an id that does not exist.
  virtual std::string decode(const std::vector<int64_t>& ids) const = 0;

  /// The same if other ids came before these: an extra space of a text's first token is then kept.
  /// Ids may be given one by one: a part of a character gives its bytes.
  virtual std::string decode_more(const std::vector<int64_t>& ids) const { return decode(ids); }

  /// A copy for another thread. Large data are shared.
  virtual std::unique_ptr<Tokenizer> clone() const = 0;

  /// Begins a new text, whatever encode_front() was given last.
  virtual void restart() {}

  std::vector<int64_t> encode(std::string_view text);
};

/// Token ids are the values of the bytes, 0 to 255; 256 ends a document and represents no byte.
class ByteTokenizer : public Tokenizer {
 public:
  static constexpr int64_t kBytes = 256;

  int64_t vocabulary_size() const override { return kBytes + 1; }
  int64_t end_of_document() const override { return kBytes; }
  size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) override;
  std::string decode(const std::vector<int64_t>& ids) const override;
  std::unique_ptr<Tokenizer> clone() const override;
};

/// ConfigError, with `field`, unless `name` is "byte", "gpt2:" and a folder, "hf:" and a file, or
/// "sentencepiece:" and a file.
void check_tokenizer_name(const std::string& name, const std::string& field);

/// The tokenizer that `name` refers to: bytes, GPT-2's with the vocabulary in a folder, that of a
/// tokenizer.json, or SentencePiece with the model in a file. Errors as for check_tokenizer_name(),
/// Gpt2Tokenizer, HuggingFaceTokenizer and SentencepieceTokenizer.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const std::string& field);

}  // namespace lockstep
