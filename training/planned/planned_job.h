#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/parallel_state/order_proof.h"

namespace lockstep {

struct JobProgram;
struct RankProgram;

/// What the ranks of the job do that `config` describes: the Trainer of `lockstep train` runs
/// itself, on tensors without data, as on a device with streams: it builds the model, takes two
/// training steps, each followed by the comparison of what the ranks have done, and validates with
/// one global batch. Data are synthetic. What the host reads is planned: losses, norms and flags
/// are 0, and the experts get the same number of tokens each. CUDA graphs, which communicate what
/// the steps that they record do, and reading or writing checkpoints are left out.
///
/// One rank of each class is run: ranks of one pipeline stage do the same, but for two things. With
/// the distributed optimizer a rank finishes the gradients of its shard alone, and Muon updates the
/// matrices of it, so that the data-parallel position counts; where stages times data-parallel
/// positions are more than 128, the first position of each stage stands for all. (What differs then
/// are the number and sizes of reductions over tensor-parallel groups, whose ranks have one
/// position.) And where several tensor-parallel ranks share a query group, the tensor-parallel
/// position counts. ConfigError as Trainer.
///
/// With `kernels` the programs also have what each rank gives its device to do in the steps; see
/// KernelObserver. The first position of each stage then stands for all from 17 pairs of a stage
/// and a data-parallel position on: recording kernels takes longer.
JobProgram record_job(const Config& config, int64_t world_size, bool kernels = false);

/// What one rank does.
RankProgram record_rank(const Config& config, int64_t world_size, int64_t rank);

/// prove_order() of record_job().
OrderVerdict verify_job(const Config& config, int64_t world_size);

}  // namespace lockstep
