#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/byte_pairs.h"
#include "lockstep/datasets/hugging_face_file.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

/// The tokenizer of a tokenizer.json. The ids are those that PyPI's tokenizers gives for a text
/// with add_special_tokens=False: no token is put before or after a text, and special tokens in a
/// text are encoded as these tokens. Megatron-LM's HuggingFaceTokenizer gives the same ids from
/// 0.15 to 0.16.1, and later with --tokenizer-hf-no-include-special-tokens; otherwise it also adds
/// the tokens of the file's post_processor. Bytes that are not UTF-8 count as U+FFFD, as in a text
/// that Python decodes with errors="replace".
///
/// decode() returns what Hugging Face's decode() returns if it keeps special tokens, but the bytes
/// of an incomplete character stay as they are. Without a decoder in the file, it returns the
/// tokens' names.
class HuggingFaceTokenizer : public Tokenizer {
 public:
  explicit HuggingFaceTokenizer(HuggingFaceTokenizerFile file);
  /// Reads a file; errors as for read_hugging_face_tokenizer().
  explicit HuggingFaceTokenizer(const std::string& path);

  int64_t vocabulary_size() const override { return file_->vocabulary_size; }
  int64_t end_of_document() const override;
  int64_t begin_of_text() const override;
  size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) override;
  std::string decode(const std::vector<int64_t>& ids) const override;
  std::string decode_more(const std::vector<int64_t>& ids) const override;
  std::unique_ptr<Tokenizer> clone() const override;
  void restart() override { begins_ = {}; }

  /// Which of these have not begun yet where encode_front() continues.
  struct Begins {
    bool text = true;     ///< the text
    bool section = true;  ///< what is between two tokens in the text
    bool part = true;     ///< what is between two tokens of the normalized section
  };

 private:
  std::shared_ptr<const HuggingFaceTokenizerFile> file_;
  PieceEncoder encoder_;
  Begins begins_;
};

}  // namespace lockstep
