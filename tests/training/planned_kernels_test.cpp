// The kernels that record_job() records, against formulas and against libtorch's tensors.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/model_flops.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/planner/time_simulation.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/planned_job.h"

namespace lockstep {
namespace {

using namespace testing;

/// Sums `value` over the kernels of the last step of all ranks.
template <class Value>
double sum_of(const JobProgram& job, Value&& value) {
  double sum = 0;
  for (const uint32_t index : job.program_of) {
    const RankProgram& program = job.programs[index];
    const auto& ends = program.step_ends;
    for (size_t i = ends[ends.size() - 2]; i < ends.back(); ++i)
      if (program.events[i].kind == ProgramEvent::Kind::kernel)
        sum += value(program.kernels[program.events[i].value]);
  }
  return sum;
}

double flops_of(const JobProgram& job) {
  return sum_of(job, [](const ProgramKernel& kernel) { return kernel.flops; });
}

/// Operations of attention's core in forward, over all layers and tokens.
double attention_flops(const Config& config) {
  const TransformerConfig& model = config.model;
  const double tokens =
      static_cast<double>(*config.train.global_batch_size) * static_cast<double>(model.seq_length);
  const double channels = static_cast<double>(model.num_attention_heads * *model.kv_channels);
  return static_cast<double>(model.num_layers) * tokens * 4 * channels *
         static_cast<double>(model.seq_length) / 2;
}

void expect_flops(int64_t world, const Overrides& overrides, double forwards_more = 0) {
  SCOPED_TRACE(fmt::format("{} ranks, {}", world, fmt::join(overrides, " ")));
  const Config config = config_of(with(overrides, {"train.precision=bf16"}));
  const double tokens = static_cast<double>(*config.train.global_batch_size) *
                        static_cast<double>(config.model.seq_length);
  // Flash attention's backward makes five products where forward makes two.
  const double expected =
      tokens * model_flops_per_token(config) + 0.5 * attention_flops(config) + forwards_more;
  EXPECT_NEAR(flops_of(record_job(config, world, /*kernels=*/true)) / expected, 1, 1e-12);
}

TEST(PlannedKernels, ProductsAreThoseOfTheModelOnEveryLayout) {
  expect_flops(1, {});
  expect_flops(2, {});
  expect_flops(4, layout({kTensor}));
  expect_flops(4, with(layout({kTensor, kSequence}), kSharded));
  expect_flops(4, layout({kTensor, kOverlap}));
  expect_flops(4, layout({kTensor, kSequence, kOverlap}));
  expect_flops(4, layout({kPipeline}));
  expect_flops(2, layout({kPipeline, kVirtual}));
  expect_flops(4, {"model.activation=gelu", "model.normalization=LayerNorm",
                   "model.add_bias_linear=true", "model.num_query_groups=2"});
}

/// Returns `count` starts, waits and products, from the first start of a call whose label ends with
/// `label`. With `product_first` they begin with the product before that start.
std::vector<std::string> order_around(const RankProgram& program, const std::string& label,
                                      bool product_first, size_t count) {
  std::vector<std::string> all;
  std::optional<size_t> first;
  for (const ProgramEvent& event : program.events) {
    if (event.kind == ProgramEvent::Kind::start) {
      if (!first && program.calls[event.value].label.ends_with(label)) first = all.size();
      all.emplace_back("start");
    }
    if (event.kind == ProgramEvent::Kind::wait) all.emplace_back("wait");
    if (event.kind == ProgramEvent::Kind::kernel && program.kernels[event.value].flops > 0)
      all.push_back(program.kernels[event.value].name);
  }
  const size_t begin = first.value() - (product_first ? 1 : 0);
  return {all.begin() + static_cast<int64_t>(begin),
          all.begin() + static_cast<int64_t>(begin + count)};
}

TEST(PlannedKernels, OverlappedLayersWaitForEachPartBeforeItsProductAndForSumsAtTheEnd) {
  using Order = std::vector<std::string>;
  const Config config = config_of(layout({kTensor, kSequence, kOverlap}));
  const JobProgram job = record_job(config, 2, /*kernels=*/true);
  const RankProgram& program = job.programs.at(0);
  const Order column = {"start", "start", "aten::mm", "wait", "aten::mm", "wait", "aten::mm"};
  EXPECT_EQ(order_around(program, "layers.1.mlp.linear_fc1 input", false, column.size()), column);
  const Order row = {"aten::bmm", "start", "aten::bmm", "start", "wait", "wait"};
  EXPECT_EQ(order_around(program, "layers.1.mlp.linear_fc2 output", true, row.size()), row);
}

TEST(PlannedKernels, RecomputedLayersRunForwardTwice) {
  const Config config = config_of({"train.precision=bf16"});
  const double tokens = static_cast<double>(*config.train.global_batch_size) *
                        static_cast<double>(config.model.seq_length);
  const double output = 2 * tokens * static_cast<double>(config.model.hidden_size) * 256;
  const double forward = tokens * model_flops_per_token(config) / 3 - output;
  expect_flops(2, {"model.recompute_granularity=full"}, forward);
  expect_flops(2, {"model.recompute_granularity=selective"}, attention_flops(config));
}

TEST(PlannedKernels, AttentionInBlocksCountsOnTheCpuToo) {
  for (const Overrides& overrides : {layout({kContext}), Overrides{"model.window_size=4"}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(overrides, " ")));
    const Config config = config_of(with(overrides, {"train.device=cpu"}));
    const JobProgram job = record_job(config, 2, /*kernels=*/true);
    int64_t forwards = 0, backwards = 0;
    for (const ProgramKernel& kernel : job.programs.front().kernels)
      if (kernel.name.find("flash_attention") != std::string::npos) {
        EXPECT_EQ(kernel.name.find("_for_cpu"), std::string::npos) << kernel.name;
        EXPECT_GT(kernel.flops, 0) << kernel.name;
        ++(kernel.backward ? backwards : forwards);
      }
    EXPECT_GT(forwards, 0);
    EXPECT_GT(backwards, 0);
  }
}

TEST(PlannedKernels, OnGpusGroupedQueriesReadKeysAndValuesOnce) {
  const Config config = config_of({"train.precision=bf16", "train.device=cuda",
                                   "model.hidden_size=64", "model.num_query_groups=2"});
  const double query = 16 * 64 * 2, key = 16 * 32 * 2, log_sums = 16 * 4 * 4;
  constexpr double kState = 64;  // of a random number generator, at most
  const std::string name = "aten::_scaled_dot_product_flash_attention";
  int64_t forwards = 0, backwards = 0;
  const JobProgram job = record_job(config, 1, /*kernels=*/true);
  for (const ProgramKernel& kernel : job.programs.at(0).kernels) {
    if (kernel.name == name) {
      EXPECT_NEAR(static_cast<double>(kernel.bytes), 2 * (query + key) + log_sums, kState);
      ++forwards;
    }
    if (kernel.name == name + "_backward") {
      EXPECT_NEAR(static_cast<double>(kernel.bytes), 4 * (query + key) + log_sums, kState);
      ++backwards;
    }
  }
  EXPECT_GT(forwards, 0);
  EXPECT_GT(backwards, 0);
}

TEST(PlannedKernels, TheOptimizerReadsAndWritesItsState) {
  const Config config = config_of({"train.precision=bf16", "ddp.use_distributed_optimizer=true"});
  for (const int64_t ranks : {1, 2}) {
    const JobProgram job = record_job(config, ranks, /*kernels=*/true);
    const double bytes = sum_of(job, [](const ProgramKernel& kernel) {
      return kernel.name == "adamw" ? static_cast<double>(kernel.bytes) : 0;
    });
    const double normed = sum_of(job, [](const ProgramKernel& kernel) {
      return kernel.name == "sum_of_squares" ? static_cast<double>(kernel.bytes - 8) / 4 : 0;
    });
    const auto elements = static_cast<double>(num_parameters(config));
    // Master, moments: read and written, 24 bytes; gradient read, 4; bf16 weight written, 2.
    EXPECT_EQ(bytes, 30 * elements) << ranks;
    // The norm covers the padding of buffers, too.
    EXPECT_GE(normed, elements) << ranks;
    EXPECT_LE(normed, 1.1 * elements) << ranks;
  }
}

/// A byte of memory takes a second; everything else takes no time.
Machine bytes_alone() {
  Machine machine;
  machine.ranks_per_host = 8;
  machine.half_flops_per_s = machine.wide_flops_per_s = 1e30;
  machine.memory_bytes_per_s = 1;
  machine.matrix = machine.memory = {{.from = 0, .share = 1}};
  machine.inside_host = {.bytes_per_s = 1e30, .latency_s = 0};
  return machine;
}

TEST(PlannedKernels, PostponedWeightGradientsAreNoWorkOfTheOptimizer) {
  const auto time_of = [](const char* schedule) {
    const Config config = config_of(layout({"pipeline_model_parallel_size=4", schedule}));
    return simulate_step(record_job(config, 4, /*kernels=*/true), bytes_alone());
  };
  const StepTime whole = time_of("pipeline_schedule=1f1b");
  const StepTime split = time_of("pipeline_schedule=zb-h1");
  ASSERT_EQ(whole.ranks.size(), 4u);
  ASSERT_EQ(split.ranks.size(), 4u);
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_GT(whole.ranks[rank].optimizer_s, 0);
    EXPECT_NEAR(split.ranks[rank].optimizer_s / whole.ranks[rank].optimizer_s, 1, 1e-9) << rank;
  }
}

