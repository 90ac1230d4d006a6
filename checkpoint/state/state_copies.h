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

/// A rank's part of a copy: what the rank would write into a checkpoint, with its tensors one after
/// the other.
struct CopiedPart {
  /// The tensors and the one file that they are in, or none if the rank has nothing to save. Its
  /// checksums are left out.
  std::shared_ptr<const Manifest> content;
  /// The file, the checksums of its blocks, and note_metrics().
  at::Tensor bytes;
  bool is_whole = false;  ///< all of it is there

  /// Bytes of the file, and of `bytes`.
  static int64_t file_bytes(const Manifest& content);
  static int64_t all_bytes(const Manifest& content);
  const char* data() const { return static_cast<const char*>(bytes.const_data_ptr()); }

  /// Writes the checksums of the file after it, and TrainingProgress::metrics_checksum.
  void seal(const std::optional<uint32_t>& metrics_checksum) const;
  /// The content, together with both of these.
  Manifest manifest() const;
};

/// One copy of the state of all ranks: what this rank has of it.
struct StateCopy {
  CopyId id;
  Manifest whole;      ///< the run's progress, except metrics_checksum; no files, no tensors
  std::string config;  ///< text
  std::map<int64_t, CopiedPart> parts;  ///< by rank
  /// What the memory of the parts was allocated for; the next copy of the same allocates no new
  /// memory.
  std::shared_ptr<const void> made_for;
};

/// The copies that a rank has in memory, of its own state and of other ranks' state. It outlives
/// the ranks' rounds. There are at most two copies: while a copy is made, the previous one stays,
/// because only a copy that all ranks have made can be resumed from. For use on the rank's own
/// thread.
class StateCopies {
 public:
  /// Begins a new copy, in the memory of the older of the two: the newer must by then be complete
  /// on all ranks.
  StateCopy& begin(const CopyId& id);

  /// The whole parts that this rank has, the older copy first.
  std::vector<HeldCopy> held() const;
  /// nullptr if it does not exist.
  const StateCopy* find(const CopyId& id) const;

  /// Frees the memory of all others.
  void keep_only(const CopyId& id);
  void clear();
  /// Total of all parts.
  int64_t bytes() const;

 private:
  std::array<std::optional<StateCopy>, 2> copies_;
};

}  // namespace lockstep
