#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/datasets/dataset_index.h"
#include "lockstep/datasets/token_type.h"

namespace lockstep {

/// A data set in Megatron's format, PREFIX.idx and PREFIX.bin: documents of sequences of token ids.
/// The `.idx` is in memory, mapped if it has over 64 MiB; the `.bin` is read from one open file.
/// Needs no libtorch.
class IndexedDataset {
 public:
  /// FileError with the path and the place for a file that is missing or damaged, and for a `.bin`
  /// whose size does not match the `.idx`.
  explicit IndexedDataset(const std::string& prefix);
  ~IndexedDataset();

  const std::string& prefix() const { return prefix_; }
  const DatasetIndex& index() const { return index_; }

  /// The numbers of all sequences, one after another. They are in the `.bin`, which this object
  /// keeps open.
  PackedTokens tokens() const;

  /// The numbers of one sequence. UsageError for one that does not exist.
  PackedTokens sequence(int64_t sequence) const;

  /// The bytes of the `.idx`.
  std::string_view index_bytes() const;

 private:
  struct Files;

  std::string prefix_;
  std::unique_ptr<const Files> files_;
  DatasetIndex index_;
};

/// Whether `path` is the prefix of a data set: PREFIX.idx and PREFIX.bin exist, or one of them does
/// and no file is called `path` itself. FileError if that cannot be determined.
bool is_dataset_prefix(const std::string& path);

}  // namespace lockstep
