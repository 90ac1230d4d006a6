#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/datasets/tokenizer.h"

/// From text files to a data set in Megatron's format. Needs no libtorch.
namespace lockstep {

struct BuildDataset {
  /// Files that may be compressed with gzip (.gz) or zstd (.zst). Before that suffix, .jsonl means
  /// one document per line; any other file is one document. A document has at most 2^31 - 1 tokens,
  /// because the .idx counts them in 32 bits.
  std::vector<std::string> input;
  std::string output;       ///< prefix of the files that are written
  bool append_eod = false;  ///< end each document with the tokenizer's end_of_document()
  /// The keys under which a JSON line has text. One key makes the data set `output`, several make
  /// the data sets OUTPUT_KEY_document, as Megatron's preprocess_data.py does.
  std::vector<std::string> json_keys = {"text"};
  /// The user has named the keys: there must be JSON lines among the inputs, and no input may be
  /// called .json, which would be one text.
  bool json_keys_given = false;
  int64_t workers = 1;    ///< threads that tokenize; the data sets do not depend on their number
  bool skip_bad = false;  ///< skip bad documents instead of failing
};

/// The progress of a build.
struct BuildProgress {
  int64_t documents = 0;
  int64_t bytes_read = 0;    ///< of the files, as they are on disk
  int64_t bytes_in_all = 0;  ///< of all files
  int64_t tokens = 0;
  int64_t skipped = 0;                      ///< bad documents that were skipped
  std::vector<std::string> first_bad = {};  ///< messages of up to five of them, with file and line
};

/// Reads the files piece by piece, so that files and lines may be larger than memory, and writes
/// the data sets. The numbers have the type that Megatron uses for the tokenizer's vocabulary. A
/// text without any token is an empty sequence. A JSON line without any token is a document without
/// a sequence, as in Megatron's preprocess_data.py; a line of white space is not a document. `make`
/// creates a tokenizer for each thread. `progress` is called from time to time, and at the end.
///
/// FileError names a file that cannot be read or written, or that ends before the size that it had;
/// the file, line and byte of a bad document, unless those are skipped: a line that is not a JSON
/// object or has no string under a key, bytes that are not UTF-8, a document of too many tokens, or
/// compressed data that are damaged or torn, after which the rest of the file is lost, too; and
/// files without any token. In these cases nothing is written. ConfigError names json_keys that
/// cannot be used.
BuildProgress build_dataset(const BuildDataset& build,
                            const std::function<std::unique_ptr<Tokenizer>()>& make,
                            const std::function<void(const BuildProgress&)>& progress);

}  // namespace lockstep
