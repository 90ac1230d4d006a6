#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/token_type.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {

/// Writes a data set in Megatron's format, byte for byte as megatron-core 0.16.1's
/// IndexedDatasetBuilder does. The numbers go to disk as they arrive; only 4 bytes per sequence and
/// 8 per document stay in memory. Needs no libtorch.
///
/// Both files have temporary names until publish(): a writer that is destroyed earlier, or whose
/// process is killed, leaves no pair that could be mistaken for a data set, and until publish() an
/// existing data set stays.
class IndexedDatasetWriter {
 public:
  /// `with_modes`: a multimodal set, whose sequences have modes.
  IndexedDatasetWriter(std::string prefix, TokenType type, bool with_modes = false);

  /// Appends to the sequence that is being written. UsageError for an id that the type cannot hold;
  /// FileError names the file that cannot be written.
  void append(std::span<const int64_t> ids);
  /// The same for numbers that are already packed, of any type. UsageError for an incomplete
  /// number.
  void append_packed(std::string_view numbers);

  /// Drops what the sequence that is being written has so far.
  void drop_sequence();

  /// Ends the sequence, which may be empty. UsageError above 2^31 - 1 numbers, and for a mode in a
  /// data set without modes.
  void end_sequence(int8_t mode = 0);
  /// Ends the document: the sequences since the last one. UsageError inside a sequence.
  void end_document();

  /// Writes the index and flushes both files to the disk. UsageError if the last sequences are in
  /// no document. Only publish() may be called afterwards.
  void prepare();
  /// Gives prepared files their names, PREFIX.idx last. Nothing may be called afterwards.
  void publish();
  /// prepare() and publish(). Of several writers all are prepared before the first is published, so
  /// that a full disk leaves all data sets as they were.
  void finish();

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return static_cast<int64_t>(bounds_.size()) - 1; }

 private:
  void flush();
  void write_index();

  TokenType type_;
  bool with_modes_;
  UnfinishedFile bin_;
  UnfinishedFile idx_;
  std::string buffer_;
  int64_t open_ = 0;  ///< numbers of the sequence that is being written
  int64_t num_tokens_ = 0;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> bounds_ = {0};
  std::vector<int8_t> modes_;
};

}  // namespace lockstep
