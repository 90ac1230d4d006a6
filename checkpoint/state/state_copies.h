#pragma once

// Internal.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/checkpoint/copy_holders.h"
#include "lockstep/checkpoint/manifest.h"

namespace lockstep {

/// A rank's part of a copy: what it would write into a checkpoint, its tensors one after the other.
struct CopiedPart {
  /// The tensors and the one file in which they lie, or none where the rank has nothing to save.
  /// Its checksums are left out.
  std::shared_ptr<const Manifest> content;
  /// The file, the checksums of its blocks, and note_metrics().
  at::Tensor bytes;
  bool is_whole = false;  ///< all of it is there

  /// Bytes of the file, and of `bytes`.
  static int64_t file_bytes(const Manifest& content);
  static int64_t all_bytes(const Manifest& content);
  const char* data() const { return static_cast<const char*>(bytes.const_data_ptr()); }

  /// Writes the checksums of the file behind it, and TrainingProgress::metrics_checksum.
  void seal(const std::optional<uint32_t>& metrics_checksum) const;
  /// Both are in what this returns, beside the content.
  Manifest manifest() const;
};

/// One copy of the state of all ranks, as far as a rank has it.
struct StateCopy {
  CopyId id;
  Manifest whole;      ///< where the run stood, but for metrics_checksum; no files, no tensors
  std::string config;  ///< text
  std::map<int64_t, CopiedPart> parts;  ///< by rank
  /// What the memory of the parts was made for; the next copy of the same makes no other.
  std::shared_ptr<const void> made_for;
};

/// What a rank has in memory of its own state and of that of others. It outlives the ranks' rounds.
/// There are two copies at most: while a copy is made, the one before stays, because only a copy
/// that all ranks have made can be resumed from. For the rank's own thread.
class StateCopies {
 public:
  /// A copy that is to be made, in the memory of the older of the two: the newer is complete on all
  /// ranks by then.
  StateCopy& begin(const CopyId& id);

  /// What is whole here, the older copy first.
  std::vector<HeldCopy> held() const;
  /// nullptr if it is not there.
  const StateCopy* find(const CopyId& id) const;

  /// Frees the memory of all others.
  void keep_only(const CopyId& id);
  void clear();
  /// Of all parts.
  int64_t bytes() const;

 private:
  std::array<std::optional<StateCopy>, 2> copies_;
};

}  // namespace lockstep
