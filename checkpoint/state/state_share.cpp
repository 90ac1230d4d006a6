#include "lockstep/checkpoint/state_share.h"

#include <sys/mman.h>

#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/save_plan.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

std::vector<size_t> share_of_rank(const std::vector<StateTensor>& tensors,
                                  const ParallelState& state) {
  std::vector<HeldUnit> held;
  for (const StateTensor& tensor : tensors)
    held.push_back({shard_entry_name(tensor_key(tensor.name, tensor.state), tensor.part),
                    static_cast<int64_t>(tensor.values.nbytes())});
  std::vector<std::vector<HeldUnit>> of_ranks;
  for (const std::string& text :
       all_gather_texts(state.world(), format_held_units(held), "checkpoint plan"))
    of_ranks.push_back(parse_held_units(text));
  const auto units = without_overlaps(merge_units(of_ranks));
  const auto writers = assign_writers(units, state.world_size());
  std::set<std::string> mine;
  for (size_t i = 0; i < units.size(); ++i)
    if (writers[i] == state.rank()) mine.insert(units[i].key);
  std::vector<size_t> share;
  for (size_t i = 0; i < held.size(); ++i)
    if (mine.erase(held[i].key) > 0) share.push_back(i);
  return share;
}

Manifest manifest_of(const TrainingProgress& progress, const Config& config,
                     const ParallelState& state, const std::string& job_id) {
  Manifest manifest;
  manifest.iteration = progress.iteration;
  manifest.consumed_samples = progress.consumed_samples;
  manifest.optimizer_steps = progress.optimizer.num_steps;
  manifest.skipped_steps = progress.skipped_steps;
  manifest.metrics_checksum = progress.metrics_checksum;
  manifest.spikes = progress.spikes;
  manifest.job_id = job_id;
  const GradScalerState& scaler = progress.optimizer.scaler;
  if (scale_adapts_itself(config))
    manifest.scaler =
        ManifestScaler{scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker};
  manifest.layout = {state.grids().sizes(), config.ddp.use_distributed_optimizer};
  return manifest;
}

/// Uses huge pages: to fault in pages of 4096 bytes takes longer than the copy.
at::Tensor host_memory(int64_t bytes, c10::Device device) {
  constexpr int64_t kHugePage = int64_t{2} << 20;  // bytes
  const at::Tensor memory =
      at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(!device.is_cpu()));
  if (!device.is_cpu()) return memory;
  const auto begin = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const auto first = static_cast<uintptr_t>(round_up(static_cast<int64_t>(begin), kHugePage));
  if (begin + static_cast<uintptr_t>(bytes) > first + kHugePage)
    ::madvise(reinterpret_cast<void*>(first), begin + static_cast<uintptr_t>(bytes) - first,
              MADV_HUGEPAGE);
  return memory;
}

}  // namespace lockstep
