#include "lockstep/training/run_setup.h"

#include <cstdlib>
#include <filesystem>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/cuda_libraries.h"
#include "lockstep/core/unusable_sizes.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/pipeline_plan.h"
#include "lockstep/planner/stage_shapes.h"

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

namespace {

void check_cuda_graph(const Config& config) {
  const CudaGraph graph = config.train.cuda_graph;
  if (graph == CudaGraph::none) return;
  const auto check = [&](bool allowed, std::string_view field, std::string_view what) {
    require<ConfigError>(allowed, "train.cuda_graph = {}: found {}, allowed: {}", to_string(graph),
                         field, what);
  };
  const bool step = graph == CudaGraph::step;
  check(config.parallel.pipeline_model_parallel_size == 1,
        "parallel.pipeline_model_parallel_size > 1", "1");
  check(!config.model.num_experts, "model.num_experts", "a dense model");
  check(step || !config.ddp.allow_unused_parameters, "ddp.allow_unused_parameters", "false");
  check(!config.ddp.check_for_nan_in_grad, "ddp.check_for_nan_in_grad", "false");
  check(!step || !config.ddp.check_for_large_grads, "ddp.check_for_large_grads", "false");
  check(!step || !scale_adapts_itself(config), "a dynamic loss scale",
        "bf16, fp32, fp64, or optimizer.loss_scale");
  // Each micro-batch has another list of attention blocks.
  check(!config.data.reset_attention_mask, "data.reset_attention_mask", "false");
  // With a mean, the number of tokens becomes part of the graph.
  const bool per_token =
      config.ddp.calculate_per_token_loss.value_or(!config.ddp.average_in_collective);
  check(!config.data.eod_mask_loss || per_token,
        "data.eod_mask_loss with ddp.calculate_per_token_loss = false",
        "ddp.calculate_per_token_loss = true");
  check(config.train.task != TrainTask::sft, "train.task = sft", "pretrain");
  check(!step || config.optimizer.optimizer != OptimizerKind::muon, "optimizer.optimizer = muon",
        "adam, sgd");
}

/// A loss scale that adapts finds its value by overflows, which such a check would end the run at.
void check_gradient_checks(const Config& config) {
  if (!scale_adapts_itself(config)) return;
  const auto check = [](const char* field, bool found) {
    require<ConfigError>(!found,
                         "{}: found true, allowed with train.precision = fp16: false, or a fixed "
                         "optimizer.loss_scale, because a dynamic loss scale makes gradients "
                         "overflow",
                         field);
  };
  check("ddp.check_for_nan_in_grad", config.ddp.check_for_nan_in_grad);
  check("ddp.check_for_large_grads", config.ddp.check_for_large_grads);
}

}  // namespace

namespace {

/// A stage without layers would have nothing to train.
void check_adapters(const Config& config) {
  if (!config.lora.rank) return;
  for (int64_t stage = 0; stage < config.parallel.pipeline_model_parallel_size; ++stage)
    for (const ModelChunk& chunk : chunks_of_stage(config, stage))
      require<ConfigError>(chunk.num_layers > 0,
                           "lora.rank: found pipeline stage {} without layers, allowed: layers on "
                           "every stage",
                           stage);
}

}  // namespace

void check_supported(const Config& config) {
  stage_layout(config);
  refuse_unusable_sizes([&] { (void)num_parameters(config), (void)local_widths(config); });
  check_adapters(config);
  check_tokenizer_name(config.data.tokenizer, "data.tokenizer");
  require<ConfigError>(
      config.data.tokenizer != "byte" || config.model.vocab_size >= ByteTokenizer::kBytes,
      "model.vocab_size: found {}, allowed with data.tokenizer = byte: >= {}",
      config.model.vocab_size, ByteTokenizer::kBytes);
  require<ConfigError>(config.train.task != TrainTask::sft || config.data.tokenizer != "byte" ||
                           config.model.vocab_size > ByteTokenizer::kBytes,
                       "model.vocab_size: found {}, allowed with train.task = sft and "
                       "data.tokenizer = byte: > {}, the end of a document",
                       config.model.vocab_size, ByteTokenizer::kBytes);
  check_cuda_graph(config);
  check_gradient_checks(config);
}

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
  if (config.train.device == DeviceChoice::cpu || config.parallel.pipeline_model_parallel_size == 1)
    return;
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
