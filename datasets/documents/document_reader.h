#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/core/input_file.h"
#include "lockstep/datasets/compressed_input.h"
#include "lockstep/datasets/document_encoder.h"

namespace lockstep {

/// The form of the input `path`, according to its name: JSON lines if it ends in .jsonl, .jsonl.gz
/// or .jsonl.zst.
InputForm form_of_input(std::string_view path);

/// Whether the input, which is a text, is called .json, .json.gz or .json.zst.
bool is_named_json(std::string_view path);

/// The documents of a file one after another, in pieces of at most 1 MiB. Needs no libtorch.
class DocumentReader {
 public:
  /// Bytes of one document. They are valid until the next call.
  struct Piece {
    std::string_view bytes;
    bool begins = false;  ///< it is the first of the document
    bool ends = false;    ///< it is the last
    int64_t line = 1;
  };

  /// FileError if the file cannot be opened.
  explicit DocumentReader(const std::string& path);
  /// The same for bytes from another source; `path` is their name.
  DocumentReader(std::string path, CompressedInput::Source source);

  InputForm form() const { return form_; }

  /// The next piece; false at the end. A text, even an empty one, is one document. JSON lines end
  /// at line feeds and at the end of the file; a byte order mark before the first is skipped.
  /// CompressionError is thrown after all pieces before the damage, FileError at once.
  bool next(Piece& piece);

  /// The number of the next line, or of the one that is being read.
  int64_t line() const { return line_; }

  /// Bytes of the file that were read, as they are on disk.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  DocumentReader(std::unique_ptr<InputFile> file, std::string path, CompressedInput::Source source);

  /// Returns whether there is more.
  bool refill();
  void skip_byte_order_mark();

  std::unique_ptr<InputFile> file_;
  int64_t bytes_read_ = 0;
  InputForm form_;
  CompressedInput input_;
  std::unique_ptr<char[]> buffer_;  ///< of one piece
  size_t begin_ = 0;                ///< in buffer_: start of what was not returned yet
  size_t end_ = 0;                  ///< of what was read
  size_t searched_ = 0;             ///< up to here there is no line feed
  int64_t line_ = 1;
  bool at_start_ = true;  ///< of the file
  bool inside_ = false;   ///< whether inside a document
  bool ended_ = false;
};

}  // namespace lockstep
