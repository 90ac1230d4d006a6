#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/core/config.h"

namespace lockstep {

class ShardReader;
struct CheckpointSource;

/// A complete checkpoint, on disk or in the memory of the ranks. Reads any part of any tensor,
/// whatever layout saved it. Reads only the blocks of the files that hold the part, and checks each
/// block. Keeps at most 64 files open. Needs no libtorch. Not thread-safe.
class CheckpointReader {
 public:
  /// Opens `folder`, or the newest checkpoint in it, even while a run saves there and removes
  /// others. FileError: there is no checkpoint, or its manifest is damaged.
  explicit CheckpointReader(const std::string& folder);
  /// Opens one in memory, which is complete and does not change.
  explicit CheckpointReader(CheckpointSource source);
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  /// Path of the checkpoint itself.
  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }

  /// Whether the checkpoint is still on disk as it was opened: a run that saves there may have
  /// removed it, or saved the step again.
  bool is_unchanged() const;
  /// CRC-32 of the manifest: the same for all who have opened the same save.
  uint32_t checksum() const { return manifest_checksum_; }

  /// nullptr if the checkpoint does not hold it.
  const ManifestTensor* find(const std::string& name, const std::string& state = "") const;

  /// Reads `part` of `tensor`, in the tensor's dtype, into `out`. FileError names file, tensor and
  /// bytes of damaged data, or a tensor that is not where the manifest says according to the
  /// shard's own header.
  void read(const ManifestTensor& tensor, const TensorPart& part, char* out);

  /// From now on read() calls `note` before each read of a file: of bytes offset ...
  /// offset + count - 1 of file number `file`. With `dry` it reads nothing then, and leaves `out`
  /// as it is. An empty `note`: read() reads, and calls nothing.
  using Note = std::function<void(int64_t file, int64_t offset, int64_t count)>;
  void note_reads(Note note, bool dry) {
    note_ = std::move(note);
    dry_ = dry && note_;
  }
  /// Whether read() reads nothing.
  bool is_dry() const { return dry_; }

  /// The configuration of the run that saved. FileError if it is damaged.
  Config config();

  /// Bytes read so far from files other than the manifest.
  int64_t bytes_read() const;

 private:
  ShardReader& shard(int64_t file, std::string_view what);
  std::unique_ptr<ShardReader> open_shard(int64_t file, std::string_view what);
  void read_manifest();
  void index_manifest();

  std::string path_;
  std::unique_ptr<CheckpointSource> source_;  ///< null: on disk
  Note note_;
  bool dry_ = false;
  Manifest manifest_;
  uint32_t manifest_checksum_ = 0;
  std::map<std::pair<std::string, std::string>, const ManifestTensor*> tensors_;
  std::list<std::pair<int64_t, std::unique_ptr<ShardReader>>> open_;  ///< the last used in front
  std::vector<bool> checked_;    ///< whether a file's header agrees with the manifest
  int64_t bytes_of_closed_ = 0;  ///< read from files that were closed
};

/// Calls `use` with the checkpoint that `folder` refers to. If `use` returns false or throws
/// FileError, and the checkpoint is no longer on disk as it was opened, calls `use` again with the
/// checkpoint that `folder` refers to by then: a run that saves there removes checkpoints beyond
/// checkpoint.keep, even while they are being read.
void with_newest_checkpoint(const std::string& folder,
                            const std::function<bool(CheckpointReader&)>& use);

/// Name of the file with the configuration.
inline constexpr const char* kConfigName = "config.textproto";

/// Something that is wrong with a checkpoint.
struct CheckpointDamage {
  std::string file;
  std::string tensor;  ///< empty if it is in none
  int64_t offset = 0;  ///< bytes from the start of the file
  std::string message;
};

/// Reads a whole checkpoint and checks every block's checksum, and that each shard is a safetensors
/// file whose tensors are where the manifest says. Returns the first damage in each file; empty if
/// all is good. FileError if there is no checkpoint or its manifest is damaged.
std::vector<CheckpointDamage> verify_checkpoint(const std::string& folder);
std::vector<CheckpointDamage> verify_checkpoint(const CheckpointReader& checkpoint);

}  // namespace lockstep
