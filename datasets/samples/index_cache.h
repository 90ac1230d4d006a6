#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/datasets/sample_index.h"

/// Sample indices on disk, so that one rank builds them and all ranks read them. Needs no libtorch.
///
/// "LSINDEX\1" (8 bytes) | bytes of the description (u64) | description | documents (u64) | samples
/// (u64) | documents in the order in which they are read (i32) | document and offset where each
/// sample begins, and where the last ends (i64, i64) | order of the samples (i64) | CRC-32 of all
/// of this (u32). Little endian, unaligned.
namespace lockstep {

/// A SampleIndex in memory that `owner` keeps alive.
struct SampleIndexView {
  std::string_view description;
  PackedArray<int32_t> documents;
  PackedArray<SampleStart> starts;
  PackedArray<int64_t> order;
  std::shared_ptr<const void> owner;

  int64_t num_samples() const { return order.size(); }
};

/// Passes the bytes of a file to `write`, in several parts.
void write_index_cache(const SampleIndex& index, std::string_view description,
                       const std::function<void(std::string_view)>& write);

/// Reads the bytes of a file, which must outlive the result. FileError with `path`, the byte, what
/// was found and what is allowed, for a file that is truncated, too long or damaged.
SampleIndexView parse_index_cache(std::string_view bytes, const std::string& path);

/// A view of an index that is in memory.
SampleIndexView view_of(SampleIndex index);

struct IndexCacheFile {
  std::string path;
  /// Describes what the index was made from. A file with a different description is stale and is
  /// replaced.
  std::string description;
  /// Whether it is an error if the file cannot be written. If it is not, the index stays in the
  /// memory of each process.
  bool required = false;
};

/// The index that the file holds; or, if the file is missing, damaged or stale, what `build`
/// returns, which is then stored in the file. If several ranks call this at the same time, on one
/// or several hosts, one builds and the others wait for it (an advisory lock on the file .lock in
/// its folder; if the file system has no locks, or locks of one host only, each builds, and whoever
/// cannot store the index takes what another one stores within a minute). The file appears complete
/// or not at all. FileError names a `required` file that cannot be written.
SampleIndexView cached_sample_index(const IndexCacheFile& file,
                                    const std::function<SampleIndex()>& build);

}  // namespace lockstep
