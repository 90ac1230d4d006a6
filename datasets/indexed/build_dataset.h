#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/tokenizer.h"

/// From text files to a data set in Megatron's format, and what can be said of one. Needs no
/// libtorch.
namespace lockstep {

struct BuildDataset {
  std::vector<std::string> input;  ///< text files, each a document
  std::string output;              ///< prefix of the files that are written
  bool append_eod = false;         ///< end each document with the tokenizer's end_of_document()
};

/// How far a build is.
struct BuildProgress {
  int64_t documents = 0;
  int64_t bytes_read = 0;
  int64_t bytes_in_all = 0;  ///< of all files
  int64_t tokens = 0;
};

/// Reads the files piece by piece, so that they may exceed the memory, and writes the data set. The
/// numbers are of the type that Megatron takes for the tokenizer's vocabulary. `progress` is told
/// now and then, and at the end. FileError names a file that cannot be read or written, or that
/// ends before the size that it had, and files without any token; then nothing is written.
BuildProgress build_dataset(const BuildDataset& build, Tokenizer& tokenizer,
                            const std::function<void(const BuildProgress&)>& progress);

/// What a look at every number of a data set shows.
struct DatasetSummary {
  int64_t shortest = 0;  ///< numbers of a sequence
  int64_t longest = 0;
  int64_t smallest_id = 0;  ///< 0 where there is no number, or no integer
  int64_t largest_id = 0;
  uint32_t crc32 = 0;  ///< of the `.bin`
};

DatasetSummary summarize(const IndexedDataset& dataset);

}  // namespace lockstep
