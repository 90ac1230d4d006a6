// The peak memory that record_job() computes for each rank, against the allocations of the CPU
// allocator in real runs of the same ranks as threads.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/without_onednn.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/planned_job.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using namespace testing;

Config job_of(const Overrides& overrides) {
  return parse_config(
      "model { num_layers: 4 hidden_size: 64 num_attention_heads: 4 ffn_hidden_size: 192 "
      "seq_length: 64 vocab_size: 320 make_vocab_size_divisible_by: 1 } "
      "train { device: \"cpu\" global_batch_size: 16 micro_batch_size: 2 eval_iters: 1 "
      "train_iters: 10 } "
      "data { mock: true } optimizer { lr: 0.01 lr_decay_style: \"constant\" }",
      "test", overrides);
}

/// The peak of each rank: construction of its model, two steps and a validation.
std::vector<int64_t> measured_peaks(const Config& config, int64_t world) {
  std::vector<int64_t> peaks(static_cast<size_t>(world));
  testing::RankThreadOptions options;
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  options.timeout = std::chrono::seconds(60);
  testing::run_ranks(
      world,
      [&](const ParallelState& state) {
        const MemoryCounter counter;
        Trainer trainer(config, state);
        for (int step = 0; step < 2; ++step) trainer.train_step();
        trainer.validate();
        peaks[static_cast<size_t>(state.rank())] = counter.peak();
      },
      options);
  return peaks;
}

/// Planned / measured - 1 of the rank where they differ most. Expert capacity applies to the ranks
/// of tp and cp together, so the router decides how many rows of an expert each of them has. With
/// experts the mean of the ranks that have the same plan counts.
double largest_error(const Config& config, int64_t world) {
  const JobProgram job = record_job(config, world);
  const std::vector<int64_t> measured = measured_peaks(config, world);
  std::vector<double> sums(job.programs.size()), counts(job.programs.size());
  for (size_t rank = 0; rank < measured.size(); ++rank) {
    sums[job.program_of[rank]] += static_cast<double>(measured[rank]);
    counts[job.program_of[rank]] += 1;
  }
  double largest = 0;
  for (size_t rank = 0; rank < measured.size(); ++rank) {
    const size_t program = job.program_of[rank];
    const auto planned = static_cast<double>(job.programs[program].peak_bytes);
    const double found = config.model.num_experts ? sums[program] / counts[program]
                                                  : static_cast<double>(measured[rank]);
    const double error = planned / found - 1;
    if (std::abs(error) > std::abs(largest)) largest = error;
  }
  return largest;
}

/// When threads of other ranks free memory depends on the machine's load: 0.0102 was seen instead
/// of 0. So the best of three runs counts, and none may be far off.
/// `above`: how much more than measured may be planned, if that is more than `most`.
void expect_within(double most, int64_t world, const Overrides& overrides, double above = 0) {
  constexpr double kFar = 0.02;
  double error = largest_error(job_of(overrides), world);
  const auto fits = [&] { return error >= -most && error <= std::max(most, above); };
  for (int again = 0; again < 2 && !fits(); ++again) {
    EXPECT_LE(std::abs(error), kFar);
    const double found = largest_error(job_of(overrides), world);
    if (std::abs(found) < std::abs(error)) error = found;
  }
  EXPECT_TRUE(fits()) << error << " of " << world << " ranks, "
                      << fmt::to_string(fmt::join(overrides, " "));
}

TEST(PlannedMemory, OfDenseModelsIsThatOfARun) {
  constexpr double kFew = 0.0005;  // indices that the host holds
  // Ranks as threads need less than planned. Which micro-batch needs most depends on when other
  // ranks free memory, and each of the eight holds 1,040 bytes of token ids more than the one
  // before.
  constexpr double kAbove = 0.003;
  expect_within(kFew, 1, {});
  expect_within(0.01, 1, {"train.precision=bf16"});  // some CPUs pack operands
  expect_within(kFew, 1, {"model.recompute_granularity=full"});
  expect_within(kFew, 1, {"model.attention_dropout=0.1", "model.hidden_dropout=0.1"});
  expect_within(kFew, 1,
                {"model.normalization=LayerNorm", "model.activation=gelu",
                 "model.position_embedding_type=learned_absolute"});
  expect_within(kFew, 2, kSharded, kAbove);
  expect_within(kFew, 2, with(kSharded, {"ddp.data_parallel_sharding_strategy=optim_grads_params"}),
                kAbove);
  expect_within(kFew, 2, layout({kTensor}), kAbove);
  expect_within(kFew, 2, layout({kTensor, kSequence}), kAbove);
  expect_within(kFew, 2, layout({kContext}), kAbove);
  expect_within(0.02, 2, layout({kPipeline}));
}

