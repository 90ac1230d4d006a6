// Parameters, buffers and optimizer state: the plan against what a run allocates.

#include <gtest/gtest.h>

#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/parallel_state/pipeline_position.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/tests/planner/planned_models.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/training/training_model.h"

namespace lockstep {
namespace {

using testing::all_models;
using testing::kModels;
using testing::model_of;
using testing::run_ranks;
using testing::small;
using testing::text_of;
using testing::with;

/// Compares the properties that decide in which buffer a parameter lies, and how.
void expect_same_treatment(const ShapedParameter& planned, const NamedParameter& found) {
  const RankGrids grids({.world_size = 4, .pipeline = 2, .expert = 2});
  const auto shape = found.tensor.sizes().vec();
  const LayoutParam plan = layout_param(planned.description, planned.shape, planned.numel());
  const LayoutParam run = layout_param(found.description, shape, found.tensor.numel());
  EXPECT_EQ(planned.shape, shape) << found.name;
  EXPECT_EQ(plan.shared_embedding, run.shared_embedding) << found.name;
  for (const MatrixLayout matrices : {MatrixLayout::cut, MatrixLayout::whole})
    EXPECT_EQ(buffer_kind(planned.description, grids, matrices),
              buffer_kind(found.description, grids, matrices))
        << found.name;
  EXPECT_EQ(planned.description.is_expert, found.description.is_expert) << found.name;
}

TEST(MemoryPlan, ParametersAreThoseOfTheModel) {
  for (const auto& overrides : all_models()) {
    SCOPED_TRACE(text_of(overrides));
    const Config config = small(overrides);
    const auto planned = chunk_parameters(config, chunks_of_stage(config, 0).front());
    const auto model = model_of(config);
    const auto found = collect_parameters(*model);
    ASSERT_EQ(planned.size(), found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(planned[i].name, found[i].name);
      expect_same_treatment(planned[i], found[i]);
    }
  }
}

TEST(MemoryPlan, ParametersOfEachStageAreThoseOfItsChunks) {
  for (const char* untied : {"false", "true"}) {
    const Config config = small(
        {"parallel.pipeline_model_parallel_size=2", "model.num_layers=4", "model.num_experts=4",
         "parallel.virtual_pipeline_model_parallel_size=2", "model.add_bias_linear=true",
         std::string("model.untie_embeddings_and_output_weights=") + untied});
    run_ranks(2,
              [&](const ParallelState& state) {
                const TrainingModel model(config, state);
                const auto chunks = chunks_of_stage(config, state.rank());
                ASSERT_EQ(model.chunks().size(), chunks.size());
                for (size_t c = 0; c < chunks.size(); ++c) {
                  const auto planned = chunk_parameters(config, chunks[c]);
                  const auto found = collect_parameters(*model.chunks()[c]);
                  ASSERT_EQ(planned.size(), found.size());
                  for (size_t i = 0; i < found.size(); ++i)
                    expect_same_treatment(planned[i], found[i]);
                }
              },
              {.sizes = parallel_options(config, c10::kCPU).sizes});
  }
}

/// Compares the plan with what rank `state.rank()` has allocated.
void expect_buffers(const Config& config, const ParallelState& state) {
  const int64_t stage = PipelinePosition(state.grids(), state.rank()).stage();
  const StageMemory plan =
      plan_memory(config, state.world_size()).stages.at(static_cast<size_t>(stage));
  const TrainingModel model(config, state);
  const auto optimizer = make_optimizer(model.wrappers(), config.optimizer);
  int64_t parameters = 0, parameter_bytes = 0, gradient_bytes = 0;
  for (const DistributedDataParallel* ddp : model.wrappers())
    for (const auto& buffer : ddp->buffers()) {
      parameter_bytes += static_cast<int64_t>(buffer->param_data().nbytes());
      gradient_bytes += static_cast<int64_t>(buffer->grad_data().nbytes());
      for (const NamedParameter& param : buffer->params()) parameters += param.tensor.numel();
    }
  EXPECT_EQ(plan.parameters, parameters);
  EXPECT_EQ(plan.parameter_bytes, parameter_bytes);
  EXPECT_EQ(plan.gradient_bytes, gradient_bytes);
  EXPECT_EQ(plan.optimizer_bytes, optimizer->state_bytes());
}

TEST(MemoryPlan, BuffersAndOptimizerStateAreWhatARunAllocates) {
  const std::vector<std::vector<std::string>> settings = {
      {},
      {"optimizer.optimizer=sgd"},
      {"optimizer.optimizer=sgd", "optimizer.sgd_momentum=0", "train.precision=fp16"},
      {"optimizer.optimizer=muon"},
      {"optimizer.optimizer=muon", "ddp.bucket_size=9000", "train.precision=bf16"},
      {"optimizer.exp_avg_dtype=bf16", "train.precision=bf16"},
      {"ddp.bucket_size=5000"},
      {"ddp.num_buckets=3", "ddp.grad_reduce_in_fp32=false"},
      {"ddp.use_distributed_optimizer=true"},
      {"ddp.use_distributed_optimizer=true", "ddp.bucket_size=5000"},
      {"ddp.use_distributed_optimizer=true", "ddp.num_buckets=4",
       "ddp.pad_buckets_for_high_nccl_busbw=true"},
      {"ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=false"},
      {"ddp.use_distributed_optimizer=true", "optimizer.optimizer=muon", "ddp.bucket_size=9000"},
  };
  for (const int64_t ranks : {1, 2, 3})
    for (const auto& setting : settings) {
      run_ranks(ranks, [&](const ParallelState& state) {
        for (const size_t m : {0, 1, 2, 7, 10}) {
          std::vector<std::string> overrides = kModels[m];
          overrides.insert(overrides.end(), setting.begin(), setting.end());
          SCOPED_TRACE(text_of(overrides));
          expect_buffers(small(overrides), state);
        }
      });
    }
}

TEST(MemoryPlan, BuffersOfExpertsAreWhatARunAllocates) {
  const auto expect = [](int64_t ranks, const std::vector<std::string>& layout) {
    for (const auto& setting : std::vector<std::vector<std::string>>{
             {}, {"ddp.use_distributed_optimizer=true", "optimizer.optimizer=muon"}}) {
      const Config config =
          small(with(with({"model.num_experts=4", "model.add_bias_linear=true"}, layout), setting));
      run_ranks(ranks, [&](const ParallelState& state) { expect_buffers(config, state); },
                {.sizes = parallel_options(config, c10::kCPU).sizes});
    }
  };
  expect(1, {});
  expect(4, {"parallel.expert_model_parallel_size=2"});
  expect(4, {"parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=2",
             "parallel.expert_tensor_parallel_size=1"});
  expect(2,
         {"parallel.tensor_model_parallel_size=2", "model.moe_shared_expert_intermediate_size=20"});
}

TEST(MemoryPlan, BuffersOfPipelineStagesAreWhatARunAllocates) {
  // The padding of buckets shows how many there are.
  const std::vector<std::string> buckets = {"ddp.use_distributed_optimizer=true",
                                            "ddp.bucket_size=3000"};
  const auto expect = [&](int64_t ranks, const std::vector<std::string>& layout) {
    for (const auto& setting : std::vector<std::vector<std::string>>{
             {}, {"optimizer.optimizer=muon"}, {"train.precision=bf16"}}) {
      const Config config = small(with(with(with(buckets, layout), setting),
                                       {"parallel.pipeline_model_parallel_size=2",
                                        "model.num_layers=4", "train.global_batch_size=12"}));
      SCOPED_TRACE(text_of(with(layout, setting)));
      run_ranks(ranks, [&](const ParallelState& state) { expect_buffers(config, state); },
                {.sizes = parallel_options(config, c10::kCPU).sizes});
    }
  };
  expect(2, {});
  expect(4, {"model.untie_embeddings_and_output_weights=true"});
  expect(4, {"parallel.virtual_pipeline_model_parallel_size=2"});
  expect(8, {"parallel.num_distributed_optimizer_instances=2", "model.num_experts=4",
             "parallel.expert_model_parallel_size=2"});
}

}  // namespace
}  // namespace lockstep
