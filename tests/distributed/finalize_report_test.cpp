#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <tuple>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/finalize_passes.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/tests/support/allocation_counter.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::allocations;
using testing::CollectiveLog;
using testing::DescribedParams;
using testing::kLongText;
using testing::no_tokens;
using testing::run_ranks;

/// Runs steps of a model in which parameter `place` of three has a long name. The names of the
/// first and the last one are in the bucket's label.
void expect_no_copies_of_names(const ParallelState& state, size_t place) {
  SCOPED_TRACE(place);
  std::vector<std::string> names = {"first", "second", "third"};
  names[place].resize(kLongText, 'n');
  DescribedParams net;
  for (size_t i = 0; i < names.size(); ++i) net.add(names[i], {static_cast<int64_t>(i + 3)});
  DistributedDataParallelConfig config;
  config.overlap_grad_reduce = true;
  DistributedDataParallel ddp(net, state, config);
  for (int step = 0; step < 3; ++step) {
    allocations = {};
    ddp.zero_grad_buffer();
    net.backward([](auto&, auto&) { return 1.0; });
    const FinalizeReport report = finalize_model_grads({&ddp}, no_tokens());
    // The reduction's group stores a label at its first call.
    if (step > 0 || place == 1) {
      EXPECT_EQ(allocations.long_texts, 0) << "step " << step;
    }
    ASSERT_EQ(report.entries.size(), 2u);
    EXPECT_EQ(report.entries[0].bytes, 12 * 8);
    EXPECT_EQ(report.entries[0].parameters, 3);
  }
}

TEST(FinalizeReport, NoNameOfAParameterIsCopiedInAStep) {
  run_ranks(2, [](const ParallelState& state) {
    for (const size_t place : {0, 1, 2}) expect_no_copies_of_names(state, place);
    const std::string text(kLongText, 'n');
    allocations = {};
    const std::string copy(text);
    EXPECT_EQ(allocations.long_texts, 1) << "copies are counted";
  });
}

/// A norm that is partial over tp, a mean over tp, and a table on both stages with its own bucket.
struct TwoByTwo {
  explicit TwoByTwo(const ParallelState& state) {
    net.add("norm", {3}, {.gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}});
    net.add("mean", {2}, {.gradient_states = {{MeshAxis::tp, GradientState::partial_mean}}});
    net.add("table", {5}, {.tie = Tie{"table"}});
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    ddp = std::make_unique<DistributedDataParallel>(net, state, config);
    net.backward([](auto&, auto&) { return 1.0; });
  }
  DescribedParams net;
  std::unique_ptr<DistributedDataParallel> ddp;
};

const ParallelSizes kTwoByTwo = {.tensor = 2, .pipeline = 2};

TEST(FinalizeReport, SaysWhatWasSentOverWhichGroupAsData) {
  CollectiveLog log;
  run_ranks(4,
            [&](const ParallelState& state) {
              const TwoByTwo model(state);
              const FinalizeReport report = finalize_model_grads({model.ddp.get()}, no_tokens());
              using Sent =
                  std::tuple<GradOperation::Kind, ReduceOp, std::string, RankList, int64_t>;
              std::map<std::string_view, std::vector<Sent>> found;
              for (const FinalizeReport::Entry& e : report.entries)
                found[e.pass].push_back({e.operation.kind, e.operation.op, e.group.name(),
                                         e.group.ranks(), e.parameters});
              using Kind = GradOperation::Kind;
              const int64_t rank = state.rank(), first = rank - rank % 2;
              const RankList row = {first, first + 1}, column = {rank % 2, rank % 2 + 2};
              const std::map<std::string_view, std::vector<Sent>> expected = {
                  {"data-parallel",
                   {{Kind::reduce_scatter, ReduceOp::sum, "dp-cp", {rank}, 1},
                    {Kind::reduce_scatter, ReduceOp::sum, "dp-cp", {rank}, 2}}},
                  {"partial gradients",
                   {{Kind::all_reduce, ReduceOp::sum, "tp", row, 1},
                    {Kind::all_reduce, ReduceOp::average, "tp", row, 1}}},
                  {"tied gradients", {{Kind::all_reduce, ReduceOp::sum, "embedding", column, 1}}},
                  {"num_tokens",
                   {{Kind::broadcast, ReduceOp::sum, "pp", column, 0},
                    {Kind::all_reduce, ReduceOp::sum, "dp-cp", {rank}, 0}}}};
              EXPECT_EQ(found, expected);

              // The calls of c10d, in the same order.
              std::vector<std::pair<std::string, int64_t>> bytes, sent;
              for (const FinalizeReport::Entry& e : report.entries)
                if (e.group.size() > 1) bytes.emplace_back(e.group.name(), e.bytes);
              const auto calls = log.of_rank(rank);
              for (size_t i = calls.size() - bytes.size(); i < calls.size(); ++i)
                sent.emplace_back(calls[i].group, calls[i].bytes);
              EXPECT_EQ(bytes, sent);
            },
            {.sizes = kTwoByTwo, .log = &log});
}

