#pragma once

#include <functional>
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
/// whatever the layout that saved it, and only the blocks of the files that hold it, each checked.
/// Needs no libtorch. Not for several threads at once.
class CheckpointReader {
 public:
  /// Opens `folder`, or the newest checkpoint in it, also where a run saves there and removes
  /// others meanwhile. FileError: there is none, a manifest that is damaged.
  explicit CheckpointReader(const std::string& folder);
  /// One in memory, which is complete, and stays as it is.
  explicit CheckpointReader(CheckpointSource source);
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  /// Of the checkpoint itself.
  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }

  /// Whether it is still on disk as it was opened: a run that saves there may have removed it, or
  /// have saved the step anew.
  bool is_unchanged() const;
  /// CRC-32 of the manifest: the same for all who have opened the same save.
  uint32_t checksum() const { return manifest_checksum_; }

  /// nullptr if the checkpoint does not hold it.
  const ManifestTensor* find(const std::string& name, const std::string& state = "") const;

  /// Reads `part` of `tensor`, in the tensor's dtype, into `out`. FileError names file, tensor and
  /// bytes of what is damaged, and a tensor that a shard's own header does not have where the
  /// manifest says.
  void read(const ManifestTensor& tensor, const TensorPart& part, char* out);

  /// From now on read() reads nothing, fills `out` with zeros and tells `note` what it would read:
  /// bytes offset ... offset + count - 1 of file number `file`. Empty: it reads again.
  using Note = std::function<void(int64_t file, int64_t offset, int64_t count)>;
  void note_reads(Note note) { note_ = std::move(note); }

  /// The configuration of the run that saved. FileError if it is damaged.
  Config config();

  /// Bytes that were read from files other than the manifest.
  int64_t bytes_read() const;

 private:
  ShardReader& shard(int64_t file, std::string_view what);
  void read_manifest();
  void index_manifest();

  std::string path_;
  std::unique_ptr<CheckpointSource> source_;  ///< null: on disk
  Note note_;
  Manifest manifest_;
  uint32_t manifest_checksum_ = 0;
  std::map<std::pair<std::string, std::string>, const ManifestTensor*> tensors_;
  std::vector<std::unique_ptr<ShardReader>> shards_;
};

/// Calls `use` with what `folder` means. Where that returns false or throws FileError, and the
/// checkpoint is not on disk any more as it was opened, calls it again with what `folder` means by
/// then: a run that saves there removes what is older than checkpoint.keep, also while it is read.
void with_newest_checkpoint(const std::string& folder,
                            const std::function<bool(CheckpointReader&)>& use);

/// Name of the file with the configuration.
inline constexpr const char* kConfigName = "config.textproto";

/// Something that is wrong with a checkpoint.
struct CheckpointDamage {
  std::string file;
  std::string tensor;  ///< empty where it is in none
  int64_t offset = 0;  ///< bytes from the front of the file
  std::string message;
};

/// Reads all of a checkpoint: every block's checksum, and whether each shard is a safetensors file
/// whose tensors lie where the manifest says. The first damage of each file; empty if all is good.
/// FileError where there is no checkpoint or its manifest is damaged.
std::vector<CheckpointDamage> verify_checkpoint(const std::string& folder);
std::vector<CheckpointDamage> verify_checkpoint(const CheckpointReader& checkpoint);

}  // namespace lockstep
