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

  /// Ids are below this; the end of a document counts.
  virtual int64_t vocabulary_size() const = 0;

  /// The id that ends a document. FileError if the vocabulary has none.
  virtual int64_t end_of_document() const = 0;

  /// Appends the ids of a front part of `text` to `ids` and returns how many bytes they stand for:
  /// all of it if nothing comes after it (`last`), else as much as does not depend on what comes.
  /// The calls for a long text, each with what the one before left over, together give encode().
  /// The first call after one with `last` begins another text.
  virtual size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) = 0;

  /// The bytes that the ids stand for. UsageError names an id that is none.
  virtual std::string decode(const std::vector<int64_t>& ids) const = 0;

  /// The same where other ids came before these: a space that a text's first token has in excess
  /// stays.
  virtual std::string decode_more(const std::vector<int64_t>& ids) const { return decode(ids); }

  /// An object for another thread. What is large is shared.
  virtual std::unique_ptr<Tokenizer> clone() const = 0;

  /// Begins a new text, whatever encode_front() was given last.
  virtual void restart() {}

  std::vector<int64_t> encode(std::string_view text);
};

/// Token ids are the values of the bytes, 0 to 255; 256 ends a document and stands for no byte.
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

/// The tokenizer that `name` means: bytes, GPT-2's with the vocabulary of a folder, that of a
/// tokenizer.json, or SentencePiece with the model of a file. Errors as of check_tokenizer_name(),
/// Gpt2Tokenizer, HuggingFaceTokenizer and SentencepieceTokenizer.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const std::string& field);

}  // namespace lockstep
