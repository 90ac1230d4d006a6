#pragma once

// Internal.

#include <string>

#include "lockstep/checkpoint/copy_holders.h"

namespace lockstep {

/// The file `rewound` in a folder of checkpoints: a run that goes back to one of these writes it,
/// so that ranks that take no part then do not bring back a copy in memory of what the run has
/// abandoned. One line: the round and the number of the job's first copy that counts, and the job.
/// It is of no use once the job has ended; the next job that goes back replaces it.

/// Returns once the file is on disk. FileError.
void record_rewind(const std::string& folder, const std::string& job_id, const CopyId& first);

/// The first copy of that job that counts; {0, 0}, so that all do, if it has not gone back.
/// FileError if the file cannot be read, or is damaged.
CopyId first_copy_that_counts(const std::string& folder, const std::string& job_id);

}  // namespace lockstep