/// Bytes of the kernels of the last step.
double kernel_bytes(const RankProgram& program) {
  double bytes = 0;
  for (size_t i = program.step_ends.at(0); i < program.step_ends.at(1); ++i)
    if (program.events[i].kind == ProgramEvent::Kind::kernel)
      bytes += static_cast<double>(program.kernels[program.events[i].value].bytes);
  return bytes;
}

TEST(PlannedKernels, ContextParallelPositionsDoTheirOwnWork) {
  const std::string four = "context_parallel_size=4";
  for (const Overrides& overrides : std::vector<Overrides>{
           layout({four}), with(layout({four}), {"model.window_size=4"}),
           with(layout({four, "cp_comm_type=all_gather"}), {"model.window_size=4"})}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(overrides, " ")));
    const Config config = config_of(overrides);
    const JobProgram job = record_job(config, 4, /*kernels=*/true);
    EXPECT_EQ(job.programs.size(), 4u);
    EXPECT_EQ(simulate_step(job, bytes_alone()).ranks.size(), 4u);
    double most = 0;
    for (int64_t rank = 0; rank < 4; ++rank) {
      const double own = kernel_bytes(record_rank(config, 4, rank, /*kernels=*/true));
      EXPECT_EQ(kernel_bytes(job.programs[job.program_of[static_cast<size_t>(rank)]]), own) << rank;
      most = std::max(most, own);
    }
    EXPECT_LT(kernel_bytes(job.programs.front()), most);
    EXPECT_EQ(record_job(config, 4).programs.size(), 1u);
  }
  const auto programs = [](const Overrides& fields) {
    return record_job(config_of(layout(fields)), 4, /*kernels=*/true).programs.size();
  };
  EXPECT_EQ(programs({four, "cp_comm_type=a2a"}), 1u);
  EXPECT_EQ(programs({four, "cp_comm_type=a2a+p2p", "hierarchical_context_parallel_sizes=4,1"}),
            1u);
  EXPECT_EQ(programs({four, "cp_comm_type=a2a+p2p", "hierarchical_context_parallel_sizes=2,2"}),
            4u);
  EXPECT_EQ(programs({four, "cp_comm_type_of_layers=a2a,a2a,a2a,p2p"}), 4u);
}

TEST(PlannedKernels, WhatTheHostDoesIsNoWorkOfTheDevice) {
  const auto bytes_of = [](const Overrides& overrides, const char* kernel) {
    const Config config = config_of(with(overrides, {"train.precision=bf16", "train.device=cuda"}));
    return sum_of(record_job(config, 1, /*kernels=*/true), [&](const ProgramKernel& one) {
      return one.name == kernel ? static_cast<double>(one.bytes) : 0;
    });
  };
  const Overrides offloaded = {"optimizer.offload=true", "model.offload_activations=true"};
  EXPECT_GT(bytes_of({}, "adamw"), 0);
  EXPECT_EQ(bytes_of(offloaded, "adamw"), 0);
  EXPECT_NEAR(bytes_of(offloaded, "aten::copy_"), bytes_of({}, "aten::copy_"), 100);
}

TEST(PlannedKernels, WithoutAskingThereAreNone) {
  const JobProgram job = record_job(config_of({}), 1);
  EXPECT_TRUE(job.programs.at(0).kernels.empty());
  EXPECT_EQ(job.programs.at(0).step_ends.size(), 2u);
}

}  // namespace
}  // namespace lockstep
