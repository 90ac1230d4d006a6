#pragma once

// Internal.

#include <atomic>
#include <cstdint>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/manifest.h"

/// How ranks tell rank 0, through files in the folder of a checkpoint that is being written, what
/// they have written of it. Errors also as throw_if_cancelled(stop). Needs no libtorch.
namespace lockstep {

/// Tells rank 0 that `part` is on disk. If `stop` is set, no report appears: the folder may be that
/// of the next save of this step by now.
void write_report(const PartialCheckpoint& checkpoint, int64_t rank, const Manifest& part,
                  const std::atomic<bool>* stop);

/// Waits for the report of that rank.
Manifest wait_for_report(const PartialCheckpoint& checkpoint, int64_t rank,
                         const std::atomic<bool>* stop);

void remove_report(const PartialCheckpoint& checkpoint, int64_t rank);

/// Waits until there is something at `path`.
void wait_for_path(const std::string& path, const std::atomic<bool>* stop);

}  // namespace lockstep
