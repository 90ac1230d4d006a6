// What record_job() writes down against real runs of ranks as threads, faults in it, and layouts
// that must pass.

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
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using Overrides = std::vector<std::string>;
using Kind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;

Config config_of(const Overrides& overrides) {
  return parse_config(
      "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
      "seq_length: 16 vocab_size: 256 make_vocab_size_divisible_by: 1 } "
      "train { global_batch_size: 16 micro_batch_size: 1 eval_iters: 1 train_iters: 10 } "
      "data { mock: true } "
      "optimizer { lr: 0.01 clip_grad: 0.5 lr_decay_style: \"constant\" }",
      "test", overrides);
}

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

const Overrides kExperts = {"model.num_experts=4", "model.moe_aux_loss_coeff=0.05",
                            "model.moe_z_loss_coeff=0.001"};

Overrides with(Overrides first, const Overrides& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

Overrides layout(const Overrides& fields) {
  Overrides list;
  for (const std::string& field : fields) list.push_back("parallel." + field);
  return list;
}

const char *const kTensor = "tensor_model_parallel_size=2",
                  *const kPipeline = "pipeline_model_parallel_size=2",
                  *const kContext = "context_parallel_size=2",
                  *const kExpert = "expert_model_parallel_size=2",
                  *const kSequence = "sequence_parallel=true",
                  *const kVirtual = "virtual_pipeline_model_parallel_size=2";
const Overrides kSharded = {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
                            "ddp.bucket_size=1000"};

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
  expect_as_in_a_run(4, with(with(kExperts, {"model.moe_token_dispatcher_type=allgather"}),
                             layout({kExpert, kContext})));
}

TEST(PlannedJob, SixteenRanksCommunicateAsInARun) {
  expect_as_in_a_run(16, with(with(kExperts, kSharded),
                              layout({kTensor, kSequence, kPipeline, kContext, kExpert})));
}

/// `job` in which `rank` has a program of its own, equal to that of its class.
RankProgram& own_program(JobProgram& job, int64_t rank) {
  const JobGroups groups(job);
  RankProgram own = job.programs[job.program_of[static_cast<size_t>(rank)]];
  own.rank = rank;
  for (uint32_t g = 0; g < own.groups.size(); ++g) {
    ProgramGroup& group = own.groups[g];
    group.ranks = groups.ranks_of(rank, g);
    group.position = std::find(group.ranks.begin(), group.ranks.end(), rank) - group.ranks.begin();
  }
  job.program_of[static_cast<size_t>(rank)] = static_cast<uint32_t>(job.programs.size());
  return job.programs.emplace_back(std::move(own));
}

/// Removes the start at `event`, and its wait.
void skip(RankProgram& program, size_t event) {
  uint32_t number = 0;
  for (size_t i = 0; i < event; ++i)
    if (program.events[i].kind == Kind::start) ++number;
  program.events.erase(program.events.begin() + static_cast<std::ptrdiff_t>(event));
  std::erase(program.events, ProgramEvent{Kind::wait, number});
  for (ProgramEvent& other : program.events)
    if (other.kind == Kind::wait && other.value > number) --other.value;
}

class Faults {
 public:
  Faults(JobProgram job, uint32_t seed) : job_(std::move(job)), random_(seed) {
    rank_ = static_cast<int64_t>(random_() % job_.program_of.size());
    program_ = &own_program(job_, rank_);
    for (size_t i = 0; i < program_->events.size(); ++i)
      if (program_->events[i].kind == Kind::start) starts_.push_back(i);
  }

  int64_t rank() const { return rank_; }
  const JobProgram& job() const { return job_; }

  /// Makes fault number `kind`; says what it is.
  std::string make(size_t kind) {
    switch (kind) {
      case 0: {
        const size_t event = one();
        const std::string text = "skipped: " + text_at(event);
        skip(*program_, event);
        return text;
      }
      case 1: {
        const auto [a, b] = two([&](const ProgramCall& x, const ProgramCall& y) {
          return x.group == y.group && !x.is_message() && !y.is_message() && !(x == y);
        });
        return swap("swapped inside a group", a, b);
      }
      case 2: {
        const auto [a, b] = two(
            [&](const ProgramCall& x, const ProgramCall& y) {
              return nested(x, y) && !x.is_message() && !y.is_message() && x.on_device &&
                     y.on_device;
            },
            /*neighbours=*/true);
        return swap("swapped across groups", a, b);
      }
      case 3:
        return change("wrong peer", [](ProgramCall& call) {
          if (!call.is_message()) return false;
          call.operation.position ^= 2;  // of four
          return true;
        });
      case 4:
        return change("wrong size", [](ProgramCall& call) {
          if (call.numel <= 0) return false;
          call.numel += 1;
          return true;
        });
      case 5:
        return change("wrong dtype", [](ProgramCall& call) {
          call.dtype = call.dtype == "Double" ? "Half" : "Double";
          return true;
        });
      case 6:
        return change("another operation", [](ProgramCall& call) {
          if (call.is_message()) return false;
          call.operation = {.kind = OperationKind::broadcast, .position = 1};
          return true;
        });
      case 7: {
        const auto [a, b] = two([&](const ProgramCall& x, const ProgramCall& y) {
          return x.is_message() && y.is_message() && x.group == y.group &&
                 x.operation.kind == y.operation.kind && x.label != y.label;
        });
        return swap("messages swapped", a, b);
      }
      default: {
        const size_t event = one();
        const std::string text = "twice: " + text_at(event);
        const ProgramEvent start = program_->events[event];
        program_->events.push_back(start);  // the last of all
        return text;
      }
    }
  }

