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

/// The documents of a split. A document is what Megatron calls one: a sequence of the `.idx`. Needs
/// no libtorch.
namespace lockstep {

/// Documents range.begin ... range.end - 1 of a data set, of which the first may lack tokens at its
/// front and the last at its end.
struct DatasetPart {
  DocumentRange range;
  int64_t skipped = 0;  ///< tokens of the first document that belong to the part before
  int64_t cut = 0;      ///< tokens of the last document that belong to the part after
  int64_t begin = 0;    ///< tokens of the data set, half open
  int64_t end = 0;

  int64_t tokens() const { return end - begin; }
};

/// How a split deals out a data set to training and validation: its documents, as Megatron's
/// builder does (split_documents()). Where that leaves one that has a share without any token, as
/// in a set of a few documents, its tokens are dealt out, and documents are cut. UsageError as of
/// split_documents().
std::array<DatasetPart, 2> split_dataset(const DatasetIndex& index, std::span<const double> shares);

/// Parts of one or several data sets, one after another.
class DocumentList {
 public:
  /// Ids are below `vocabulary_size`; so says the field `vocabulary_field`.
  DocumentList(int64_t vocabulary_size, const std::string& vocabulary_field)
      : tokens_(vocabulary_size, vocabulary_field) {}

  /// UsageError unless the numbers are integers, and for more than 2^31 - 1 documents together.
  void append(const std::shared_ptr<const IndexedDataset>& dataset, const DatasetPart& part);

  int64_t size() const { return size_; }

  /// Tokens of document `document` (0 to size() - 1).
  int64_t length(int64_t document) const;
  /// Where it begins in text().
  int64_t begin(int64_t document) const;

  /// The tokens of all documents.
  const TokenSequence& text() const { return tokens_; }

  /// The lengths of all documents.
  std::vector<int32_t> lengths() const;

  /// The prefixes of the data sets, as a message names them.
  std::string name() const;

  /// The first of them, without its folder.
  std::string base_name() const;

  /// Says which documents these are and how long: the data sets, by checksums of their `.idx`, and
  /// the parts. Lists of equal text have equal lengths.
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
