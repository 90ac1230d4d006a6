#pragma once

// Internal.

#include <cstdint>
#include <span>

#include "lockstep/datasets/sample_source.h"
#include "lockstep/training/training_model.h"

namespace lockstep {

/// The input of TrainingModel for the samples in `ids`, seq_length + 1 tokens each, with their
/// `marks`, one per sample: on the device of `state`, this rank's part over cp. Only the first
/// `counted` samples have labels; the others are padding for routers. UsageError as for
/// make_marked_batch().
BatchInput make_batch_input(std::span<const int64_t> ids, std::span<const SampleMarks> marks,
                            int64_t seq_length, int64_t counted, const ParallelState& state);

}  // namespace lockstep
