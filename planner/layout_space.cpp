#include "lockstep/planner/layout_space.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/pipeline_plan.h"

namespace lockstep {
namespace {

constexpr int64_t kLargestMicroBatch = 16, kMostChunks = 8;

constexpr const char* kTensor = "parallel.tensor_model_parallel_size";
constexpr const char* kSequence = "parallel.sequence_parallel";
constexpr const char* kOverlap = "parallel.tp_comm_overlap";
constexpr const char* kContext = "parallel.context_parallel_size";
constexpr const char* kPipeline = "parallel.pipeline_model_parallel_size";
constexpr const char* kChunks = "parallel.virtual_pipeline_model_parallel_size";
constexpr const char* kExpert = "parallel.expert_model_parallel_size";
constexpr const char* kExpertTensor = "parallel.expert_tensor_parallel_size";
constexpr const char* kInstances = "parallel.num_distributed_optimizer_instances";
constexpr const char* kSchedule = "parallel.pipeline_schedule";
constexpr const char* kMicroBatch = "train.micro_batch_size";
constexpr const char* kRecompute = "model.recompute_granularity";
constexpr const char* kSharding = "ddp.data_parallel_sharding_strategy";
constexpr const char* kBucketSize = "ddp.bucket_size";

bool shards(const JobLayout& layout) { return layout.sharding != ShardingStrategy::no_shard; }

/// Whether use_distributed_optimizer states the sharding already.
bool names_sharding_otherwise(const JobLayout& layout, const DistributedDataParallelConfig& ddp) {
  return layout.sharding == ShardingStrategy::optim &&
         ddp.data_parallel_sharding_strategy == ShardingStrategy::no_shard;
}

JobLayout layout_of(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  JobLayout layout;
  layout.tensor = parallel.tensor_model_parallel_size;
  layout.context = parallel.context_parallel_size;
  layout.pipeline = parallel.pipeline_model_parallel_size;
  layout.chunks = parallel.virtual_pipeline_model_parallel_size.value_or(1);
  layout.expert = parallel.expert_model_parallel_size;
  layout.expert_tensor = parallel.expert_tensor_parallel_size.value_or(layout.tensor);
  layout.instances = parallel.num_distributed_optimizer_instances;
  layout.micro_batch_size = config.train.micro_batch_size;
  layout.recompute = config.model.recompute_granularity;
  layout.sharding = config.ddp.data_parallel_sharding_strategy;
  if (!shards(layout) && config.ddp.use_distributed_optimizer)
    layout.sharding = ShardingStrategy::optim;
  layout.schedule = parallel.pipeline_schedule;
  layout.bucket_size = config.ddp.bucket_size;
  return layout;
}

/// Whether the configuration is legal with full recomputation only.
bool recomputes_all(const TransformerConfig& model) {
  return model.offload_activations || model.distribute_saved_activations;
}

bool is_sequence_parallel(const JobLayout& layout, const TransformerConfig& model) {
  return layout.tensor > 1 && !model.distribute_saved_activations;
}

std::vector<int64_t> divisors(int64_t number, int64_t most) {
  std::vector<int64_t> all;
  for (int64_t n = 1; n <= number / n; ++n)
    for (const int64_t divisor : {n, number / n})
      if (number % n == 0 && divisor <= most) all.push_back(divisor);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

class Visitor {
 public:
  Visitor(const Config& config, const LayoutSpace& space,
          const std::function<void(const JobLayout&)>& visit)
      : config_(config), given_(layout_of(config)), space_(space), visit_(visit) {
    require<ConfigError>(space.world_size >= 1, "world-size: found {}, allowed: >= 1",
                         space.world_size);
    require<ConfigError>(!config.train.step_batch_size_schedule,
                         "train.step_batch_size_schedule: found '{}', allowed: unset, because all "
                         "layouts share one train.global_batch_size",
                         config.train.step_batch_size_schedule.value_or(""));
    require<ConfigError>(config.train.global_batch_size.has_value(),
                         "train.global_batch_size: is not set, allowed: the sequences of a step, "
                         "which all layouts share");
    for (const std::string& field : space.kept)
      require<ConfigError>(
          std::find(layout_fields().begin(), layout_fields().end(), field) != layout_fields().end(),
          "--keep: found '{}', allowed: {}", field, fmt::join(layout_fields(), ", "));
  }

  int64_t run() {
    const int64_t world = space_.world_size, heads = config_.model.num_attention_heads;
    JobLayout layout = given_;
    if (!is_kept(kSchedule)) layout.schedule = PipelineScheduleFamily::_1f1b;
    for (const int64_t tensor : choices(kTensor, given_.tensor, divisors(world, heads))) {
      layout.tensor = tensor;
      for (const int64_t context :
           choices(kContext, given_.context, divisors(world / tensor, world))) {
        layout.context = context;
        const int64_t rest = world / tensor / context;
        for (const int64_t pipeline :
             choices(kPipeline, given_.pipeline, divisors(rest, places()))) {
          layout.pipeline = pipeline;
          if (rest % pipeline == 0) visit_chunks(layout);
        }
      }
    }
    return looked_at_;
  }

 private:
  bool is_kept(const char* field) const {
    return std::find(space_.kept.begin(), space_.kept.end(), field) != space_.kept.end();
  }

  template <class T>
  std::vector<T> choices(const char* field, const T& given, std::vector<T> all) const {
    return is_kept(field) ? std::vector<T>{given} : std::move(all);
  }

  /// What the split over stages divides evenly.
  int64_t places() const {
    const ParallelConfig& parallel = config_.parallel;
    return config_.model.num_layers + (parallel.account_for_embedding_in_pipeline_split ? 1 : 0) +
           (parallel.account_for_loss_in_pipeline_split ? 1 : 0);
  }

  void visit_chunks(JobLayout layout) {
    const int64_t of_a_rank = std::max<int64_t>(1, places() / layout.pipeline);
    const std::vector<int64_t> several = divisors(of_a_rank, kMostChunks);
    for (const int64_t chunks :
         choices(kChunks, given_.chunks, layout.pipeline > 1 ? several : std::vector<int64_t>{1})) {
      layout.chunks = chunks;
      visit_experts(layout);
    }
  }

  void visit_experts(JobLayout layout) {
    const std::optional<int64_t>& experts = config_.model.num_experts;
    const int64_t ranks = space_.world_size / layout.pipeline;
    const auto of_experts = [&](int64_t most) {
      return experts ? divisors(ranks, most) : std::vector<int64_t>{1};
    };
    const std::vector<int64_t> tensors =
        experts ? divisors(layout.tensor, layout.tensor) : std::vector<int64_t>{layout.tensor};
    for (const int64_t expert : choices(kExpert, given_.expert, of_experts(experts.value_or(1))))
      for (const int64_t tensor : choices(kExpertTensor, given_.expert_tensor, tensors)) {
        layout.expert = expert;
        layout.expert_tensor = tensor;
        visit_batches(layout);
      }
  }

  void visit_batches(JobLayout layout) {
    layout.recompute =
        recomputes_all(config_.model) ? RecomputeGranularity::full : RecomputeGranularity::none;
    layout.instances = 1;
    layout.micro_batch_size = config_.train.micro_batch_size;
    ++looked_at_;
    std::optional<Config> config;
    // Some fields need a sharded optimizer.
    for (const ShardingStrategy strategy : choices(
             kSharding, given_.sharding, {ShardingStrategy::no_shard, ShardingStrategy::optim})) {
      layout.sharding = strategy;
      if (config = checked(layout); config) break;
    }
    if (!config) return;
    const RankGrids grids = config_grids(config->parallel, space_.world_size);
    std::vector<int64_t> sizes;
    for (int64_t size = 1; size <= kLargestMicroBatch; size *= 2) sizes.push_back(size);
    for (const int64_t size : choices(kMicroBatch, given_.micro_batch_size, sizes)) {
      layout.micro_batch_size = size;
      ++looked_at_;
      if (takes_batch(*config, size, grids.data_parallel_size())) visit_memory(layout, grids);
    }
  }

  /// The layout's configuration, if it is legal apart from its batch.
  std::optional<Config> checked(const JobLayout& layout) const {
    if (space_.world_size % (layout.expert * layout.expert_tensor * layout.pipeline) != 0)
      return std::nullopt;
    try {
      Config config = with_layout(config_, layout);
      validate(config);
      config_grids(config.parallel, space_.world_size);
      stage_layout(config);
      return config;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  /// Whether the choices that save memory, and several instances, are legal in `layout`, which is
  /// legal with others. That depends on whether there are ranks to share with, not on how many.
  bool allows_memory(const JobLayout& layout) {
    const auto [known, is_new] =
        allowed_.try_emplace({layout.recompute, layout.sharding, layout.tensor > 1,
                              layout.pipeline > 1, layout.instances > 1});
    if (is_new) known->second = checked(layout).has_value();
    return known->second;
  }

  bool takes_batch(Config config, int64_t micro_batch_size, int64_t data_parallel_size) const {
    config.train.micro_batch_size = micro_batch_size;
    try {
      for (const BatchSizes& sizes : BatchSchedule(config.train, data_parallel_size).all())
        schedule_options(config, sizes.num_microbatches).validate();
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  void visit_memory(JobLayout layout, const RankGrids& grids) {
    using Recompute = RecomputeGranularity;
    using Sharding = ShardingStrategy;
    std::vector<Sharding> sharding = {Sharding::no_shard};
    if (grids.size(GroupKind::dp_cp) == 1 && layout.sharding != Sharding::no_shard)
      sharding = {layout.sharding};
    if (grids.size(GroupKind::dp_cp) > 1)
      sharding.insert(sharding.end(),
                      {Sharding::optim, Sharding::optim_grads, Sharding::optim_grads_params});
    std::vector<Recompute> recomputes = {Recompute::full};
    if (!recomputes_all(config_.model))
      recomputes = {Recompute::none, Recompute::selective, Recompute::full};
    for (const Recompute recompute : choices(kRecompute, given_.recompute, recomputes))
      for (const Sharding strategy : choices(kSharding, given_.sharding, sharding)) {
        layout.recompute = recompute;
        layout.sharding = strategy;
        if (allows_memory(layout)) visit_instances(layout, grids);
      }
  }

  void visit_instances(JobLayout layout, const RankGrids& grids) {
    const int64_t replicas = grids.size(GroupKind::dp_cp);
    const int64_t common =
        config_.model.num_experts ? std::gcd(replicas, grids.size(GroupKind::expert_dp)) : replicas;
    const int64_t most = shards(layout) ? std::max<int64_t>(1, replicas - 1) : 1;
    const std::vector<int64_t> counts = divisors(common, most);
    for (const int64_t count : choices(kInstances, given_.instances, counts)) {
      layout.instances = count;
      ++looked_at_;
      const bool fits = count == 1 || (shards(layout) && common % count == 0);
      if (fits && allows_memory(layout)) visit_(layout);
    }
  }

  const Config& config_;
  const JobLayout given_;
  const LayoutSpace& space_;
  const std::function<void(const JobLayout&)>& visit_;
  std::map<std::tuple<RecomputeGranularity, ShardingStrategy, bool, bool, bool>, bool> allowed_;
  int64_t looked_at_ = 0;
};

}  // namespace

std::vector<std::string> overrides_of(const JobLayout& layout, const Config& config) {
  const JobLayout given = layout_of(config);
  std::vector<std::string> all;
  const auto set = [&](const char* field, auto value, bool needed) {
    if (needed) all.push_back(fmt::format("{}={}", field, value));
  };
  const auto differs = [&](const char* field, auto value, auto from) {
    set(field, value, value != from);
  };
  const ParallelConfig& parallel = config.parallel;
  const DistributedDataParallelConfig& ddp = config.ddp;
  differs(kTensor, layout.tensor, given.tensor);
  differs(kSequence, is_sequence_parallel(layout, config.model), parallel.sequence_parallel);
  differs(kOverlap, parallel.tp_comm_overlap && layout.tensor > 1, parallel.tp_comm_overlap);
  differs(kContext, layout.context, given.context);
  differs(kPipeline, layout.pipeline, given.pipeline);
  differs(kChunks, layout.chunks, given.chunks);
  differs(kExpert, layout.expert, given.expert);
  set(kExpertTensor, layout.expert_tensor,
      layout.expert_tensor != parallel.expert_tensor_parallel_size.value_or(layout.tensor));
  differs(kInstances, layout.instances, given.instances);
  set(kSchedule, to_string(layout.schedule), layout.schedule != given.schedule);
  differs(kMicroBatch, layout.micro_batch_size, given.micro_batch_size);
  set(kRecompute, to_string(layout.recompute), layout.recompute != given.recompute);
  differs("ddp.use_distributed_optimizer", shards(layout), ddp.use_distributed_optimizer);
  differs("ddp.overlap_grad_reduce", true, ddp.overlap_grad_reduce);
  differs("ddp.overlap_param_gather", shards(layout), ddp.overlap_param_gather);
  set(kSharding, to_string(layout.sharding),
      layout.sharding != ddp.data_parallel_sharding_strategy &&
          !names_sharding_otherwise(layout, ddp));
  set(kBucketSize, layout.bucket_size.value_or(0), layout.bucket_size != given.bucket_size);
  return all;
}

Config with_layout(Config config, const JobLayout& layout) {
  ParallelConfig& parallel = config.parallel;
  parallel.tensor_model_parallel_size = layout.tensor;
  parallel.sequence_parallel = is_sequence_parallel(layout, config.model);
  parallel.tp_comm_overlap = parallel.tp_comm_overlap && layout.tensor > 1;
  parallel.context_parallel_size = layout.context;
  parallel.pipeline_model_parallel_size = layout.pipeline;
  parallel.virtual_pipeline_model_parallel_size.reset();
  if (layout.chunks > 1)
    parallel.virtual_pipeline_model_parallel_size = layout.chunks;
  else
    parallel.microbatch_group_size_per_vp_stage.reset();
  parallel.expert_model_parallel_size = layout.expert;
  parallel.expert_tensor_parallel_size.reset();
  if (layout.expert_tensor != layout.tensor)
    parallel.expert_tensor_parallel_size = layout.expert_tensor;
  parallel.num_distributed_optimizer_instances = layout.instances;
  parallel.pipeline_schedule = layout.schedule;
  config.train.micro_batch_size = layout.micro_batch_size;
  if (config.model.recompute_granularity != layout.recompute)
    config.model.recompute_num_layers.reset();
  config.model.recompute_granularity = layout.recompute;
  config.ddp.use_distributed_optimizer = shards(layout);
  config.ddp.overlap_grad_reduce = true;
  config.ddp.overlap_param_gather = shards(layout);
  if (!names_sharding_otherwise(layout, config.ddp))
    config.ddp.data_parallel_sharding_strategy = layout.sharding;
  config.ddp.bucket_size = layout.bucket_size;
  return resolve(std::move(config));
}

const std::vector<std::string>& layout_fields() {
  static const std::vector<std::string> fields = {
      kTensor,    kContext,  kPipeline,   kChunks,    kExpert,   kExpertTensor,
      kInstances, kSchedule, kMicroBatch, kRecompute, kSharding, kBucketSize};
  return fields;
}

int64_t visit_layouts(const Config& config, const LayoutSpace& space,
                      const std::function<void(const JobLayout&)>& visit) {
  return Visitor(config, space, visit).run();
}

}  // namespace lockstep