 private:
  const ProgramCall& call_at(size_t event) const {
    return program_->calls[program_->events[event].value];
  }
  std::string text_at(size_t event) const {
    const ProgramCall& call = call_at(event);
    return describe(call, program_->groups[call.group].name, program_->groups[call.group].ranks);
  }
  size_t one() { return starts_[random_() % starts_.size()]; }

  /// Whether all ranks of one group are in the other.
  bool nested(const ProgramCall& x, const ProgramCall& y) const {
    std::set<int64_t> a, b;
    for (const int64_t rank : program_->groups[x.group].ranks) a.insert(rank);
    for (const int64_t rank : program_->groups[y.group].ranks) b.insert(rank);
    return x.group != y.group && (std::includes(a.begin(), a.end(), b.begin(), b.end()) ||
                                  std::includes(b.begin(), b.end(), a.begin(), a.end()));
  }

  template <class Fits>
  std::pair<size_t, size_t> two(Fits fits, bool neighbours = false) {
    for (int i = 0; i < 100000; ++i) {
      const size_t a = one(), b = one();
      if (a < b && fits(call_at(a), call_at(b)) && (!neighbours || are_neighbours(a, b)))
        return {a, b};
    }
    throw UsageError("no such pair");
  }

  /// Nothing of their groups lies between them, so that each group keeps its order.
  bool are_neighbours(size_t a, size_t b) const {
    return std::none_of(starts_.begin(), starts_.end(), [&](size_t other) {
      const uint32_t group = call_at(other).group;
      return a < other && other < b && (group == call_at(a).group || group == call_at(b).group);
    });
  }

  std::string swap(const std::string& what, size_t a, size_t b) {
    const std::string text = fmt::format("{}: {} <-> {}", what, text_at(a), text_at(b));
    std::swap(program_->events[a].value, program_->events[b].value);
    return text;
  }

  template <class Change>
  std::string change(const std::string& what, Change change) {
    for (int i = 0; i < 100000; ++i) {
      const size_t event = one();
      ProgramCall call = call_at(event);
      if (call.operation.kind == OperationKind::comparison || !change(call)) continue;
      const std::string text = what + ": " + text_at(event);
      program_->calls.push_back(call);
      program_->events[event].value = static_cast<uint32_t>(program_->calls.size()) - 1;
      return text;
    }
    throw UsageError("no such call");
  }

  JobProgram job_;
  std::mt19937 random_;
  int64_t rank_ = 0;
  RankProgram* program_ = nullptr;
  std::vector<size_t> starts_;
};

TEST(PlannedJob, EverySeededFaultIsFoundAndNamed) {
  const JobProgram job =
      record_job(config_of(with(layout({kTensor, kSequence, "pipeline_model_parallel_size=4"}),
                                with(kSharded, {"train.global_batch_size=8"}))),
                 16);
  ASSERT_TRUE(prove_order(job).ok()) << prove_order(job).to_string();
  constexpr size_t kKinds = 9, kOfEach = 6;
  size_t deadlocks = 0;
  for (size_t kind = 0; kind < kKinds; ++kind)
    for (size_t i = 0; i < kOfEach; ++i) {
      Faults faults(job, static_cast<uint32_t>(100 * kind + i));
      ASSERT_TRUE(prove_order(faults.job()).ok());
      const std::string fault = faults.make(kind);
      const OrderVerdict found = prove_order(faults.job());
      EXPECT_FALSE(found.ok()) << "rank " << faults.rank() << ", " << fault;
      EXPECT_EQ(std::count(found.ranks.begin(), found.ranks.end(), faults.rank()), 1)
          << "rank " << faults.rank() << ", " << fault << "\n"
          << found.to_string();
      EXPECT_EQ(found.ranks.size(), found.operations.size());
      deadlocks += found.reason == OrderVerdict::Reason::deadlock ? 1 : 0;
    }
  EXPECT_GE(deadlocks, kOfEach);  // swaps across groups
}

