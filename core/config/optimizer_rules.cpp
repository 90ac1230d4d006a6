#include "lockstep/core/optimizer_rules.h"

#include "lockstep/core/check.h"
#include "lockstep/core/config_bounds.h"

namespace lockstep {
namespace {

void check_moment(const Config& config, const char* field, StateDtype dtype) {
  if (dtype == StateDtype::fp32) return;
  require<ConfigError>(config.optimizer.optimizer != OptimizerKind::sgd,
                       "optimizer.{}: found {}, allowed with optimizer.optimizer = sgd: fp32",
                       field, to_string(dtype));
  require<ConfigError>(config.train.precision != Precision::fp64,
                       "optimizer.{}: found {}, allowed with train.precision = fp64: fp32, which "
                       "then stands for fp64",
                       field, to_string(dtype));
}

void check_decoupled_rates(const OptimizerConfig& optimizer) {
  const auto &highest = optimizer.decoupled_lr, &lowest = optimizer.decoupled_min_lr;
  require<ConfigError>(highest || !lowest,
                       "optimizer.decoupled_min_lr: found {}, which needs "
                       "optimizer.decoupled_lr",
                       lowest.value_or(0));
  if (!highest) return;
  require<ConfigError>(!lowest || *lowest <= *highest,
                       "optimizer.decoupled_min_lr: found {}, allowed: <= optimizer.decoupled_lr "
                       "({})",
                       lowest.value_or(0), *highest);
  require<ConfigError>(lowest || optimizer.min_lr <= *highest,
                       "optimizer.decoupled_lr: found {}, allowed without "
                       "optimizer.decoupled_min_lr: >= optimizer.min_lr ({})",
                       *highest, optimizer.min_lr);
  require<ConfigError>(optimizer.lr_warmup_init <= *highest,
                       "optimizer.decoupled_lr: found {}, allowed: >= optimizer.lr_warmup_init "
                       "({})",
                       *highest, optimizer.lr_warmup_init);
}

void check_offload(const Config& config) {
  if (!config.optimizer.offload) return;
  require<ConfigError>(config.optimizer.optimizer != OptimizerKind::muon,
                       "optimizer.offload: found true, and optimizer.optimizer = muon; allowed: "
                       "false, or adam or sgd");
  require<ConfigError>(config.train.cuda_graph != CudaGraph::step,
                       "optimizer.offload: found true, and train.cuda_graph = step; allowed: "
                       "false, or cuda_graph = none or microbatch, because the host updates");
}

void check_sharding_strategy(const DistributedDataParallelConfig& ddp) {
  const ShardingStrategy strategy = ddp.data_parallel_sharding_strategy;
  if (strategy == ShardingStrategy::no_shard) return;
  constexpr const char* kField = "ddp.data_parallel_sharding_strategy";
  require<ConfigError>(
      ddp.use_distributed_optimizer,
      "{}: found {}, and ddp.use_distributed_optimizer = false; allowed: no_shard, "
      "or use_distributed_optimizer = true",
      kField, to_string(strategy));
  if (strategy == ShardingStrategy::optim) return;
  require<ConfigError>(ddp.overlap_grad_reduce,
                       "{}: found {}, and ddp.overlap_grad_reduce = false; allowed: no_shard, "
                       "optim, or overlap_grad_reduce = true",
                       kField, to_string(strategy));
  if (strategy == ShardingStrategy::optim_grads) return;
  require<ConfigError>(!ddp.num_buckets,
                       "{}: found {}, and ddp.num_buckets = {}; allowed: buckets that follow from "
                       "the model's units, or ddp.bucket_size",
                       kField, to_string(strategy), ddp.num_buckets.value_or(0));
  require<ConfigError>(!ddp.align_param_gather,
                       "{}: found {}, and ddp.align_param_gather = true; allowed: false, because "
                       "each unit is gathered where it is used",
                       kField, to_string(strategy));
}

}  // namespace

void check_ddp(const DistributedDataParallelConfig& ddp) {
  check_bounds(ddp);
  require<ConfigError>(!(ddp.bucket_size && ddp.num_buckets),
                       "ddp.bucket_size ({}) and ddp.num_buckets ({}): allowed: one of the two",
                       ddp.bucket_size.value_or(0), ddp.num_buckets.value_or(0));
  require<ConfigError>(!(ddp.calculate_per_token_loss.value_or(false) && ddp.average_in_collective),
                       "ddp.average_in_collective: found true, which needs "
                       "ddp.calculate_per_token_loss = false, because per-token scaling sums");
  const auto needs_distributed_optimizer = [&](const char* field, bool found) {
    require<ConfigError>(!found || ddp.use_distributed_optimizer,
                         "{}: found true, which needs ddp.use_distributed_optimizer = true", field);
  };
  needs_distributed_optimizer("ddp.overlap_param_gather", ddp.overlap_param_gather);
  needs_distributed_optimizer("ddp.pad_buckets_for_high_nccl_busbw",
                              ddp.pad_buckets_for_high_nccl_busbw);
  check_sharding_strategy(ddp);
  require<ConfigError>(!ddp.align_param_gather || ddp.overlap_param_gather,
                       "ddp.align_param_gather: found true, which needs "
                       "ddp.overlap_param_gather = true");
  require<ConfigError>(
      !ddp.reduce_scatter_with_fp32_accumulation ||
          (ddp.use_distributed_optimizer && !ddp.average_in_collective),
      "ddp.reduce_scatter_with_fp32_accumulation: found true, which needs "
      "ddp.use_distributed_optimizer = true and ddp.average_in_collective = false");
}

void check_optimizer(const Config& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  check_moment(config, "exp_avg_dtype", optimizer.exp_avg_dtype);
  check_moment(config, "exp_avg_sq_dtype", optimizer.exp_avg_sq_dtype);
  require<ConfigError>(optimizer.min_loss_scale <= optimizer.initial_loss_scale,
                       "optimizer.min_loss_scale: found {}, allowed: <= "
                       "optimizer.initial_loss_scale ({})",
                       optimizer.min_loss_scale, optimizer.initial_loss_scale);
  check_decoupled_rates(optimizer);
  check_offload(config);
  require<ConfigError>(!config.ddp.reduce_scatter_with_fp32_accumulation ||
                           config.parallel.num_distributed_optimizer_instances == 1,
                       "ddp.reduce_scatter_with_fp32_accumulation: found true, which needs "
                       "parallel.num_distributed_optimizer_instances = 1 (found {})",
                       config.parallel.num_distributed_optimizer_instances);
  const ShardingStrategy strategy = config.ddp.data_parallel_sharding_strategy;
  if (strategy != ShardingStrategy::optim_grads && strategy != ShardingStrategy::optim_grads_params)
    return;
  require<ConfigError>(optimizer.optimizer != OptimizerKind::muon,
                       "ddp.data_parallel_sharding_strategy: found {}, and optimizer.optimizer = "
                       "muon, which needs whole matrices; allowed: no_shard, optim",
                       to_string(strategy));
  require<ConfigError>(config.train.cuda_graph == CudaGraph::none,
                       "ddp.data_parallel_sharding_strategy: found {}, and train.cuda_graph = {}; "
                       "allowed: no_shard, optim, or cuda_graph = none, because sharding allocates "
                       "and frees memory in each step",
                       to_string(strategy), to_string(config.train.cuda_graph));
}

bool scale_adapts_itself(const Config& config) {
  return config.train.precision == Precision::fp16 && !config.optimizer.loss_scale;
}

bool divides_by_labels(const DistributedDataParallelConfig& ddp) {
  return ddp.calculate_per_token_loss.value_or(!ddp.average_in_collective);
}

}  // namespace lockstep
