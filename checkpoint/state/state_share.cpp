#include "lockstep/checkpoint/state_share.h"

#include <sys/mman.h>

#include <set>
#include <string_view>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/save_plan.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr std::string_view kNotSaved = "not saved: ";

/// Why the tensors cannot be saved; empty if they can.
std::string refusal_of(const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) try {
      safetensors_dtype(tensor.values.scalar_type());
    } catch (const UsageError& error) {
      return fmt::format("tensor '{}': {}", tensor_key(tensor.name, tensor.state), error.what());
    }
  return "";
}

/// What all ranks hold. UsageError on all of them if one has a refusal.
std::vector<std::vector<HeldUnit>> gather_held(const std::vector<HeldUnit>& held,
                                               const std::string& refusal,
                                               const ParallelState& state) {
  const std::string mine =
      refusal.empty() ? format_held_units(held) : std::string(kNotSaved) + refusal;
  std::vector<std::vector<HeldUnit>> of_ranks;
  std::vector<int64_t> stages;
  const RankGroups pipelines = state.grids().groups(GroupKind::pp);
  for (const std::string& text : all_gather_texts(state.world(), mine, "checkpoint plan")) {
    const auto rank = static_cast<int64_t>(of_ranks.size());
    if (text.starts_with(kNotSaved))
      fail<UsageError>("rank {}: {}", rank, text.substr(kNotSaved.size()));
    of_ranks.push_back(parse_held_units(text));
    stages.push_back(pipelines.position_of(rank).value_or(0));
  }
  check_stages(of_ranks, stages);
  return of_ranks;
}

}  // namespace

std::vector<std::string> keys_of(const std::vector<StateTensor>& tensors) {
  std::vector<std::string> keys;
  for (const StateTensor& tensor : tensors)
    keys.push_back(shard_entry_name(tensor_key(tensor.name, tensor.state), tensor.part));
  return keys;
}

std::vector<size_t> share_of_rank(const std::vector<StateTensor>& tensors,
                                  const ParallelState& state) {
  std::vector<HeldUnit> held;
  const std::vector<std::string> keys = keys_of(tensors);
  for (size_t i = 0; i < tensors.size(); ++i)
    held.push_back(
        {keys[i], static_cast<int64_t>(tensors[i].values.nbytes()), tensors[i].on_one_stage});
  const auto of_ranks = gather_held(held, refusal_of(tensors), state);
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
  manifest.skipped_samples = progress.skipped_samples;
  manifest.optimizer_steps = progress.optimizer.num_steps;
  manifest.skipped_steps = progress.skipped_steps;
  manifest.metrics_checksum = progress.metrics_checksum;
  manifest.spikes = progress.spikes;
  manifest.job_id = job_id;
  const auto& scaler = progress.optimizer.scaler;
  if (scaler && scale_adapts_itself(config))
    manifest.scaler =
        ManifestScaler{scaler->scale, scaler->growth_tracker, scaler->hysteresis_tracker};
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
