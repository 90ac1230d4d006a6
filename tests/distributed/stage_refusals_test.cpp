// Parameters that pipeline stages add together, and differences between the stages' lists of them.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/open_ranks.h"

namespace lockstep {
namespace {

using testing::expect_all_contain;

/// Parameters of a pipeline stage.
using StageParameters = std::vector<NamedParameter>;
using StageList = std::function<StageParameters(int64_t stage)>;

/// What reduces the gradients of a stage. Without an optimizer finalize_model_grads() does not
/// compare the stages: they wait for each other until the timeout.
enum class StageFront { model, model_and_optimizer, all_reduce_grads };

constexpr StageFront kStageFronts[] = {StageFront::model, StageFront::model_and_optimizer,
                                       StageFront::all_reduce_grads};

struct StageModule : DescribedModule {
  explicit StageModule(const StageParameters& list) {
    for (const NamedParameter& param : list)
      register_described_parameter(param.name, param.tensor, param.description);
  }
};

void run_stage_backward(const StageParameters& list) {
  at::Tensor loss = at::zeros({});
  for (const NamedParameter& param : list) loss = loss + param.tensor.sum();
  loss.backward();
}

/// After a backward of ones on both stages.
void expect_sums_over_stages(const StageParameters& list) {
  for (const NamedParameter& param : list) {
    const double sum = param.description.is_on_several_stages() ? 2 : 1;
    EXPECT_TRUE(testing::grad_is(param.tensor, sum)) << param.name << ": " << param.tensor.grad();
  }
}

/// One step of a stage, and one more message.
void run_stage(const StageParameters& list, StageFront front, const ParallelState& state) {
  if (front == StageFront::all_reduce_grads) {
    const StageModule net(list);
    run_stage_backward(list);
    all_reduce_grads(net, state);
    expect_sums_over_stages(list);
  } else {
    DistributedDataParallel ddp(list, state);
    if (front == StageFront::model_and_optimizer) Optimizer({&ddp}, {});
    run_stage_backward(list);
    finalize_model_grads({&ddp}, at::ones({}));
    expect_sums_over_stages(list);
  }
  all_reduce(state.world(), at::ones({}), ReduceOp::sum, "next").wait();
}

std::vector<std::string> errors_over_stages(const StageList& list_of, StageFront front) {
  const auto body = [&](const ParallelState& state) {
    run_stage(list_of(state.rank()), front, state);
  };
  testing::RankThreadOptions options = {.sizes = {.pipeline = 2}};
  if (front != StageFront::model) return testing::errors_of_open_ranks(2, body, options);
  options.timeout = std::chrono::seconds(6);
  return testing::errors_at_timeout(2, body, options);
}

NamedParameter of_stage(const std::string& name) {
  const at::Tensor tensor = at::ones({4}).requires_grad_(true);
  return {name, tensor, default_description(tensor)};
}

NamedParameter over_stages(const std::string& name, std::vector<int64_t> shape = {4}) {
  NamedParameter param = {name, at::ones(shape).requires_grad_(true), {}};
  param.description.gradient_states[MeshAxis::pp] = GradientState::partial_sum;
  return param;
}

TEST(StageRefusals, ParametersOfAllStagesInAnotherOrderAreNamed) {
  for (const StageFront front : kStageFronts) {
    const auto order = errors_over_stages(
        [](int64_t stage) {
          const char* const names[] = {"a", "b"};
          return StageParameters{over_stages(names[stage]), over_stages(names[1 - stage])};
        },
        front);
    for (const char* const name : {"'a'", "'b'"}) expect_all_contain(order, name, "order");
    const auto shape = errors_over_stages(
        [](int64_t stage) {
          return StageParameters{over_stages(
              "a", stage == 0 ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{3, 2})};
        },
        front);
    for (const char* const text : {"'a'", "[2, 3]", "[3, 2]"})
      expect_all_contain(shape, text, "shape");
    const auto absent = errors_over_stages(
        [front](int64_t stage) {
          StageParameters list = {over_stages("a"), of_stage("own")};
          if (front == StageFront::all_reduce_grads) list.push_back(over_stages("b"));
          if (stage == 1) list.erase(list.begin());
          return list;
        },
        front);
    expect_all_contain(absent, "'a'", "absent");
  }
}

/// A stage that adds nothing with others calls nothing over stages.
TEST(StageRefusals, AStageWithoutAnyOfThemEndsAllAtTheTimeout) {
  const auto errors =
      testing::errors_at_timeout(2,
                                 [](const ParallelState& state) {
                                   StageParameters list = {of_stage("own")};
                                   if (state.rank() == 0) list.push_back(over_stages("a"));
                                   run_stage(list, StageFront::all_reduce_grads, state);
                                 },
                                 {.sizes = {.pipeline = 2}, .timeout = std::chrono::seconds(6)});
  expect_all_contain(errors, "failed", "");
}

TEST(StageRefusals, ParametersOfAllStagesBesideOthersInAnyOrderAreAdded) {
  for (const StageFront front : kStageFronts) {
    const auto errors = errors_over_stages(
        [front](int64_t stage) {
          StageParameters list = {over_stages("a"), over_stages("b")};
          list[1].tensor = at::ones({4}, at::kDouble).requires_grad_(true);
          // They have different dtypes, and a model keeps each dtype apart.
          if (stage == 1 && front != StageFront::all_reduce_grads) std::swap(list[0], list[1]);
          if (stage == 1) list.insert(list.begin() + 1, of_stage("own"));
          return list;
        },
        front);
    EXPECT_EQ(errors, std::vector<std::string>(2));
  }
}

TEST(StageRefusals, TiedCopiesOfAnotherShapeAreNamedWithoutAnOptimizerToo) {
  const auto errors = errors_over_stages(
      [](int64_t stage) {
        const at::Tensor tensor =
            at::ones(stage == 0 ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{3, 2});
        NamedParameter param = {"table", tensor.requires_grad_(true), {}};
        param.description.tie = {.name = "words"};
        return StageParameters{param};
      },
      StageFront::model);
  for (const char* const text : {"'words'", "[2, 3]", "[3, 2]"})
    expect_all_contain(errors, text, "tied");
}

}  // namespace
}  // namespace lockstep