TEST(FinalizeReport, IsShownAsOneLineForEachCollective) {
  run_ranks(4,
            [](const ParallelState& state) {
              const TwoByTwo model(state);
              const FinalizeReport report = finalize_model_grads({model.ddp.get()}, no_tokens());
              if (state.rank() != 3) return;
              EXPECT_EQ(
                  to_string(report),
                  "data-parallel: reduce-scatter sum over dp-cp [3], 1024 bytes, 1 parameters\n"
                  "data-parallel: reduce-scatter sum over dp-cp [3], 1024 bytes, 2 parameters\n"
                  "partial gradients: all-reduce sum over tp [2, 3], 24 bytes, 1 parameters\n"
                  "partial gradients: all-reduce average over tp [2, 3], 16 bytes, 1 "
                  "parameters\n"
                  "tied gradients: all-reduce sum over embedding [1, 3], 40 bytes, 1 "
                  "parameters\n"
                  "num_tokens: broadcast over pp [1, 3], 8 bytes, 0 parameters\n"
                  "num_tokens: all-reduce sum over dp-cp [3], 8 bytes, 0 parameters\n");
            },
            {.sizes = kTwoByTwo});
}

TEST(FinalizeModelGrads, WhatIsLeftUndoneIsNamedByItsPass) {
  struct Case {
    ParamDescription description;
    bool per_token;
    std::string left_undone;
  };
  const std::vector<Case> cases = {
      {{}, false, ""},
      {{}, true, ", not divided by the tokens"},
      {{.tie = Tie{"table"}}, false, ", partial or tied ones not added up"},
      {{.tie = Tie{"table"}}, true, ", not divided by the tokens"},
      {{.gradient_states = {{MeshAxis::pp, GradientState::partial_sum}}},
       false,
       ", partial or tied ones not added up"}};
  run_ranks(2,
            [&](const ParallelState& state) {
              for (const Case& one : cases) {
                DescribedParams net;
                net.add("first", {3}, one.description).add("second", {3});
                DistributedDataParallelConfig config;
                config.calculate_per_token_loss = one.per_token;
                DistributedDataParallel ddp(net, state, config);
                net.backward([](auto&, auto&) { return 1.0; });
                ddp.finish_grad_sync();
                std::string error;
                try {
                  detail::StepAccess::require_final_gradients(ddp, "step");
                } catch (const UsageError& refusal) {
                  error = refusal.what();
                }
                EXPECT_EQ(error, one.left_undone.empty()
                                     ? ""
                                     : "step: the gradients are not final (state ready" +
                                           one.left_undone +
                                           "); call finalize_model_grads() after the last "
                                           "backward");
              }
            },
            {.sizes = {.pipeline = 2}});
}

TEST(TiedGradients, ANameMayHaveLinesAndTabsInIt) {
  const std::string name = "word\nembeddings\tof\n1\t";
  run_ranks(3,
            [&](const ParallelState& state) {
              DescribedParams net;
              net.add("norm", {3});
              if (state.rank() != 1)
                net.add("table", {4}, {.tie = Tie{name, TiedStages::first_and_last}});
              DistributedDataParallel ddp(net, state);
              const std::vector<std::string> settings(state.rank() == 1 ? 1 : 2, "a setting");
              EXPECT_NO_THROW(check_ties_over_stages({&ddp}, settings));
            },
            {.sizes = {.pipeline = 3}});
}

}  // namespace
}  // namespace lockstep
