#pragma once

// Internal.

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config.h"
#include "lockstep/parallel_state/parallel_state.h"

/// The common part of saves on disk and copies in memory.
namespace lockstep {

/// The tensors of a share are padded to multiples of this many bytes in host_memory().
inline constexpr int64_t kShareAlignment = 64;

/// The names under which shards hold these tensors.
std::vector<std::string> keys_of(const std::vector<StateTensor>& tensors);

/// Indices of the tensors that this rank saves: over all ranks each element is saved once, and the
/// work is spread evenly over the ranks that hold it. Collective over the world: one
/// all_gather_texts(). UsageError on all ranks, as CheckpointSaver::save().
std::vector<size_t> share_of_rank(const std::vector<StateTensor>& tensors,
                                  const ParallelState& state);

/// The manifest of the state after progress.iteration, without files and tensors.
Manifest manifest_of(const TrainingProgress& progress, const Config& config,
                     const ParallelState& state, const std::string& job_id);

/// Host memory, page-locked if `device` is not the CPU.
at::Tensor host_memory(int64_t bytes, c10::Device device);

}  // namespace lockstep
