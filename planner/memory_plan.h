#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/optimizer/update_statement.h"

/// The memory of a job, computed from its configuration without running any of its processes.
namespace lockstep {

struct JobProgram;

/// The memory of one rank of a pipeline stage. All ranks of a stage hold the same amount, except a
/// rank whose part of a parameter is smaller because tp does not divide it.
struct StageMemory {
  int64_t stage = 0;
  /// Elements that the rank holds, including rows that pad the vocabulary but not the padding of
  /// buffers.
  int64_t parameters = 0;
  /// Bytes of the parameter and gradient buffers, including padding. Frozen parameters have no
  /// gradient and are in no buffer. If ddp.data_parallel_sharding_strategy shards the others, these
  /// are the bytes of the shards and of what is whole at the same time in a training step: a unit
  /// of parameters and the next one; for gradients the bucket that is being filled and the one that
  /// is being reduced, or all buckets with several micro-batches.
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  /// Bytes of moments and master weights; with ddp.use_distributed_optimizer those of one shard.
  /// With optimizer.offload and train.device = cuda they are part of host_bytes.
  int64_t optimizer_bytes = 0;
  /// Bytes that autograd keeps of the micro-batches in flight, bytes that backward needs in
  /// addition, and bytes of rotary tables; see activation_plan.h. Micro-batches in flight: under
  /// 1F1B min(micro-batches, stages - stage) (with V > 1 chunks per rank, one piece of one chunk
  /// more than the schedule's warm-up, see num_warmup_microbatches(), of which one at a time has
  /// logits, or several if the last group of micro-batches is smaller than the others); under GPipe
  /// all micro-batches; under ZB-H1 min(micro-batches, stages), as if a micro-batch kept everything
  /// until its weight gradients are computed, and stage + 1 of these what their weight gradients
  /// need, if that is more.
  int64_t activation_bytes = 0;
  /// Bytes of buffers that communication needs besides what it sends: an activation and a gradient
  /// from the neighbouring stages (with V > 1 the first and the last one are neighbours) and,
  /// unless train.device = cuda, room for the terms of the other ranks in two gradient reductions
  /// (one if there is only one bucket). Gradients and parameters themselves are sent in place. With
  /// ddp.reduce_scatter_with_fp32_accumulation and gradients of 2 bytes, instead and on any device,
  /// room for the terms of all buckets (of two, if gradients are sharded), and for the fp32 sum of
  /// the largest shard.
  int64_t communication_bytes = 0;
  /// With train.device = cuda: bytes of host memory, besides those of the device. With
  /// optimizer.offload, the state of the optimizer, and a gradient and a parameter for each of its
  /// elements; with model.offload_activations, what layers keep. Does not include what CUDA's
  /// allocator of page-locked memory adds by rounding up to powers of two.
  int64_t host_bytes = 0;
  /// recorded_peaks() of the stage, if the job was recorded.
  std::optional<int64_t> recorded_peak_bytes = {};

  /// The bytes of the device: without host_bytes and recorded_peak_bytes.
  int64_t total_bytes() const;
};

struct MemoryPlan {
  int64_t world_size = 0;
  std::vector<StageMemory> stages;
};

/// `config` is resolved. `world_size` unset: the fewest ranks, which is pp times the least common
/// multiple of tp * cp and expert-tp * ep. `rule`, unless null, is the statement of an update rule
/// that replaces optimizer.optimizer; see Optimizer. ConfigError naming the field: sizes that do
/// not divide. UsageError: bytes that do not fit into 64 bits.
MemoryPlan plan_memory(const Config& config, std::optional<int64_t> world_size = {},
                       const UpdateStatement* rule = nullptr);

/// Whether every stage of plan_memory() takes at most `bytes` of the device. Stops at the first one
/// that takes more. Throws as plan_memory().
bool fits_memory(const Config& config, int64_t world_size, double bytes);

/// For each pipeline stage, the most bytes that the tensors of one of its ranks take at any time in
/// what record_job() runs: building the model, two steps, a validation. Rounded up as CUDA's
/// allocator does, unless train.device = cpu. All experts get the same number of tokens.
std::vector<int64_t> recorded_peaks(const JobProgram& job);

/// One JSON document, with a newline: "world_size" and "stages", a list of objects with the names
/// of StageMemory and "total_bytes"; "host_bytes" only if a stage has some, and
/// "recorded_peak_bytes" only if the job was recorded.
void write_json(std::ostream& out, const MemoryPlan& plan);

/// The same for people: a row for each stage, in MiB.
void write_text(std::ostream& out, const MemoryPlan& plan);

}  // namespace lockstep
