// Descriptions that a front cannot honour: every rank gets an error with the name.

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/open_ranks.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::errors_of_ranks;
using enum MeshAxis;

constexpr auto kTerm = GradientState::partial_sum;

using FrontCall = std::function<void(DescribedParams& net, const ParallelState& state)>;

/// Fronts that take the module and the ParallelState.
const std::vector<std::pair<const char*, FrontCall>> kWithState = {
    {"GradientSynchronizer",
     [](auto& net, const auto& state) { GradientSynchronizer(net, state, 1, 1); }},
    {"all_reduce_grads", [](auto& net, const auto& state) { all_reduce_grads(net, state); }},
    {"clip_grad_norm_", [](auto& net, const auto& state) { clip_grad_norm_(net, state, 1.0); }},
    {"Reducer", [](auto& net, const auto& state) { Reducer(net, state); }}};

/// The front calls without the ParallelState.
const FrontCall kSynchronizer = [](auto& net, const auto&) { GradientSynchronizer({net}, 1, 1); };
const FrontCall kAllReduce = [](auto& net, const auto& state) {
  all_reduce_grads(net, DeviceMesh::dense(state), /*use_ddp=*/false);
};
const FrontCall kClipping = [](auto& net, const auto&) { clip_grad_norm_(net, 1.0); };
const FrontCall kReducer = [](auto& net, const auto& state) {
  Reducer(net, state.group(GroupKind::dp_cp));
};

void expect_refused(const FrontCall& call, const char* front, const ParamDescription& description,
                    const ParallelSizes& sizes, const std::string& part,
                    const ParamDescription* second = nullptr) {
  const auto errors = errors_of_ranks(4,
                                      [&](const ParallelState& state) {
                                        DescribedParams net;
                                        net.add("good", {2}).add("odd", {4, 4}, description);
                                        if (second) net.add("twin", {4, 4}, *second);
                                        net.backward([](auto&, auto&) { return 1.0; });
                                        call(net, state);
                                      },
                                      {.sizes = sizes, .timeout = std::chrono::seconds(4)});
  for (const std::string& error : errors)
    EXPECT_NE(error.find(part), std::string::npos)
        << front << ": '" << error << "', expected '" << part << "'";
}

TEST(DescribedRefusals, ATieOverPipelineStagesIsNamed) {
  const ParamDescription tied = {.tie = Tie{"words"}};
  for (const auto& [front, call] : kWithState)
    expect_refused(call, front, tied, {.pipeline = 2},
                   "parameter 'odd' is tied 'words' on the first and the last stage, and there are "
                   "2 pipeline stages, allowed: 1; use DistributedDataParallel and "
                   "finalize_model_grads()");
}

TEST(DescribedRefusals, TwoTensorsOfOneTieAreNamed) {
  const ParamDescription tied = {.tie = Tie{"words"}};
  for (const auto& [front, call] : kWithState)
    expect_refused(call, front, tied, {},
                   "parameters 'odd' and 'twin' are both tied as 'words', allowed: one tensor",
                   &tied);
}

TEST(DescribedRefusals, AGradientThatIsNoTermOfTheSumOverTheBatchIsNamed) {
  for (const auto& [front, call] : kWithState)
    expect_refused(call, front, {.gradient_states = {{dp, GradientState::complete}}}, {},
                   "parameter 'odd': its gradient is declared complete over dp, which has 4 ranks; "
                   "allowed: partial-sum");
}

TEST(DescribedRefusals, AReducerNamesWhatAMeanOverDpCpIsWrongFor) {
  const FrontCall& reducer = kWithState.back().second;
  expect_refused(reducer, "Reducer", {.gradient_states = {{tp, kTerm}}}, {.tensor = 2},
                 "Reducer: the gradient of 'odd' is declared partial-sum over tp, allowed: "
                 "complete, because this API reduces only over the data-parallel ranks; use "
                 "DistributedDataParallel and finalize_model_grads(), or "
                 "GradientSynchronizer(module, state, ...)");
  expect_refused(reducer, "Reducer", {.gradient_states = {{pp, kTerm}}}, {.pipeline = 2},
                 "Reducer: the gradient of 'odd' is declared partial-sum over pp");
  expect_refused(reducer, "Reducer", {.placements = {{ep, Shard{0}}}, .is_expert = true},
                 {.expert = 2}, "Reducer: the gradient of 'odd' is reduced over expert-dp [");
  expect_refused(reducer, "Reducer", {.placements = {{ep, Shard{0}}}, .is_expert = true},
                 {.expert = 2}, "], allowed: the ranks of dp-cp [0, 1, 2, 3]; use Distributed");
}

TEST(DescribedRefusals, AGroupAloneDoesNotTellAReducerEnough) {
  const std::string rest =
      ", and a group alone does not show what that requires; give the module "
      "and the ParallelState instead";
  expect_refused(kReducer, "Reducer", {.gradient_states = {{tp, kTerm}}}, {.tensor = 2},
                 "Reducer: parameter 'odd' is declared partial-sum over tp" + rest);
  expect_refused(kReducer, "Reducer", {.is_expert = true}, {.expert = 2},
                 "Reducer: parameter 'odd' is an expert" + rest);
  expect_refused(kReducer, "Reducer", {.tie = Tie{"words"}}, {.pipeline = 2},
                 "Reducer: parameter 'odd' is tied 'words'" + rest);
}

