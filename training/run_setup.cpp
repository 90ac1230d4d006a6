#include "lockstep/training/run_setup.h"

#include <cstdlib>
#include <filesystem>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/cuda_libraries.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/core/unusable_sizes.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/pipeline_plan.h"

namespace lockstep {
namespace {

/// Blocks (CTAs) of a message between stages. The receiver occupies them until it has arrived.
constexpr int64_t kMessageCtas = 4;

std::map<GroupKind, GroupOptions> group_options(const ParallelConfig& parallel,
                                                c10::Device device) {
  auto options = parse_group_options(parallel.group_options);
  if (device.is_cpu() || parallel.pipeline_model_parallel_size == 1) return options;
  GroupOptions& stages = options[GroupKind::pp];
  if (!stages.min_ctas && !stages.max_ctas) stages.max_ctas = kMessageCtas;
  return options;
}

}  // namespace

void check_layout(const Config& config, int64_t world_size) {
  refuse_unusable_sizes([&] {
    const RankGrids grids = config_grids(config.parallel, world_size);
    if (config.ddp.use_distributed_optimizer) check_optimizer_instances(grids);
    const BatchSchedule batches(config.train, grids.data_parallel_size());
    const std::vector<BatchSizes> all = batches.all();
    for (const BatchSizes& batch : all) schedule_options(config, batch.num_microbatches);
  });
}

void prepare_cuda(const Config& config) {
  if (config.train.device == DeviceChoice::cpu) return;
  if (config.train.deterministic) ::setenv("NCCL_ALGO", "^NVLS", /*overwrite=*/0);
  if (config.parallel.pipeline_model_parallel_size > 1)
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
}

c10::Device choose_device(DeviceChoice choice, const LaunchEnvironment& environment,
                          std::optional<int64_t> given) {
  if (choice == DeviceChoice::cpu) return c10::kCPU;
  const int64_t visible = given ? *given : cuda_device_count();
  if (choice == DeviceChoice::auto_ && visible == 0) return c10::kCPU;
  const std::string absence = visible == 0 ? why_no_cuda() : "";
  const int local_ranks = std::max(environment.local_world_size, environment.local_rank + 1);
  require<ConfigError>(
      visible == 1 || visible >= local_ranks,
      "train.device = {}: found visible CUDA devices: {}{}, ranks of this host: {}; "
      "allowed: a device for each rank, exactly one visible to each rank "
      "(CUDA_VISIBLE_DEVICES), or train.device = cpu",
      choice == DeviceChoice::cuda ? "cuda" : "auto", visible,
      absence.empty() ? "" : fmt::format(" ({})", absence), local_ranks);
  const int64_t index = visible == 1 ? 0 : environment.local_rank;
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

std::optional<std::string> error_of_device(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  try {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    return std::nullopt;
  } catch (const std::exception& error) {
    return reason_of(error);
  }
}

std::string unused_gpus(DeviceChoice choice, c10::Device device, const std::string& folder) {
  if (choice != DeviceChoice::auto_ || !device.is_cpu()) return "";
  std::error_code error;  // there is no such folder without the driver
  const std::filesystem::directory_iterator entries(folder, error);
  const auto gpus = error ? 0 : std::distance(begin(entries), end(entries));
  if (gpus == 0) return "";
  const std::string absence = why_no_cuda();
  return fmt::format(
      "train.device = auto uses the CPU: the driver lists {} GPU{}, but this process sees no CUDA "
      "device ({})",
      gpus, gpus == 1 ? "" : "s", absence.empty() ? "CUDA_VISIBLE_DEVICES" : absence);
}

std::string stronger_router_losses(const Config& config) {
  const TransformerConfig& model = config.model;
  const char* const coefficient = model.moe_aux_loss_coeff > 0 ? "model.moe_aux_loss_coeff"
                                  : model.moe_z_loss_coeff > 0 ? "model.moe_z_loss_coeff"
                                                               : nullptr;
  const bool ignores_labels = config.train.task == TrainTask::sft || config.data.eod_mask_loss;
  if (!model.num_experts || coefficient == nullptr || !ignores_labels ||
      !divides_by_labels(config.ddp))
    return "";
  return fmt::format(
      "{}: router losses count all tokens and are divided by those with loss, as in Megatron Core, "
      "so fewer labels make them stronger; ddp.calculate_per_token_loss=false takes means over all "
      "tokens",
      coefficient);
}

at::ScalarType parameter_dtype(Precision precision) {
  switch (precision) {
    case Precision::fp32:
      return at::kFloat;
    case Precision::fp64:
      return at::kDouble;
    case Precision::bf16:
      return at::kBFloat16;
    case Precision::fp16:
      return at::kHalf;
  }
  fail<UsageError>("unknown precision {}", static_cast<int>(precision));
}

ParallelStateOptions parallel_options(const Config& given, c10::Device device) {
  const Config config = resolve_for_device(given, device.is_cpu());
  const ParallelConfig& parallel = config.parallel;
  ParallelStateOptions options;
  options.sizes = parallel_sizes(parallel);
  options.device = device;
  options.timeout =
      std::chrono::milliseconds(static_cast<int64_t>(*parallel.distributed_timeout_seconds * 1000));
  for (const ConfigValue& field : config_values(config))
    options.announcement.push_back({field.path, field.value});
  options.group_options = group_options(parallel, device);
  options.create_all_gather_groups = parallel.create_all_gather_groups;
  return options;
}

}  // namespace lockstep
