// Faults in the programs that record_job() records, and layouts that must pass.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/planned_job.h"

namespace lockstep {
namespace {

using namespace testing;
using Kind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;

/// Gives `rank` a program of its own in `job`, equal to that of its class.
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

  /// Makes fault number `kind`. Returns its description.
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
        program_->events.push_back(start);  // the last event
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

  /// Whether one group contains all ranks of the other.
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

  /// Whether no call of their groups lies between them, so that each group keeps its order.
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

TEST(PlannedFaults, EverySeededFaultIsFoundAndNamed) {
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
    if (tp > 1 && pick({0, 0, 1})) list.emplace_back("parallel.tp_comm_overlap=true");
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

int number_of(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

TEST(PlannedFaults, NoFalseAlarmOnRandomLayouts) {
  const int count = number_of("LOCKSTEP_RANDOM_LAYOUTS", 200);
  const int seconds = number_of("LOCKSTEP_RANDOM_SECONDS", 600);
  const auto first = static_cast<uint32_t>(number_of("LOCKSTEP_RANDOM_SEED", 1));
  const auto begin = std::chrono::steady_clock::now();
  int legal = 0;
  uint32_t seed = first;
  std::map<std::string, int> refusals;
  for (; legal < count && std::chrono::steady_clock::now() - begin < std::chrono::seconds(seconds);
       ++seed) {
    const Draw draw(seed);
    const std::string drawn =
        fmt::format("seed {}: {} ranks, {}", seed, draw.world, fmt::join(draw.list, " "));
    try {
      const OrderVerdict verdict = verify_job(config_of(draw.list), draw.world);
      ++legal;
      EXPECT_TRUE(verdict.ok()) << drawn << "\n" << verdict.to_string();
    } catch (const ConfigError& error) {
      ++refusals[std::string(error.what()).substr(0, 60)];
    } catch (const std::exception& error) {
      ADD_FAILURE() << drawn << "\n" << error.what();
    }
  }
  std::cout << legal << " legal layouts, seeds " << first << " to " << seed - 1 << '\n';
  for (const auto& [text, times] : refusals)
    std::cout << "refused " << times << " times: " << text << '\n';
  EXPECT_GE(legal, std::min(count, 20));
}

TEST(PlannedFaults, ARankWithoutRowsForItsExperts) {
  // Each of 16 ranks has one of 16 tokens, for one of four experts with biases.
  const Overrides fields =
      with(with(layout({"tensor_model_parallel_size=4", "context_parallel_size=4", kSequence,
                        "expert_model_parallel_size=4", "expert_tensor_parallel_size=1"}),
                kExperts),
           {"model.add_bias_linear=true", "model.moe_router_topk=1",
            "model.moe_router_pre_softmax=true"});
  const OrderVerdict verdict = verify_job(config_of(fields), 16);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
}

}  // namespace
}  // namespace lockstep
