#pragma once

// Internal.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/parallel_state/parallel_state.h"

/// Checkpoints that all ranks read, while a run may save there and remove others. Each rank that
/// looks for the newest by itself may find another one.
namespace lockstep {

/// What `find` returns on rank 0, the only rank that calls it; all ranks throw a FileError that it
/// throws. Collective over the world: one all_gather_texts().
std::string as_rank_0_finds(const ParallelState& state, const std::function<std::string()>& find,
                            std::string_view label);

/// The checkpoint at one path, on all ranks. Its calls are collective over the world.
class SharedCheckpoint {
 public:
  /// Only names it. `path`: the same on all ranks.
  SharedCheckpoint(std::string path, const ParallelState& state);

  /// Opens the checkpoint, at the first call, and calls `use`, whose collectives must come before
  /// anything that throws FileError. Returns whether all ranks could, and have opened the same
  /// save: the checkpoint may belong to a run that has meanwhile removed it or saved that step
  /// again. FileError on all ranks: `use` threw it on one of them although the checkpoint is as it
  /// was; or they see different checkpoints that do not change.
  bool read(const std::function<void(CheckpointReader&)>& use);

  /// After a read() that returned true.
  CheckpointReader& reader() { return *reader_; }

 private:
  /// Whether it is no longer there, or not as it was opened.
  bool is_gone() const;
  void check_same_for_all(const std::vector<std::string>& seen) const;

  std::string path_;
  ParallelState state_;
  std::optional<CheckpointReader> reader_;
};

}  // namespace lockstep
