#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/sample_index.h"
#include "lockstep/datasets/token_sequence.h"

/// The documents of a split. "Document" is used as in Megatron: a sequence of the `.idx`. Needs no
/// libtorch.
namespace lockstep {

/// Documents range.begin ... range.end - 1 of a data set; the first may lack tokens at its
/// beginning and the last at its end.
struct DatasetPart {
  DocumentRange range;
  int64_t skipped = 0;  ///< tokens of the first document that belong to the previous part
  int64_t cut = 0;      ///< tokens of the last document that belong to the next part
  int64_t begin = 0;    ///< half-open range of tokens of the data set
  int64_t end = 0;

  int64_t tokens() const { return end - begin; }
};

/// How a split distributes a data set to training and validation: by documents, as Megatron's
/// builder does (split_documents()). If that leaves a part with a share but without any token, as
/// in a data set of a few documents, the split is by tokens, and documents are cut. UsageError as
/// for split_documents().
std::array<DatasetPart, 2> split_dataset(const DatasetIndex& index, std::span<const double> shares);

/// Parts of one or several data sets, one after another.
class DocumentList {
 public:
  /// Ids must be below `vocabulary_size`, which the field `vocabulary_field` sets.
  DocumentList(int64_t vocabulary_size, const std::string& vocabulary_field)
      : tokens_(vocabulary_size, vocabulary_field) {}

  /// UsageError unless the numbers are integers, and for more than 2^31 - 1 documents in total.
  void append(const std::shared_ptr<const IndexedDataset>& dataset, const DatasetPart& part);

  int64_t size() const { return size_; }

  /// Tokens of document `document` (0 to size() - 1).
  int64_t length(int64_t document) const;
  /// The position in text() at which it begins.
  int64_t begin(int64_t document) const;

  /// The tokens of all documents.
  const TokenSequence& text() const { return tokens_; }

  /// The lengths of all documents.
  std::vector<int32_t> lengths() const;

  /// The prefixes of the data sets, as used in messages.
  std::string name() const;

  /// The first prefix, without its folder.
  std::string base_name() const;

  /// Identifies the documents and their lengths: the data sets, by checksums of their `.idx`, and
  /// the parts. Lists with equal descriptions have equal lengths.
  std::string description() const;

 private:
  struct Part {
    std::shared_ptr<const IndexedDataset> dataset;
    DatasetPart part;
    int64_t first = 0;  ///< number of its first document
    int64_t begin = 0;  ///< of its tokens in tokens_
  };

  const Part& part_of(int64_t document) const;

  std::vector<Part> parts_;
  TokenSequence tokens_;
  int64_t size_ = 0;
};

}  // namespace lockstep
