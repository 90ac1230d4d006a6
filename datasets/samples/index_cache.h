#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/datasets/sample_index.h"

/// Sample indices on disk, so that one rank builds them and all read them. Needs no libtorch.
///
/// "LSINDEX\1" (8 bytes) | bytes of the description (u64) | description | documents (u64) | samples
/// (u64) | documents in the order in which they are read (i32) | document and offset where each
/// sample begins, and where the last ends (i64, i64) | order of the samples (i64) | CRC-32 of all
/// that (u32). Little endian, unaligned.
namespace lockstep {

/// A SampleIndex in memory that `owner` keeps.
struct SampleIndexView {
  std::string_view description;
  PackedArray<int32_t> documents;
  PackedArray<SampleStart> starts;
  PackedArray<int64_t> order;
  std::shared_ptr<const void> owner;

  int64_t num_samples() const { return order.size(); }
};

/// Gives `write` the bytes of a file, in several parts.
void write_index_cache(const SampleIndex& index, std::string_view description,
                       const std::function<void(std::string_view)>& write);

/// Reads the bytes of a file, which must outlive the result. FileError with `path`, the byte, what
/// was found and what is allowed, for a file that is cut off, too long or damaged.
SampleIndexView parse_index_cache(std::string_view bytes, const std::string& path);

/// A view of an index that is in memory.
SampleIndexView view_of(SampleIndex index);

struct IndexCacheFile {
  std::string path;
  /// Of what the index was made of. A file with another description is stale and replaced.
  std::string description;
  /// Whether it is an error that the file cannot be written. Otherwise the index then stays in the
  /// memory of each process.
  bool required = false;
};

/// The index that the file holds; or, where it is missing, damaged or stale, what `build` returns,
/// which the file then holds. Of several ranks that come at once, on one or several hosts, one
/// builds and the others wait for it (an advisory lock on the file .lock of its folder; where the
/// file system has none, each builds). The file appears complete or not at all. FileError names a
/// `required` file that cannot be written.
SampleIndexView cached_sample_index(const IndexCacheFile& file,
                                    const std::function<SampleIndex()>& build);

}  // namespace lockstep
