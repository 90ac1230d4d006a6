// What record_job() writes down against real runs of ranks as threads.

#include "lockstep/training/planned_job.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <random>
#include <set>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using namespace testing;
using Kind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;

/// A call as text: of equal calls equal.
std::string text_of(const RankList& ranks, const std::string& operation, const std::string& label,
                    const std::string& dtype, int64_t numel) {
  return fmt::format("{} of {}, {} x {} over {}", operation, label, numel, dtype, ranks);
}

/// What `rank` calls, without comparisons, an exchange as a message to and one from.
std::vector<std::string> planned_calls(const JobProgram& job, const JobGroups& groups,
                                       int64_t rank) {
  std::vector<std::string> texts;
  const RankProgram& program = job.programs[job.program_of[static_cast<size_t>(rank)]];
  for (const ProgramEvent& event : program.events) {
    if (event.kind != Kind::start) continue;
    const ProgramCall& call = program.calls[event.value];
    const RankList& ranks = groups.ranks_of(rank, call.group);
    const auto add = [&](const CollectiveOperation& operation) {
      texts.push_back(text_of(ranks, to_string(operation), call.label, call.dtype, call.numel));
    };
    if (call.operation.kind == OperationKind::comparison) continue;
    if (call.operation.kind != OperationKind::exchange) {
      add(call.operation);
      continue;
    }
    const auto size = static_cast<int64_t>(ranks.size());
    const int64_t own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    const int64_t shift = own - program.groups[call.group].position + size;
    add({.kind = OperationKind::send, .position = (call.operation.position + shift) % size});
    add({.kind = OperationKind::receive, .position = (call.operation.source + shift) % size});
  }
  return texts;
}

std::vector<std::string> real_calls(const CollectiveLog& log, int64_t rank) {
  std::vector<std::string> texts;
  for (const CollectiveRecord& call : log.of_rank(rank))
    texts.push_back(
        text_of(call.ranks, call.operation, call.label, call.dtype,
                call.kind == CollectiveRecord::Kind::uneven_collective ? -1 : call.numel));
  return texts;
}

void expect_as_in_a_run(int64_t world, const Overrides& overrides) {
  SCOPED_TRACE(fmt::format("{} ranks, {}", world, fmt::join(overrides, " ")));
  const Config config = config_of(overrides);
  CollectiveLog log;
  testing::RankThreadOptions options;
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  options.timeout = std::chrono::seconds(60);
  options.log = &log;
  options.adjust = [&](int64_t, ParallelStateOptions& made) {
    made.create_all_gather_groups = config.parallel.create_all_gather_groups;
  };
  testing::run_ranks(
      world,
      [&](const ParallelState& state) {
        Trainer trainer(config, state);
        for (int step = 0; step < 2; ++step) trainer.train_step();
        trainer.validate();
      },
      options);
  const JobProgram job = record_job(config, world);
  const JobGroups groups(job);
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto planned = planned_calls(job, groups, rank), real = real_calls(log, rank);
    ASSERT_GT(real.size(), 10u);
    for (size_t i = 0; i < std::max(planned.size(), real.size()); ++i)
      ASSERT_EQ(i < planned.size() ? planned[i] : "nothing", i < real.size() ? real[i] : "nothing")
          << "call " << i << " of rank " << rank << "\nplanned "
          << fmt::format("{}", fmt::join(planned.begin() + std::min(i, planned.size()),
                                         planned.begin() + std::min(i + 4, planned.size()), "\n  "))
          << "\nreal "
          << fmt::format("{}", fmt::join(real.begin() + std::min(i, real.size()),
                                         real.begin() + std::min(i + 4, real.size()), "\n  "));
  }
  const OrderVerdict verdict = prove_order(job);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
}

TEST(PlannedJob, DenseLayoutsCommunicateAsInARun) {
  expect_as_in_a_run(2, {});
  expect_as_in_a_run(3, {"train.global_batch_size=6"});
  expect_as_in_a_run(4, layout({kTensor}));
  expect_as_in_a_run(4, with(layout({kTensor, kSequence}), kSharded));
  expect_as_in_a_run(4, layout({kPipeline}));
  expect_as_in_a_run(2, layout({kPipeline, kVirtual}));
  expect_as_in_a_run(8, with(layout({kTensor, kSequence, kPipeline}), kSharded));
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
    expect_as_in_a_run(2, {precision, "optimizer.offload=true", "model.offload_activations=true",
                           "model.recompute_granularity=full", "ddp.overlap_param_gather=true",
                           "ddp.use_distributed_optimizer=true"});
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

TEST(PlannedJob, AConfigurationThatDoesNotFitIsRefused) {
  EXPECT_THROW(verify_job(config_of(layout({kTensor})), 3), ConfigError);
}

}  // namespace
}  // namespace lockstep
