// Layouts against all combinations of sizes, tried one by one through the text of a configuration,
// and estimates against sums worked out by hand.

#include "lockstep/planner/layout_space.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/layout_estimate.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/pipeline_plan.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

using Strings = std::vector<std::string>;

constexpr const char* kModel = R"(
  model { num_layers: 4 hidden_size: 32 num_attention_heads: 4 ffn_hidden_size: 64 seq_length: 32 }
  train { global_batch_size: 16 device: "cpu" } data { mock: true })";
constexpr const char* kExperts = R"(
  model { num_layers: 4 hidden_size: 32 num_attention_heads: 4 ffn_hidden_size: 64 seq_length: 32
          num_experts: 4 }
  train { global_batch_size: 16 device: "cpu" } data { mock: true })";

Config config_of(const char* text, const Strings& overrides = {}) {
  return parse_config(text, "text", overrides);
}

std::set<std::string> visited(const Config& config, const LayoutSpace& space) {
  std::set<std::string> all;
  visit_layouts(config, space, [&](const JobLayout& layout) {
    const std::string text = fmt::format("{}", fmt::join(overrides_of(layout, config), " "));
    EXPECT_TRUE(all.insert(text).second) << text;
  });
  return all;
}

/// Whether the program accepts the configuration on `world` ranks.
bool is_legal(const char* text, const Strings& overrides, int64_t world) {
  try {
    const Config config = parse_config(text, "text", overrides);
    const RankGrids grids = config_grids(config.parallel, world);
    stage_layout(config);
    schedule_options(config, batch_sizes(config.train, grids.data_parallel_size()).num_microbatches)
        .validate();
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Sizes of groups, chunks and micro-batches of all legal layouts, tried one by one.
std::set<std::string> legal_sizes(const char* text, int64_t world) {
  const bool experts = config_of(text).model.num_experts.has_value();
  std::set<std::string> all;
  for (int64_t tp = 1; tp <= world; ++tp)
    for (int64_t cp = 1; cp <= world; ++cp)
      for (int64_t pp = 1; pp <= world; ++pp)
        for (int64_t chunks = 1; chunks <= (pp > 1 ? 4 : 1); ++chunks)
          for (int64_t ep = 1; ep <= (experts ? world : 1); ++ep)
            for (int64_t etp = 1; etp <= tp; ++etp)
              for (const int64_t micro : {1, 2, 4, 8, 16}) {
                if (!experts && etp < tp) continue;
                Strings set = {fmt::format("parallel.tensor_model_parallel_size={}", tp),
                               fmt::format("parallel.sequence_parallel={}", tp > 1),
                               fmt::format("parallel.context_parallel_size={}", cp),
                               fmt::format("parallel.pipeline_model_parallel_size={}", pp),
                               fmt::format("parallel.expert_model_parallel_size={}", ep),
                               fmt::format("parallel.expert_tensor_parallel_size={}", etp),
                               fmt::format("train.micro_batch_size={}", micro)};
                if (chunks > 1)
                  set.push_back(
                      fmt::format("parallel.virtual_pipeline_model_parallel_size={}", chunks));
                if (is_legal(text, set, world))
                  all.insert(
                      fmt::format("{} {} {} {} {} {} {}", tp, cp, pp, chunks, ep, etp, micro));
              }
  return all;
}

std::set<std::string> visited_sizes(const char* text, int64_t world) {
  std::set<std::string> all;
  visit_layouts(config_of(text), {.world_size = world}, [&](const JobLayout& one) {
    all.insert(fmt::format("{} {} {} {} {} {} {}", one.tensor, one.context, one.pipeline,
                           one.chunks, one.expert, one.expert_tensor, one.micro_batch_size));
  });
  return all;
}

TEST(LayoutSpace, HasTheSizesThatTheProgramTakes) {
  for (const char* text : {kModel, kExperts})
    for (const int64_t world : {1, 2, 3, 4, 8}) {
      if (text == kExperts && world == 8) continue;  // takes too long
      const std::set<std::string> legal = legal_sizes(text, world);
      EXPECT_EQ(visited_sizes(text, world), legal) << world;
      EXPECT_EQ(legal.empty(), world == 3);
    }
}

/// Chunks of the layouts with `pipeline` stages.
std::set<int64_t> chunks_of(const Config& config, int64_t pipeline) {
  std::set<int64_t> all;
  visit_layouts(config, {.world_size = 4}, [&](const JobLayout& one) {
    if (one.pipeline == pipeline) all.insert(one.chunks);
  });
  return all;
}

TEST(LayoutSpace, TheSplitOverStagesMayCountEmbeddingAndLoss) {
  const Strings both = {"parallel.account_for_embedding_in_pipeline_split=true",
                        "parallel.account_for_loss_in_pipeline_split=true"};
  Strings six = both, two = both;
  six.push_back("model.num_layers=6");
  two.push_back("model.num_layers=2");
  EXPECT_EQ(chunks_of(config_of(kModel, six), 2), (std::set<int64_t>{1, 2, 4}));
  EXPECT_EQ(chunks_of(config_of(kModel, six), 4), (std::set<int64_t>{1, 2}));
  EXPECT_EQ(chunks_of(config_of(kModel, two), 4), (std::set<int64_t>{1}));
  EXPECT_EQ(chunks_of(config_of(kModel, {"model.num_layers=6"}), 2), (std::set<int64_t>{1, 3}));
}

TEST(LayoutSpace, ASettingThatNeedsTheShardedOptimizerLeavesRanksWithoutReplicas) {
  size_t alone = 0;
  const Config config = config_of(
      kModel, {"ddp.use_distributed_optimizer=true", "ddp.pad_buckets_for_high_nccl_busbw=true"});
  visit_layouts(config, {.world_size = 4}, [&](const JobLayout& one) {
    EXPECT_NE(one.sharding, ShardingStrategy::no_shard);
    alone += one.tensor * one.pipeline == 4;
  });
  EXPECT_GT(alone, 0);
}

TEST(LayoutSpace, OverridesMakeTheLayoutOfTheConfiguration) {
  const Strings overlapped = {"parallel.tensor_model_parallel_size=2",
                              "parallel.tp_comm_overlap=true"};
  const std::vector<std::pair<const char*, Strings>> cases = {
      {kModel, {}}, {kExperts, {}}, {kModel, overlapped}};
  for (const auto& [text, given] : cases) {
    const Config config = config_of(text, given);
    size_t layouts = 0;
    visit_layouts(config, {.world_size = 4}, [&](const JobLayout& layout) {
      ++layouts;
      Strings set = given;
      const Strings more = overrides_of(layout, config);
      set.insert(set.end(), more.begin(), more.end());
      const Config made = config_of(text, set);
      EXPECT_EQ(print_config(made), print_config(with_layout(config, layout)))
          << fmt::format("{}", fmt::join(set, " "));
      EXPECT_EQ(made.parallel.tp_comm_overlap, !given.empty() && layout.tensor > 1);
    });
    EXPECT_EQ(layouts, visited(config_of(text), {.world_size = 4}).size());
  }
}

TEST(LayoutSpace, KeepsFields) {
  const Config config = config_of(
      kModel, {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"});
  int64_t visits = 0;
  visit_layouts(
      config,
      {.world_size = 4, .kept = {"parallel.tensor_model_parallel_size", "train.micro_batch_size"}},
      [&](const JobLayout& layout) {
        ++visits;
        EXPECT_EQ(layout.tensor, 2);
        EXPECT_EQ(layout.micro_batch_size, config.train.micro_batch_size);
      });
  EXPECT_GT(visits, 0);
  const size_t all = visited(config, {.world_size = 4}).size();
  const size_t kept = visited(config, {.world_size = 4, .kept = {"train.micro_batch_size"}}).size();
  EXPECT_GT(kept, 0U);
  EXPECT_GT(all, kept);
}

TEST(LayoutSpace, DividesAllBatchesOfARampUp) {
  // Batches of 2, 4, ... 16 sequences.
  const Config config = config_of(kModel, {"train.rampup_batch_size=2 2 1000"});
  std::set<int64_t> data_parallel;
  visit_layouts(config, {.world_size = 4}, [&](const JobLayout& layout) {
    const int64_t replicas = 4 / layout.tensor / layout.context / layout.pipeline;
    EXPECT_LE(replicas * layout.micro_batch_size, 2);
    data_parallel.insert(replicas);
  });
  EXPECT_EQ(data_parallel, (std::set<int64_t>{1, 2}));
}

TEST(LayoutSpace, HasAllNumbersOfInstancesThatDivideTheReplicas) {
  const Config config =
      config_of(kModel, {"train.global_batch_size=24", "ddp.use_distributed_optimizer=true"});
  std::set<int64_t> instances;
  visit_layouts(config, {.world_size = 6}, [&](const JobLayout& layout) {
    if (layout.tensor * layout.context * layout.pipeline == 1) instances.insert(layout.instances);
  });
  EXPECT_EQ(instances, (std::set<int64_t>{1, 2, 3}));
}

std::string error_of(const char* text, const LayoutSpace& space, const Strings& overrides = {}) {
  try {
    visit_layouts(config_of(text, overrides), space, [](const JobLayout&) {});
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(LayoutSpace, NamesWhatItCannotUse) {
  EXPECT_EQ(error_of(kModel, {.world_size = 0}), "world-size: found 0, allowed: >= 1");
  EXPECT_EQ(error_of("data { mock: true }", {.world_size = 2}),
            "train.global_batch_size: is not set, allowed: the sequences of a step, which all "
            "layouts share");
  EXPECT_EQ(error_of("data { mock: true }", {.world_size = 2},
                     {"train.step_batch_size_schedule=0:8 100:16"}),
            "train.step_batch_size_schedule: found '0:8 100:16', allowed: unset, because all "
            "layouts share one train.global_batch_size");
  EXPECT_TRUE(error_of(kModel, {.world_size = 2, .kept = {"model.num_layers"}})
                  .starts_with("--keep: found 'model.num_layers', allowed: parallel."));
}

TEST(LayoutSpace, ShardsWhereThereAreReplicas) {
  visit_layouts(config_of(kModel), {.world_size = 4}, [&](const JobLayout& one) {
    const int64_t replicas = 4 / one.tensor / one.pipeline;
    if (replicas == 1) {
      EXPECT_EQ(one.sharding, ShardingStrategy::no_shard);
    }
    if (one.sharding == ShardingStrategy::no_shard) {
      EXPECT_EQ(one.instances, 1);
    }
    EXPECT_LE(one.instances, std::max<int64_t>(1, replicas / 2));
  });
  std::set<int64_t> expert;  // sizes with which parameters are sharded
  visit_layouts(config_of(kExperts), {.world_size = 4}, [&](const JobLayout& one) {
    if (one.sharding == ShardingStrategy::optim_grads_params) expert.insert(one.expert);
  });
  EXPECT_EQ(expert, (std::set<int64_t>{1, 2, 4}));
}

TEST(LayoutSpace, LeavesOutInstancesThatAnotherFieldRefuses) {
  const Strings given = {"ddp.reduce_scatter_with_fp32_accumulation=true",
                         "ddp.use_distributed_optimizer=true"};
  for (const bool refuses : {true, false}) {
    const Config config = config_of(kModel, refuses ? given : Strings{});
    int64_t most = 0;
    visit_layouts(config, {.world_size = 4}, [&](const JobLayout& layout) {
      most = std::max(most, layout.instances);
      EXPECT_NO_THROW(validate(with_layout(config, layout)));
    });
    EXPECT_EQ(most, refuses ? 1 : 2);
  }
  const auto visits = [&](const char* instances) {
    const Config config = config_of(
        kModel, {"ddp.use_distributed_optimizer=true",
                 fmt::format("parallel.num_distributed_optimizer_instances={}", instances)});
    return visited(config,
                   {.world_size = 4, .kept = {"parallel.num_distributed_optimizer_instances"}})
        .size();
  };
  EXPECT_GT(visits("2"), 0u);
  EXPECT_EQ(visits("3"), 0u);
}

TEST(LayoutSpace, HasNoSequenceParallelismWhereSavedActivationsAreDistributed) {
  const Strings given = {"parallel.tensor_model_parallel_size=2",
                         "model.recompute_granularity=full",
                         "model.distribute_saved_activations=true"};
  const Config config = config_of(kModel, given);
  std::set<int64_t> tensor;
  visit_layouts(config, {.world_size = 8}, [&](const JobLayout& layout) {
    tensor.insert(layout.tensor);
    Strings set = given;
    const Strings more = overrides_of(layout, config);
    set.insert(set.end(), more.begin(), more.end());
    EXPECT_TRUE(is_legal(kModel, set, 8)) << fmt::format("{}", fmt::join(set, " "));
    EXPECT_FALSE(config_of(kModel, set).parallel.sequence_parallel);
  });
  EXPECT_EQ(tensor, (std::set<int64_t>{2, 4}));
}

/// A machine that has a rate for matrix products and does all other work in no time.
Machine products_alone(double flops_per_s) {
  Machine machine;
  machine.name = "products";
  machine.ranks_per_host = 64;
  machine.half_flops_per_s = machine.wide_flops_per_s = flops_per_s;
  machine.memory_bytes_per_s = 1e30;
  machine.matrix = machine.memory = {{0, 1}};
  machine.inside_host = {.bytes_per_s = 1e30, .latency_s = 0};
  return machine;
}

TEST(LayoutEstimator, CountsTheProductsOfALayer) {
  const Config config = config_of(kModel);
  const Machine machine = products_alone(1e9);
  // A token's forward: q, k, v and the projection, three matrices of SwiGLU, attention's core.
  const double layer = 2.0 * (3 * 32 * 32 + 32 * 32 + 3 * 32 * 64), core = 2.0 * 32 * 32;
  const double output = 2.0 * 32 * 256, tokens = 16 * 32;
  const double seconds = tokens * (4 * (3 * layer + 3.5 * core) + 3 * output) / 1e9;
  LayoutEstimator alone(config, 1, machine);
  EXPECT_NEAR(alone.seconds({.micro_batch_size = 4}), seconds, 1e-9 * seconds);
  const double again = tokens * 4 * (layer + core) / 1e9;
  EXPECT_NEAR(alone.seconds({.micro_batch_size = 4, .recompute = RecomputeGranularity::full}),
              seconds + again, 1e-9 * seconds);
  LayoutEstimator four(config, 4, machine);
  EXPECT_NEAR(four.seconds({.micro_batch_size = 1}), seconds / 4, 1e-9 * seconds);
  EXPECT_NEAR(four.seconds({.tensor = 4, .expert_tensor = 4, .micro_batch_size = 4}), seconds / 4,
              1e-9 * seconds);
  EXPECT_NEAR(four.seconds({.context = 4, .micro_batch_size = 4}), seconds / 4, 1e-9 * seconds);
}

TEST(LayoutEstimator, CountsTheBubble) {
  const Config config = config_of(kModel);
  const Machine machine = products_alone(1e9);
  LayoutEstimator two(config, 2, machine);
  // Four micro-batches of four sequences; two layers a stage, and the output on the last.
  const double layer = 2.0 * (3 * 32 * 32 + 32 * 32 + 3 * 32 * 64), core = 2.0 * 32 * 32;
  const double slot = 4 * 32 * 2 * (3 * layer + 3.5 * core) / 1e9;
  const double output = 16 * 32 * 3 * 2.0 * 32 * 256 / 1e9;
  const auto seconds = [&](int64_t chunks, PipelineScheduleFamily schedule) {
    return two.seconds(
        {.pipeline = 2, .chunks = chunks, .micro_batch_size = 4, .schedule = schedule});
  };
  using Family = PipelineScheduleFamily;
  EXPECT_NEAR(seconds(1, Family::_1f1b), 5 * slot + output, 1e-9);
  EXPECT_NEAR(seconds(2, Family::_1f1b), 4.5 * slot + output, 1e-9);
  EXPECT_NEAR(seconds(1, Family::zb_h1), (4 + 1 / 3.0) * slot + output, 1e-9);
}

TEST(LayoutEstimator, GathersExpertsFromTheRanksThatHoldTheSame) {
  Machine machine = products_alone(1e30);
  machine.inside_host = {.bytes_per_s = 1e9, .latency_s = 0};
  // Few tokens, so that their exchange with the experts covers little.
  const Config config =
      config_of(kExperts, {"train.precision=fp32", "model.seq_length=2", "model.moe_router_topk=1",
                           "model.moe_router_pre_softmax=true"});
  LayoutEstimator four(config, 4, machine);
  const double experts = 4 * 4 * 3 * 32 * 64;  // layers, experts, matrices of SwiGLU
  const double others = static_cast<double>(num_parameters(config)) - experts;
  for (const double expert : {1, 2, 4}) {
    const auto seconds = [&](ShardingStrategy sharding) {
      return four.seconds(
          {.expert = static_cast<int64_t>(expert), .micro_batch_size = 4, .sharding = sharding});
    };
    const double replicas = 4 / expert;
    const double received = others * 3 / 4 + experts / expert * (replicas - 1) / replicas;
    // Gathered once more for backward.
    EXPECT_NEAR(1e9 * (seconds(ShardingStrategy::optim_grads_params) -
                       seconds(ShardingStrategy::optim_grads)),
                4 * received, 8e3)
        << expert;
  }
}

TEST(LayoutEstimator, NeedsNoMoreMemoryThanThePlan) {
  const Machine machine = products_alone(1e9);
  const std::vector<std::pair<const char*, Strings>> models = {
      {kModel, {}}, {kExperts, {}}, {kExperts, {"model.moe_router_topk=4"}}};
  for (const auto& [text, all] : models)
    for (const char* precision : {"fp32", "bf16", "fp64"}) {
      Strings set = all;
      set.push_back(fmt::format("train.precision={}", precision));
      const Config config = config_of(text, set);
      LayoutEstimator estimator(config, 4, machine);
      visit_layouts(config, {.world_size = 4}, [&](const JobLayout& layout) {
        int64_t most = 0;
        for (const StageMemory& stage : plan_memory(with_layout(config, layout), 4).stages)
          most =
              std::max(most, stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes);
        EXPECT_LE(estimator.least_bytes(layout), static_cast<double>(most))
            << fmt::format("{}", fmt::join(overrides_of(layout, config), " "));
      });
    }
}

TEST(LayoutEstimator, NamesAMachineWithoutALink) {
  const Config config = config_of(kModel);
  Machine machine = products_alone(1e9);
  machine.ranks_per_host = 2;
  LayoutEstimator four(config, 4, machine);
  EXPECT_THROW(four.seconds({.tensor = 4, .expert_tensor = 4, .micro_batch_size = 4}), ConfigError);
}

}  // namespace
}  // namespace lockstep
