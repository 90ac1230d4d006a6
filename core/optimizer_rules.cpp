#include "lockstep/core/optimizer_rules.h"

#include "lockstep/core/check.h"

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
                       "optimizer.decoupled_min_lr: found {}, allowed with: "
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

void check_gradient_path(const Config& config) {
  const DistributedDataParallelConfig& ddp = config.ddp;
  require<ConfigError>(!ddp.align_param_gather || ddp.overlap_param_gather,
                       "ddp.align_param_gather: found true, allowed with: "
                       "ddp.overlap_param_gather = true");
  if (!ddp.reduce_scatter_with_fp32_accumulation) return;
  require<ConfigError>(
      ddp.use_distributed_optimizer && !ddp.average_in_collective,
      "ddp.reduce_scatter_with_fp32_accumulation: found true, allowed with: "
      "ddp.use_distributed_optimizer = true and ddp.average_in_collective = false");
  require<ConfigError>(config.parallel.num_distributed_optimizer_instances == 1,
                       "ddp.reduce_scatter_with_fp32_accumulation: found true, allowed with: "
                       "parallel.num_distributed_optimizer_instances = 1 (found {})",
                       config.parallel.num_distributed_optimizer_instances);
}

}  // namespace

void check_optimizer(const Config& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  check_moment(config, "exp_avg_dtype", optimizer.exp_avg_dtype);
  check_moment(config, "exp_avg_sq_dtype", optimizer.exp_avg_sq_dtype);
  require<ConfigError>(optimizer.min_loss_scale <= optimizer.initial_loss_scale,
                       "optimizer.min_loss_scale: found {}, allowed: <= "
                       "optimizer.initial_loss_scale ({})",
                       optimizer.min_loss_scale, optimizer.initial_loss_scale);
  check_decoupled_rates(optimizer);
  check_gradient_path(config);
}

}  // namespace lockstep
