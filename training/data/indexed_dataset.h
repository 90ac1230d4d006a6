#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "lockstep/training/data/dataset_index.h"
#include "lockstep/training/data/mapped_file.h"

namespace lockstep {

/// A data set in Megatron's format, PREFIX.idx and PREFIX.bin, mapped into memory: documents of
/// sequences of token ids. Needs no libtorch.
class IndexedDataset {
 public:
  /// FileError with the path and the place for a file that is missing or damaged, and for a `.bin`
  /// whose size is not what the `.idx` says.
  explicit IndexedDataset(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  const DatasetIndex& index() const { return index_; }

  /// The numbers of all sequences, one after another.
  PackedTokens tokens() const;

  /// Those of one sequence. UsageError for one that is not there.
  PackedTokens sequence(int64_t sequence) const;

  /// The bytes of the `.bin`.
  std::string_view bytes() const { return bin_.bytes(); }
  /// Those of the `.idx`.
  std::string_view index_bytes() const { return idx_.bytes(); }

 private:
  std::string prefix_;
  MappedFile idx_;
  MappedFile bin_;
  DatasetIndex index_;
};

/// Whether `path` is the prefix of a data set: PREFIX.idx and PREFIX.bin are there, or one of them
/// where no file has the name `path` itself.
bool is_dataset_prefix(const std::string& path);

}  // namespace lockstep