/// Draws a layout; not all are legal.
class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {
    const int64_t tp = pick({1, 1, 2, 2, 4}), cp = pick({1, 1, 1, 2, 4}),
                  pp = pick({1, 1, 2, 2, 4}), dp = pick({1, 2, 2, 3, 4});
    world = tp * cp * pp * dp;
    set("parallel.tensor_model_parallel_size", tp);
    set("parallel.context_parallel_size", cp);
    set("parallel.pipeline_model_parallel_size", pp);
    if (tp > 1 && pick({0, 1})) list.emplace_back("parallel.sequence_parallel=true");
    if (pp > 1 && pick({0, 0, 1})) set("parallel.virtual_pipeline_model_parallel_size", 2);
    if (pp > 1 && pick({0, 0, 1}))
      list.emplace_back(pick({0, 1}) ? "parallel.pipeline_schedule=gpipe"
                                     : "parallel.pipeline_schedule=zb-h1");
    set("model.num_layers", pp * pick({1, 2}) * 2);
    set("train.global_batch_size", dp * pick({1, 2, 4, 8}));
    if (cp > 1)
      list.emplace_back(std::vector<const char*>{
          "parallel.cp_comm_type=p2p", "parallel.cp_comm_type=all_gather",
          "parallel.cp_comm_type=a2a"}[static_cast<size_t>(pick({0, 1, 2}))]);
    const bool experts = pick({0, 0, 1}) != 0;
    if (experts) {
      list.insert(list.end(), kExperts.begin(), kExperts.end());
      set("parallel.expert_model_parallel_size", pick({1, 2, 4}));
      if (pick({0, 1})) set("parallel.expert_tensor_parallel_size", pick({1, 2}));
      if (pick({0, 0, 1})) list.emplace_back("model.moe_token_dispatcher_type=allgather");
      if (pick({0, 0, 1})) list.emplace_back("model.moe_expert_capacity_factor=1");
    }
    for (const char* option :
         {"ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=false",
          "model.untie_embeddings_and_output_weights=true", "model.add_bias_linear=true",
          "model.normalization=LayerNorm", "model.recompute_granularity=full",
          "train.precision=bf16", "model.num_query_groups=2", "ddp.bucket_size=500",
          "model.position_embedding_type=learned_absolute", "ddp.average_in_collective=true",
          "parallel.create_all_gather_groups=true", "model.hidden_dropout=0.1",
          "train.log_step_times=false", "ddp.grad_reduce_in_fp32=false"})
      if (pick({0, 0, 1})) list.emplace_back(option);
    if (has("ddp.use_distributed_optimizer=true") && pick({0, 1}) &&
        !has("ddp.overlap_grad_reduce=false"))
      list.emplace_back("ddp.overlap_param_gather=true");
  }

  int64_t world = 1;
  Overrides list;

 private:
  int64_t pick(std::vector<int64_t> of) { return of[random_() % of.size()]; }
  void set(const std::string& path, int64_t value) {
    list.push_back(path + "=" + std::to_string(value));
  }
  bool has(const char* option) const {
    return std::find(list.begin(), list.end(), option) != list.end();
  }
  std::mt19937 random_;
};

TEST(PlannedJob, NoFalseAlarmOnRandomLayouts) {
  const char* const wanted = std::getenv("LOCKSTEP_RANDOM_LAYOUTS");
  const int count = wanted ? std::atoi(wanted) : 200;
  int legal = 0;
  std::map<std::string, int> refusals;
  for (uint32_t seed = 1; legal < count && seed < 20U * static_cast<uint32_t>(count); ++seed) {
    const Draw draw(seed);
    OrderVerdict verdict;
    try {
      verdict = verify_job(config_of(draw.list), draw.world);
    } catch (const ConfigError& error) {
      ++refusals[std::string(error.what()).substr(0, 60)];
      continue;
    }
    ++legal;
    EXPECT_TRUE(verdict.ok()) << "seed " << seed << ": " << draw.world << " ranks, "
                              << fmt::format("{}", fmt::join(draw.list, " ")) << "\n"
                              << verdict.to_string();
  }
  EXPECT_EQ(legal, count);
  for (const auto& [text, times] : refusals)
    std::cout << "refused " << times << " times: " << text << '\n';
}

TEST(PlannedJob, AConfigurationThatDoesNotFitIsRefused) {
  EXPECT_THROW(verify_job(config_of(layout({kTensor})), 3), ConfigError);
}

}  // namespace
}  // namespace lockstep