TEST(PlannedMemory, FormulasCountTheLogitsOfAllMicrobatchesInFlight) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
    const Config config =
        job_of(with(layout({kPipeline, fmt::format("pipeline_schedule={}", schedule)}),
                    {"model.vocab_size=4000"}));
    const std::vector<int64_t> recorded = recorded_peaks(record_job(config, 2));
    const std::vector<StageMemory> planned = plan_memory(config, 2).stages;
    for (size_t stage = 0; stage < 2; ++stage)
      EXPECT_NEAR(
          static_cast<double>(planned[stage].total_bytes()) / static_cast<double>(recorded[stage]),
          1, 0.1)
          << schedule << ", stage " << stage;
  }
}

/// The formulas' total over the recorded peak, for each stage.
std::vector<double> planned_of_recorded(const Config& config, int64_t world) {
  const std::vector<int64_t> recorded = recorded_peaks(record_job(config, world));
  std::vector<double> shares;
  for (const StageMemory& stage : plan_memory(config, world).stages)
    shares.push_back(static_cast<double>(stage.total_bytes()) /
                     static_cast<double>(recorded.at(static_cast<size_t>(stage.stage))));
  return shares;
}

TEST(PlannedMemory, FormulasCountWhatWeightGradientsWaitFor) {
  const Overrides sizes = {"model.num_layers=8", "model.hidden_size=128", "model.seq_length=256",
                           "model.ffn_hidden_size=512", "train.micro_batch_size=2"};
  const std::string zero_bubble = "pipeline_schedule=zb-h1",
                    four = "pipeline_model_parallel_size=4";
  for (const Overrides& more : {Overrides{}, Overrides{"model.recompute_granularity=full"}})
    for (const double share :
         planned_of_recorded(job_of(with(layout({four, zero_bubble}), with(sizes, more))), 4))
      EXPECT_NEAR(share, 1, 0.1) << fmt::to_string(fmt::join(more, " "));
  for (const double share : planned_of_recorded(
           job_of(with(layout({kPipeline, kTensor, kSequence, zero_bubble}), sizes)), 4))
    EXPECT_NEAR(share, 1, 0.1) << "sequence parallelism";
}

TEST(PlannedMemory, CapacityBoundsTheRowsThatAreRecorded) {
  const auto rows = [](const char* factor, const char* pad) {
    const Config config = job_of(
        with(layout({"expert_model_parallel_size=2"}),
             {"model.num_experts=4", fmt::format("model.moe_expert_capacity_factor={}", factor),
              fmt::format("model.moe_pad_expert_input_to_capacity={}", pad)}));
    int64_t bytes = 0;
    const JobProgram job = record_job(config, 2);
    for (const ProgramCall& call : job.programs.front().calls)
      if (call.label == "tokens of the experts") bytes = std::max(bytes, call.bytes);
    return bytes;
  };
  EXPECT_GT(rows("1", "false"), 0);
  EXPECT_EQ(rows("1.5", "true") * 2, rows("1", "true") * 3);
  EXPECT_EQ(rows("1.5", "false"), rows("1", "false"));
  EXPECT_EQ(rows("0.5", "false") * 2, rows("1", "false"));
}

