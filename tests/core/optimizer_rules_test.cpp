#include "lockstep/core/optimizer_rules.h"

#include <gtest/gtest.h>

#include <cctype>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

void parse(const std::vector<std::string>& overrides) { parse_config("", "empty", overrides); }

TEST(OptimizerRules, NameTheFieldsThatDoNotGoTogether) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"optimizer.optimizer=sgd", "optimizer.exp_avg_dtype=bf16"},
       "optimizer.exp_avg_dtype: found bf16, allowed with optimizer.optimizer = sgd: fp32"},
      {{"train.precision=fp64", "optimizer.exp_avg_sq_dtype=bf16"},
       "optimizer.exp_avg_sq_dtype: found bf16, allowed with train.precision = fp64"},
      {{"optimizer.min_loss_scale=8", "optimizer.initial_loss_scale=4"},
       "optimizer.min_loss_scale: found 8, allowed: <= optimizer.initial_loss_scale (4)"},
      {{"ddp.align_param_gather=true"}, "ddp.align_param_gather: found true"},
      {{"ddp.data_parallel_sharding_strategy=optim"},
       "ddp.data_parallel_sharding_strategy: found optim, and ddp.use_distributed_optimizer = "
       "false"},
      {{"ddp.data_parallel_sharding_strategy=optim_grads", "ddp.use_distributed_optimizer=true",
        "ddp.overlap_grad_reduce=false"},
       "found optim_grads, and ddp.overlap_grad_reduce = false"},
      {{"ddp.data_parallel_sharding_strategy=optim_grads_params",
        "ddp.use_distributed_optimizer=true", "ddp.num_buckets=3"},
       "found optim_grads_params, and ddp.num_buckets = 3"},
      {{"ddp.data_parallel_sharding_strategy=optim_grads_params",
        "ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
        "ddp.align_param_gather=true"},
       "found optim_grads_params, and ddp.align_param_gather = true"},
      {{"ddp.data_parallel_sharding_strategy=optim_grads", "ddp.use_distributed_optimizer=true",
        "optimizer.optimizer=muon"},
       "found optim_grads, and optimizer.optimizer = muon"},
      {{"ddp.data_parallel_sharding_strategy=optim_grads", "ddp.use_distributed_optimizer=true",
        "train.device=cuda", "train.cuda_graph=microbatch"},
       "found optim_grads, and train.cuda_graph = microbatch"},
      {{"ddp.reduce_scatter_with_fp32_accumulation=true"},
       "needs ddp.use_distributed_optimizer = true"},
      {{"ddp.reduce_scatter_with_fp32_accumulation=true", "ddp.use_distributed_optimizer=true",
        "parallel.num_distributed_optimizer_instances=2"},
       "parallel.num_distributed_optimizer_instances = 1 (found 2)"},
      {{"optimizer.decoupled_min_lr=1e-5"},
       "optimizer.decoupled_min_lr: found 1e-05, which needs optimizer.decoupled_lr"},
      {{"optimizer.decoupled_lr=1e-5", "optimizer.decoupled_min_lr=2e-5"},
       "optimizer.decoupled_min_lr: found 2e-05, allowed: <= optimizer.decoupled_lr (1e-05)"},
      {{"optimizer.decoupled_lr=1e-5", "optimizer.min_lr=2e-5"},
       "optimizer.decoupled_lr: found 1e-05, allowed without optimizer.decoupled_min_lr: >= "
       "optimizer.min_lr (2e-05)"},
      {{"optimizer.decoupled_lr=1e-5", "optimizer.lr_warmup_init=2e-5"},
       "optimizer.decoupled_lr: found 1e-05, allowed: >= optimizer.lr_warmup_init (2e-05)"},
  };
  for (const auto& [overrides, message] : cases)
    EXPECT_TRUE(throws_with<ConfigError>([&, o = overrides] { parse(o); }, message));
}

TEST(OptimizerRules, AcceptWhatGoesTogether) {
  const std::vector<std::string> allowed[] = {
      {"optimizer.optimizer=muon", "optimizer.exp_avg_dtype=bf16", "train.precision=bf16"},
      {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
       "ddp.align_param_gather=true", "ddp.reduce_scatter_with_fp32_accumulation=true"},
      {"ddp.use_distributed_optimizer=true", "ddp.data_parallel_sharding_strategy=optim_grads",
       "ddp.num_buckets=3"},
      {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
       "ddp.data_parallel_sharding_strategy=optim_grads_params", "ddp.bucket_size=1000"},
      {"ddp.use_distributed_optimizer=true", "model.num_experts=4",
       "ddp.data_parallel_sharding_strategy=optim_grads_params"},
      {"train.precision=fp16", "optimizer.loss_scale=1024", "optimizer.hysteresis=1"},
      {"optimizer.decoupled_lr=1e-5"},
      {"optimizer.min_lr=2e-5", "optimizer.decoupled_lr=1e-5", "optimizer.decoupled_min_lr=0"}};
  for (const auto& overrides : allowed) EXPECT_NO_THROW(parse(overrides)) << overrides.front();
}

/// What the schema allows is accepted, whether a number comes from text or from the struct.
TEST(OptimizerRules, BoundsOfTheStructAreThoseOfTheSchema) {
  using Ddp = DistributedDataParallelConfig;
  const std::pair<const char*, void (*)(Ddp&, double)> numbers[] = {
      {"ddp.bucket_size", [](Ddp& d, double n) { d.bucket_size = static_cast<int64_t>(n); }},
      {"ddp.num_buckets", [](Ddp& d, double n) { d.num_buckets = static_cast<int64_t>(n); }},
      {"ddp.large_grad_threshold", [](Ddp& d, double n) { d.large_grad_threshold = n; }}};
  std::vector<std::string> bounded, tried;
  for (const ConfigField& field : config_fields())
    if (field.path.starts_with("ddp.") && field.allowed.find_first_of("<>") != std::string::npos)
      bounded.push_back(field.path);
  for (const auto& [path, set] : numbers) {
    tried.emplace_back(path);
    for (const char* value : {"0", "-1", "1", "inf", "nan"}) {
      if (path != std::string("ddp.large_grad_threshold") && std::isalpha(value[0])) continue;
      std::string of_text, of_struct;
      try {
        parse({path + ("=" + std::string(value))});
      } catch (const ConfigError& error) {
        of_text = error.what();
      }
      try {
        Ddp ddp;
        set(ddp, std::stod(value));
        check_ddp(ddp);
      } catch (const ConfigError& error) {
        of_struct = error.what();
      }
      EXPECT_EQ(of_text.empty(), value == std::string("1")) << path << " = " << value;
      EXPECT_EQ(of_struct, of_text) << path << " = " << value;
    }
  }
  EXPECT_EQ(tried, bounded);
}

}  // namespace
}  // namespace lockstep
