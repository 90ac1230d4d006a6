#include "lockstep/training/run_setup.h"

#include <unistd.h>

#include <array>
#include <fstream>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/devices.h"
#include "lockstep/training/data/tokenizer.h"
#include "lockstep/training/pipeline_plan.h"

namespace lockstep {
namespace {

ParallelSizes parallel_sizes(const ParallelConfig& parallel) {
  return {.tensor = parallel.tensor_model_parallel_size,
          .pipeline = parallel.pipeline_model_parallel_size,
          .virtual_pipeline = parallel.virtual_pipeline_model_parallel_size,
          .context = parallel.context_parallel_size,
          .expert = parallel.expert_model_parallel_size,
          .expert_tensor = parallel.expert_tensor_parallel_size,
          .order = parallel.order,
          .optimizer_instances = parallel.num_distributed_optimizer_instances,
          .hierarchical_context = context_parallel_levels(parallel)};
}

/// A size of `parallel`, with its field's name.
struct NamedSize {
  const char* field;
  int64_t size;
};

void require_divides(int64_t world_size, const std::array<NamedSize, 3>& sizes) {
  int64_t product = 1;
  std::vector<std::string> factors;
  for (const NamedSize& one : sizes) {
    product = checked_mul(product, one.size, one.field);
    factors.push_back(fmt::format("parallel.{} ({})", one.field, one.size));
  }
  require<ConfigError>(world_size % product == 0,
                       "{} = {}, allowed: a divisor of the number of ranks ({})",
                       fmt::join(factors, " x "), product, world_size);
}

void require_grids_fit(const ParallelConfig& parallel, int64_t world_size) {
  const int64_t tensor = parallel.tensor_model_parallel_size;
  const NamedSize pipeline = {"pipeline_model_parallel_size",
                              parallel.pipeline_model_parallel_size};
  require_divides(world_size, {{{"tensor_model_parallel_size", tensor},
                                pipeline,
                                {"context_parallel_size", parallel.context_parallel_size}}});
  require_divides(
      world_size,
      {{{"expert_tensor_parallel_size", parallel.expert_tensor_parallel_size.value_or(tensor)},
        pipeline,
        {"expert_model_parallel_size", parallel.expert_model_parallel_size}}});
}

RankGrids grids_of(const ParallelSizes& sizes) {
  try {
    return RankGrids(sizes);
  } catch (const ConfigError& error) {
    fail<ConfigError>("parallel.order = {}, parallel.num_distributed_optimizer_instances = {}: {}",
                      sizes.order, sizes.optimizer_instances, error.what());
  }
}

}  // namespace

void check_supported(const Config& config) {
  stage_layout(config);
  check_tokenizer_name(config.data.tokenizer, "data.tokenizer");
  require<ConfigError>(
      config.data.tokenizer != "byte" || config.model.vocab_size >= ByteTokenizer::kBytes,
      "model.vocab_size: found {}, allowed with data.tokenizer = byte: >= {}",
      config.model.vocab_size, ByteTokenizer::kBytes);
}

void check_layout(const Config& config, int64_t world_size) {
  require_grids_fit(config.parallel, world_size);
  ParallelSizes sizes = parallel_sizes(config.parallel);
  sizes.world_size = world_size;
  const BatchSchedule batches(config.train, grids_of(sizes).data_parallel_size());
  for (const BatchSizes& batch : batches.all()) schedule_options(config, batch.num_microbatches);
}

c10::Device choose_device(DeviceChoice choice, const LaunchEnvironment& environment) {
  const int devices = cuda_device_count();
  const bool enough = devices >= environment.local_world_size;
  require<ConfigError>(choice != DeviceChoice::cuda || enough,
                       "train.device: found cuda, but {} ranks of this host have {} CUDA devices; "
                       "allowed: one device for each rank, or train.device = cpu",
                       environment.local_world_size, devices);
  if (choice == DeviceChoice::cpu || devices == 0 || !enough) return c10::kCPU;
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
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

ParallelStateOptions parallel_options(const Config& config, c10::Device device) {
  const ParallelConfig& parallel = config.parallel;
  ParallelStateOptions options;
  options.sizes = parallel_sizes(parallel);
  options.device = device;
  options.timeout =
      std::chrono::milliseconds(static_cast<int64_t>(parallel.distributed_timeout_seconds * 1000));
  for (const ConfigValue& field : config_values(config))
    options.announcement.push_back({field.path, field.value});
  options.group_options = parse_group_options(parallel.group_options);
  options.create_all_gather_groups = parallel.create_all_gather_groups;
  return options;
}

int64_t memory_bytes(c10::Device device) {
  if (device.is_cuda()) {
    const auto stats = at::getDeviceAllocator(c10::kCUDA)->getDeviceStats(device.index());
    return stats.reserved_bytes[0].current;
  }
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace lockstep