TEST(DescribedRefusals, AListWithoutAMeshIsRefusedWhereADescriptionNeedsOne) {
  const std::pair<ParamDescription, std::string> cases[] = {
      {{.placements = {{tp, Shard{0}}}}, "dense, Shard(0) over tp"},
      {{.gradient_states = {{tp, kTerm}}}, "dense, partial-sum over tp"},
      {{.is_expert = true}, "expert, "},
      {{.tie = Tie{"words"}}, "dense, "}};
  for (const auto& [description, text] : cases)
    expect_refused(kSynchronizer, "GradientSynchronizer", description, {.tensor = 2},
                   "GradientSynchronizer: parameter 'odd' is described as '" + text);
  expect_refused(kClipping, "clip_grad_norm_", cases[0].first, {.tensor = 2},
                 "clip_grad_norm_: parameter 'odd' is described as '" + cases[0].second);
}

TEST(DescribedRefusals, AllReduceOverDpAndCpNamesWhatItWouldLeaveUndone) {
  expect_refused(kAllReduce, "all_reduce_grads", {.gradient_states = {{tp, kTerm}}}, {.tensor = 2},
                 "all_reduce_grads: the gradient of 'odd' is declared partial-sum over tp");
  expect_refused(kAllReduce, "all_reduce_grads", {.is_expert = true}, {.expert = 2},
                 "all_reduce_grads: the gradient of 'odd' is reduced over expert-dp [");
  expect_refused(kAllReduce, "all_reduce_grads", {.tie = Tie{"words"}}, {.pipeline = 2},
                 "all_reduce_grads: parameter 'odd' is tied 'words'");
}

TEST(DescribedRefusals, WhatAFrontDoesRightWithoutAMeshStays) {
  testing::run_ranks(
      4,
      [](const ParallelState& state) {
        DescribedParams net;
        net.add("whole", {3}).add("cut", {2, 2}, {.placements = {{tp, Shard{0}}}});
        net.backward([&](auto&, auto&) { return static_cast<double>(1 << state.rank()); });
        all_reduce_grads(net, DeviceMesh::dense(state), /*use_ddp=*/false);
        const double mean = state.rank() % 2 == 0 ? 2.5 : 5;
        for (const auto& [name, param] : net.params())
          EXPECT_TRUE(param.grad().eq(mean).all().template item<bool>()) << name;
        DescribedParams whole;
        whole.add("whole", {4});
        whole.backward([](auto&, auto&) { return 3.0; });
        EXPECT_EQ(clip_grad_norm_(whole, 12.0).template item<double>(), 6);
        Reducer(whole, state.group(GroupKind::dp_cp));
      },
      {.sizes = {.tensor = 2}});
}

/// Calls `front`, and bind() for a GradientSynchronizer, which compares only then.
void call_to_the_end(const char* front, const FrontCall& call, DescribedParams& net,
                     const ParallelState& state) {
  if (std::string(front) == "GradientSynchronizer")
    GradientSynchronizer(net, state, 1, 1).bind();
  else
    call(net, state);
}

TEST(DescribedRefusals, WhatOneRankRefusesEndsTheOthersToo) {
  for (const auto& [front, call] : kWithState) {
    const auto errors = testing::errors_of_open_ranks(
        3, [&, &run = call, name = front](const ParallelState& state) {
          DescribedParams net;
          ParamDescription description;
          if (state.rank() == 1) description.gradient_states = {{dp, GradientState::complete}};
          net.add("odd", {4}, description).add("expert", {2}, {.is_expert = true});
          net.backward([](auto&, auto&) { return 1.0; });
          call_to_the_end(name, run, net, state);
          if (std::string(name) == "clip_grad_norm_")  // sends nothing here
            all_reduce_grads(net, state);
        });
    for (const std::string& error : errors)
      EXPECT_NE(error.find("parameter 'odd': its gradient is declared complete over dp"),
                std::string::npos)
          << front << ": '" << error << "'";
  }
}

TEST(DescribedRefusals, ModulesThatDescribeOneParameterDifferentlyAreCompared) {
  for (const auto& [front, call] : kWithState) {
    if (std::string(front) == "clip_grad_norm_") continue;  // compares nothing
    const auto errors =
        errors_of_ranks(4, [&, &run = call, name = front](const ParallelState& state) {
          DescribedParams net;
          ParamDescription description;
          description.apply_weight_decay = state.rank() != 2;
          net.add("odd", {4}, description);
          net.backward([](auto&, auto&) { return 1.0; });
          call_to_the_end(name, run, net, state);
        });
    for (const std::string& error : errors)
      EXPECT_NE(error.find("have different parameters: parameter 'odd' is "), std::string::npos)
          << front << ": " << error;
  }
}

}  // namespace
}  // namespace lockstep
