#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/folder_lock.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/config.h"

namespace lockstep {

/// A weight that is to be written, whole and without padding.
struct NewWeight {
  std::string name;   ///< global name of the parameter
  std::string dtype;  ///< as safetensors calls it
  std::vector<int64_t> shape;
};

/// Writes a checkpoint of iteration 0 with only weights, one after another, so that only one need
/// be in memory. The checkpoint is complete after commit(); without commit() it is removed. Needs
/// no libtorch.
class WeightsWriter {
 public:
  /// `weights` in the order in which they will be written. Locks `folder` (see folder_lock.h).
  /// FileError, or ConfigError for a dtype that safetensors does not have; nothing is left then.
  WeightsWriter(const std::string& folder, const Config& config,
                const std::vector<NewWeight>& weights);
  ~WeightsWriter();
  WeightsWriter(const WeightsWriter&) = delete;
  WeightsWriter& operator=(const WeightsWriter&) = delete;

  /// Path for a file or folder beside the weights, which is removed if the checkpoint does not
  /// become complete. It must have gone when commit() has called `before`.
  std::string temporary(const std::string& name) const { return checkpoint_.file(name); }

  /// Writes the bytes of the next weight. FileError.
  void write(std::string_view bytes);

  /// Returns the path of the checkpoint. `before` is called when all weights are on disk, right
  /// before the checkpoint becomes complete. FileError; UsageError if weights have not been
  /// written.
  std::string commit(const std::function<void()>& before = {});

  /// What the constructor and commit() could not remove, and why; see PartialCheckpoint. Empty if
  /// there is nothing.
  const std::string& problem() const { return problem_; }

 private:
  void begin_files(const Config& config, const std::vector<NewWeight>& weights);
  void discard() noexcept;

  FolderLock lock_;
  PartialCheckpoint checkpoint_;
  Manifest manifest_;
  std::optional<ShardWriter> shard_;
  std::string problem_;
  int64_t bytes_ = 0;  ///< of the shard, once all weights are written
  int64_t written_ = 0;
  bool complete_ = false;
};

}  // namespace lockstep
