#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/parallel_state/order_proof.h"

namespace lockstep {

struct JobProgram;
struct RankProgram;

/// Which tasks of a pipeline run when a job is planned.
enum class PlannedTasks {
  repeated,  ///< a few micro-batches, if the others repeat what these do: see RepeatedTasks
  all,       ///< all, which records the same in more time
};

/// The programs of the ranks of the job that `config` describes. The Trainer of `lockstep train`
/// itself runs, on tensors without data, as on a device with streams: it builds the model, takes
/// two training steps, each followed by the comparison of what the ranks have done, and validates
/// with one global batch, the one that a schedule of batch sizes ends with. Data are synthetic
/// sequences without documents, whatever the task. What the host reads is planned: losses, norms
/// and flags are 0, and all experts get the same number of tokens. Left out are CUDA graphs, which
/// communicate the same as the steps that they record, replays, and reading or writing checkpoints.
/// With train.device = auto operators and the sizes of allocations are those of a GPU, but the
/// padding of the vocabulary is that of the CPU and nothing is offloaded, as plan_memory() assumes.
/// What is offloaded to the host counts neither as memory nor as work of the device, nor do its
/// copies.
///
/// One rank of each class is run. Ranks of one pipeline stage do the same, with two exceptions.
/// With the distributed optimizer a rank finishes only the gradients of its shard, and Muon updates
/// only the shard's matrices, so the data-parallel position matters; if stages times data-parallel
/// positions are more than 128, the first position of each stage represents all. (What then differs
/// is the number and sizes of reductions over tensor-parallel groups, whose ranks have one
/// position.) And if several tensor-parallel ranks share a query group, the tensor-parallel
/// position matters. ConfigError as for Trainer.
///
/// With `kernels` the programs also contain the work that each rank gives its device in the steps;
/// see KernelObserver. The first position of each stage then represents all from 17 pairs of a
/// stage and a data-parallel position on, because recording kernels takes longer. But the work of
/// attention depends on the context-parallel position, unless cp_comm_type is a2a in all layers:
/// the tokens of the first position see the fewest others in a window, and a ring gives it half of
/// each later step. So each pair of a stage and a context-parallel position is recorded, if there
/// are up to 16, or with a window, where they differ most, up to 128.
JobProgram record_job(const Config& config, int64_t world_size, bool kernels = false,
                      PlannedTasks tasks = PlannedTasks::repeated);

/// The program of one rank; `kernels` as for record_job().
RankProgram record_rank(const Config& config, int64_t world_size, int64_t rank,
                        bool kernels = false);

/// prove_order() of record_job().
OrderVerdict verify_job(const Config& config, int64_t world_size);

}  // namespace lockstep