TEST(PlannedMemory, FormulasCountTheTermsThatAreAddedInFp32) {
  // Few tokens, so that most of the memory is there when gradients are reduced.
  const Config config = job_of(
      {"train.precision=bf16", "train.device=cuda", "model.hidden_size=512",
       "model.ffn_hidden_size=2048", "model.seq_length=16", "train.micro_batch_size=1",
       "train.global_batch_size=4", "ddp.grad_reduce_in_fp32=false",
       "ddp.use_distributed_optimizer=true", "ddp.reduce_scatter_with_fp32_accumulation=true"});
  for (const int64_t ranks : {1, 2}) {
    const auto recorded = static_cast<double>(recorded_peaks(record_job(config, ranks)).front());
    const auto planned =
        static_cast<double>(plan_memory(config, ranks).stages.front().total_bytes());
    EXPECT_NEAR(planned / recorded, 1, 0.03) << ranks;
  }
}

TEST(PlannedMemory, OnGpusGroupedQueriesUseKeysAndValuesWithoutCopies) {
  const auto peak = [](const char* device, int groups) {
    const Config config =
        job_of({"train.precision=bf16", fmt::format("train.device={}", device),
                fmt::format("model.num_query_groups={}", groups), "train.micro_batch_size=4",
                "model.vocab_size=2000"});  // so that the peak is at the logits
    return static_cast<double>(recorded_peaks(record_job(config, 1)).front());
  };
  // What else differs between the devices does not depend on the groups.
  const double copies = (peak("cpu", 2) - peak("cuda", 2)) - (peak("cpu", 4) - peak("cuda", 4));
  const double tokens = 4 * 64, queries = 4 * 16, keys = 2 * 16, bytes = 2, layers = 4;
  EXPECT_NEAR(copies / (layers * 2 * (queries - keys) * tokens * bytes), 1, 0.05);
}

TEST(PlannedMemory, WhatIsOffloadedLeavesTheDevice) {
  const auto base = [](const Overrides& more) {
    return with({"train.precision=bf16", "train.device=cuda", "model.num_layers=12",
                 "model.hidden_size=256", "train.micro_batch_size=4"},
                more);
  };
  const auto expect_less = [&](const Overrides& common, const char* offload, double most) {
    const Config kept = job_of(base(common));
    const Config offloaded = job_of(base(with(common, {offload})));
    const auto recorded = [](const Config& config) {
      return static_cast<double>(recorded_peaks(record_job(config, 1)).front());
    };
    const double planned =
        static_cast<double>(plan_memory(kept, 1).stages.front().total_bytes() -
                            plan_memory(offloaded, 1).stages.front().total_bytes());
    EXPECT_GT(planned, 0);
    EXPECT_NEAR((recorded(kept) - recorded(offloaded)) / planned, 1, most) << offload;
  };
  expect_less({}, "optimizer.offload=true", 0.01);
  expect_less({}, "model.offload_activations=true", 0.1);
  expect_less({"model.recompute_granularity=full"}, "model.offload_activations=true", 0.2);
}

TEST(PlannedMemory, OffloadsOnlyWhereFormulasDo) {
  const Overrides offload = {"optimizer.offload=true", "model.offload_activations=true"};
  for (const char* device : {"train.device=auto", "train.device=cpu"}) {
    const auto peaks = [&](const Overrides& more) {
      return recorded_peaks(record_job(job_of(with({device}, more)), 1));
    };
    EXPECT_EQ(peaks(offload), peaks({})) << device;
  }
}

/// Draws jobs of 1 to 4 ranks. Some of them are refused.
class Jobs {
 public:
  explicit Jobs(uint64_t seed) : random_(seed) {}

  struct Job {
    int64_t world = 1;
    Overrides overrides;
  };
  Job next() {
    Job job = {one_of<int64_t>({1, 2, 2, 4, 4}), {}};
    const auto add = [&](const std::string& field) { job.overrides.push_back(field); };
    const auto maybe = [&](int percent, const std::string& field) {
      if (chance(percent)) add(field);
    };
    draw_model(add, maybe);
    draw_layout(job.world, add, maybe);
    for (const char* field : {"train.micro_batch_size=1", "train.micro_batch_size=4"})
      if (chance(25)) {
        add(field);
        break;
      }
    const auto precision = one_of<const char*>({"fp32", "fp32", "bf16", "fp64"});
    add(fmt::format("train.precision={}", precision));
    maybe(30, "optimizer.optimizer=sgd");
    maybe(10, "optimizer.optimizer=muon");
    maybe(50, "optimizer.clip_grad=0");
    return job;
  }

