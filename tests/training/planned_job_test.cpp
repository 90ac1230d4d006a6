// The programs that record_job() records, against real runs of ranks as threads.

#include "lockstep/training/planned_job.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/training/planned_runs.h"

namespace lockstep {
namespace {

using namespace testing;
TEST(PlannedJob, DenseLayoutsCommunicateAsInARun) {
  expect_as_in_a_run(2, {});
  expect_as_in_a_run(3, {"train.global_batch_size=6"});
  expect_as_in_a_run(4, layout({kTensor}));
  expect_as_in_a_run(4, with(layout({kTensor, kSequence}), kSharded));
  expect_as_in_a_run(4, layout({kPipeline}));
  expect_as_in_a_run(2, layout({kPipeline, kVirtual}));
  expect_as_in_a_run(8, with(layout({kTensor, kSequence, kPipeline}), kSharded));
  expect_as_in_a_run(
      2, with(layout({kPipeline, kVirtual, "pipeline_model_parallel_layout=Et*2|t||tL"}),
              {"ddp.align_param_gather=true", "ddp.overlap_param_gather=true",
               "ddp.use_distributed_optimizer=true"}));
  expect_as_in_a_run(4, with(layout({"pipeline_model_parallel_size=4"}), {"model.num_layers=8"}));
  expect_as_in_a_run(4, layout({"pipeline_model_parallel_size=2", "pipeline_schedule=zb-h1"}));
  expect_as_in_a_run(4, layout({"tensor_model_parallel_size=4"}));
  expect_as_in_a_run(4, layout({kTensor, kOverlap}));
  expect_as_in_a_run(8, with(layout({kTensor, kSequence, kOverlap, kPipeline}), kSharded));
}

TEST(PlannedJob, OptionsCommunicateAsInARun) {
  expect_as_in_a_run(4, with(layout({kTensor}), {"model.num_query_groups=1"}));
  expect_as_in_a_run(8, with(layout({"tensor_model_parallel_size=4"}),
                             {"model.num_query_groups=2", "model.recompute_granularity=full"}));
  expect_as_in_a_run(2, {"train.precision=bf16", "ddp.use_distributed_optimizer=true"});
  expect_as_in_a_run(2, {"train.precision=fp16"});
  expect_as_in_a_run(2, {"train.precision=fp16", "ddp.grad_reduce_in_fp32=false"});
  expect_as_in_a_run(2, {"optimizer.log_num_zeros_in_grad=true"});
  expect_as_in_a_run(4, with(layout({kTensor}), {"optimizer.optimizer=muon"}));
  expect_as_in_a_run(4, with(layout({kTensor}),
                             {"optimizer.optimizer=muon", "ddp.use_distributed_optimizer=true"}));
  expect_as_in_a_run(8, with(layout({"num_distributed_optimizer_instances=2"}),
                             {"ddp.use_distributed_optimizer=true"}));
  expect_as_in_a_run(
      4, with(layout({kPipeline}),
              {"model.untie_embeddings_and_output_weights=true", "ddp.align_param_gather=true",
               "ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"}));
  for (const char* const precision : {"train.precision=fp32", "train.precision=bf16"})
    expect_as_in_a_run(2, {precision, "train.device=cuda", "optimizer.offload=true",
                           "model.offload_activations=true", "model.recompute_granularity=full",
                           "ddp.overlap_param_gather=true", "ddp.use_distributed_optimizer=true"});
  expect_as_in_a_run(2, {"train.log_grad_norm_per_group=true", "ddp.overlap_grad_reduce=false",
                         "ddp.average_in_collective=true"});
}

TEST(PlannedJob, ContextsAndExpertsCommunicateAsInARun) {
  expect_as_in_a_run(2, layout({kContext}));
  expect_as_in_a_run(4, layout({"context_parallel_size=4", "cp_comm_type=all_gather"}));
  expect_as_in_a_run(4, layout({"context_parallel_size=4", "cp_comm_type=a2a"}));
  expect_as_in_a_run(8, layout({"context_parallel_size=4", "cp_comm_type=a2a+p2p",
                                "hierarchical_context_parallel_sizes=2,2"}));
  expect_as_in_a_run(8, with(layout({kContext, kTensor, kSequence, kPipeline}), kSharded));
  expect_as_in_a_run(2, with(kExperts, layout({kExpert})));
  expect_as_in_a_run(4, with(kExperts, layout({kExpert, kPipeline})));
  expect_as_in_a_run(
      8, with(with(kExperts, kSharded), layout({kExpert, kTensor, kSequence, kContext})));
  expect_as_in_a_run(
      4, with(kExperts, layout({kExpert, kTensor, "expert_tensor_parallel_size=1", kSequence})));
  const Overrides shares = with(kExperts, {"ddp.use_distributed_optimizer=true",
                                           "ddp.data_parallel_sharding_strategy=optim_grads_params",
                                           "ddp.overlap_param_gather=true"});
  expect_as_in_a_run(4, with(shares, layout({kExpert})));
  expect_as_in_a_run(4, with(shares, layout({kExpert, kTensor, "expert_tensor_parallel_size=1"})));
  expect_as_in_a_run(4, with(with(kExperts, {"model.moe_token_dispatcher_type=allgather"}),
                             layout({kExpert, kContext})));
}

TEST(PlannedJob, SixteenRanksCommunicateAsInARun) {
  expect_as_in_a_run(16, with(with(kExperts, kSharded),
                              layout({kTensor, kSequence, kPipeline, kContext, kExpert})));
}

TEST(PlannedJob, ReplaysAreLeftOut) {
  const Config config =
      config_of({"train.device=cuda", "train.replay_interval=2", "train.deterministic=true"});
  EXPECT_TRUE(verify_job(config, 2).ok());
}

TEST(PlannedJob, AConfigurationThatDoesNotFitIsRefused) {
  EXPECT_THROW(verify_job(config_of(layout({kTensor})), 3), ConfigError);
}

}  // namespace
}  // namespace lockstep