 private:
  bool chance(int percent) {
    return std::uniform_int_distribution<int>(1, 100)(random_) <= percent;
  }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[std::uniform_int_distribution<size_t>(0, list.size() - 1)(random_)];
  }

  template <class Add, class Maybe>
  void draw_model(Add add, Maybe maybe) {
    add(fmt::format("model.num_layers={}", one_of({4, 8})));
    const int hidden = one_of({64, 96, 128});
    add(fmt::format("model.hidden_size={}", hidden));
    add(fmt::format("model.ffn_hidden_size={}", hidden * one_of({2, 3, 4})));
    add(fmt::format("model.seq_length={}", one_of({64, 128})));
    add(fmt::format("model.vocab_size={}", one_of({320, 500, 2000})));
    maybe(30, "model.normalization=LayerNorm");
    maybe(25, "model.activation=gelu");
    maybe(20, "model.position_embedding_type=learned_absolute");
    maybe(30, "model.num_query_groups=2");
    maybe(25, "model.hidden_dropout=0.1");
    maybe(20, "model.attention_dropout=0.1");
    maybe(30, "model.untie_embeddings_and_output_weights=true");
    maybe(20, "model.cross_entropy_chunk_size=16");
    maybe(15, "model.label_smoothing=0.1");
    if (chance(40)) {
      add(fmt::format("model.recompute_granularity={}",
                      one_of<const char*>({"full", "selective"})));
      maybe(30, "model.recompute_method=block");
    }
    if (!chance(25)) return;
    // Otherwise the memory of each rank would depend on the router.
    for (const char* field :
         {"num_experts=4", "moe_expert_capacity_factor=1", "moe_pad_expert_input_to_capacity=true"})
      add(fmt::format("model.{}", field));
  }

  template <class Add, class Maybe>
  void draw_layout(int64_t world, Add add, Maybe maybe) {
    for (int64_t rest = world; rest > 1; rest /= 2) {
      const auto axis = one_of<const char*>({"tensor_model", "pipeline_model", "context", ""});
      const std::string field = fmt::format("parallel.{}_parallel_size=", axis);
      if (*axis) add(field + (chance(30) && world == 4 ? "4" : "2"));
    }
    maybe(40, "parallel.sequence_parallel=true");
    maybe(30, "parallel.virtual_pipeline_model_parallel_size=2");
    maybe(15, "parallel.pipeline_schedule=zb-h1");
    maybe(15, "parallel.pipeline_schedule=gpipe");
    maybe(30, "parallel.expert_model_parallel_size=2");
    maybe(30, "parallel.cp_comm_type=a2a");
    if (chance(50)) {
      add("ddp.use_distributed_optimizer=true");
      maybe(50, "ddp.overlap_param_gather=true");
      add(fmt::format("ddp.data_parallel_sharding_strategy={}",
                      one_of<const char*>({"optim", "optim_grads", "optim_grads_params"})));
    }
    maybe(50, "ddp.overlap_grad_reduce=true");
    maybe(30, "ddp.bucket_size=20000");
  }

  std::mt19937_64 random_;
};

/// The error of `job`, or nothing if it is refused.
std::optional<double> error_of(const Jobs::Job& job) {
  try {
    return largest_error(job_of(job.overrides), job.world);
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

TEST(PlannedMemory, OfRandomJobsIsWithinTwoPercent) {
  const char* const given = std::getenv("LOCKSTEP_RANDOM_SEED");
  const char* const count = std::getenv("LOCKSTEP_RANDOM_JOBS");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : 1;
  const int wanted = count ? std::atoi(count) : 12;
  Jobs jobs(seed);
  for (int legal = 0; legal < wanted;) {
    const Jobs::Job job = jobs.next();
    const std::optional<double> error = error_of(job);
    if (!error) continue;
    ++legal;
    const std::string text = fmt::format("{} ranks, {}", job.world, fmt::join(job.overrides, " "));
    std::printf("%+7.2f %%  %s\n", 100 * *error, text.c_str());
    EXPECT_LE(std::abs(*error), 0.02) << "seed " << seed << ", " << text;
  }
}

}  // namespace
}  // namespace lockstep
