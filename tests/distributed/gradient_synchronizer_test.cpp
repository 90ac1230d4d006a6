// The golden cases GA1 to GA5 and GX1 to GX5 of GradientSynchronizer.

#include "lockstep/distributed/gradient_synchronizer.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::backward_of;
using testing::CollectiveLog;
using testing::grad_is;
using testing::ones_on;
using testing::run_ranks;
using testing::sent_by;
using testing::throws_with;
using Sent = std::vector<std::string>;

constexpr const char* kEarly = "wait: came before the last of 2 backwards of this step (state ";

std::string list_of_ranks(int64_t world) {
  std::string text = "0";
  for (int64_t rank = 1; rank < world; ++rank) text += " " + std::to_string(rank);
  return text;
}

/// Runs five steps of two micro-batches. All gradients equal the rank's number. `reduced` tells
/// which parameters are summed over the ranks; the others stay local.
void run_golden_steps(const ParallelState& state, const MeshParameters& params,
                      const std::vector<bool>& reduced, at::ScalarType grad_dtype) {
  const auto rank = static_cast<double>(state.rank()),
             world = static_cast<double>(state.world_size());
  const auto expect_grads = [&](double of_reduced, std::optional<double> of_local) {
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& grad = params[i].tensor.grad();
      if (!reduced[i] && !of_local) {
        EXPECT_FALSE(grad.defined()) << params[i].name;
        continue;
      }
      EXPECT_TRUE(grad_is(params[i], reduced[i] ? of_reduced : *of_local)) << params[i].name;
      EXPECT_TRUE(!reduced[i] || grad.scalar_type() == grad_dtype) << params[i].name;
    }
  };
  GradientSynchronizer sync({params}, /*bucket_size_mb=*/2, /*require_accumulations=*/2);
  EXPECT_EQ(sync.state_text(), "unbound");
  sync.bind();
  expect_grads(0, std::nullopt);
  for (int step = 0; step < 5; ++step) {
    EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(); }, std::string(kEarly) + "idle): '"));
    backward_of(params, rank);
    expect_grads(rank, rank);
    EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(); },
                                        std::string(kEarly) + "accumulating 1/2): '"));
    EXPECT_EQ(sync.grad(params[1]).placements().front(), Placement(Partial{}));
    backward_of(params, rank);
    EXPECT_EQ(sync.state_text(), "reducing");
    sync.wait();
    expect_grads(world * (world - 1), 2 * rank);
    EXPECT_EQ(sync.grad(params[1]).placements().front(), Placement(Replicate{}));
    EXPECT_EQ(sync.grad(params[0]).placements(), params[0].dtensor->placements());
    sync.zero_grad();
    expect_grads(0, std::nullopt);
  }
  sync.unbind();
  for (const MeshParameter& param : params) {
    EXPECT_FALSE(param.tensor.grad().defined()) << param.name;
    EXPECT_FALSE(torch::autograd::impl::post_acc_grad_hooks(param.tensor)) << param.name;
  }
}

TEST(GradientSynchronizer, GA1ReplicatedGradientsAreSummedAndShardedOnesStay) {
  for (const int64_t world : {2, 4, 8}) {  // sums: 2 for two ranks, 12 for four, 56 for eight
    CollectiveLog log;
    run_ranks(world,
              [&](const ParallelState& state) {
                const DeviceMesh mesh(state, {world}, {"dp"});
                run_golden_steps(state,
                                 {ones_on(mesh, {8, 1}, {Shard{0}}, "rows"),
                                  ones_on(mesh, {151, 55}, {Replicate{}}, "large"),
                                  ones_on(mesh, {1, 8}, {Shard{1}}, "columns"),
                                  ones_on(mesh, {8, 16}, {Replicate{}}, "small")},
                                 {false, true, false, true}, at::kFloat);
              },
              {.log = &log});
    Sent expected(5, "all_reduce (sum) [" + list_of_ranks(world) + "] " +
                         std::to_string((151 * 55 + 8 * 16) * 4));
    for (const char* const bytes : {"16", "8"})  // by bind(): order of the two, what they are
      expected.insert(expected.begin(), "all_gather [" + list_of_ranks(world) + "] " + bytes);
    for (int64_t rank = 0; rank < world; ++rank) EXPECT_EQ(sent_by(log, rank), expected);
  }
}

TEST(GradientSynchronizer, GA2EveryPairOfDtypes) {
  using Pair = std::pair<at::ScalarType, at::ScalarType>;
  for (const auto& [dtype, grad_dtype] :
       {Pair{at::kFloat, at::kFloat}, Pair{at::kBFloat16, at::kFloat},
        Pair{at::kBFloat16, at::kBFloat16}}) {
    CollectiveLog log;
    run_ranks(4,
              [&](const ParallelState& state) {
                const DeviceMesh mesh(state, {4}, {"dp"});
                std::vector<MeshParameter> params;
                for (const std::vector<int64_t>& shape :
                     std::vector<std::vector<int64_t>>{{10, 2}, {151, 55}, {2, 3, 4, 5}, {8, 16}}) {
                  params.push_back(ones_on(mesh, shape, {Replicate{}}, "", dtype));
                  params.back().tensor.set_grad_dtype(grad_dtype);
                }
                run_golden_steps(state, params, std::vector<bool>(4, true), grad_dtype);
              },
              {.log = &log});
    const int64_t numel = 10 * 2 + 151 * 55 + 2 * 3 * 4 * 5 + 8 * 16;
    EXPECT_EQ(sent_by(log, 3).back(),
              "all_reduce (sum) [0 1 2 3] " +
                  std::to_string(numel * static_cast<int64_t>(c10::elementSize(grad_dtype))));
  }
}

TEST(GradientSynchronizer, GA3PlainParametersAreLeftAlone) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 5; ++i) tensors.push_back(at::ones({10, 10}).requires_grad_(true));
  const MeshParameters params = tensors;
  GradientSynchronizer sync({params}, 1, 2);
  sync.bind();
  EXPECT_EQ(sync.state_text(), "local");
  EXPECT_TRUE(sync.buckets().empty());
  sync.wait();
  for (int backwards = 1; backwards <= 3; ++backwards) {  // even one too many is not counted
    backward_of(params, 1.5);
    sync.wait();
    for (const MeshParameter& param : params) EXPECT_TRUE(grad_is(param, 1.5 * backwards));
  }
  sync.zero_grad();
  for (const at::Tensor& tensor : tensors) EXPECT_FALSE(tensor.grad().defined());
}

TEST(GradientSynchronizer, GA4ABucketIsReadyWhenEachOfItsParametersHasAllGradients) {
  run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    const MeshParameter p1 = ones_on(mesh, {3}, {Replicate{}}, "p1");
    const MeshParameter p2 = ones_on(mesh, {3}, {Replicate{}}, "p2");
    GradientSynchronizer sync({{p1, p2}}, 1, 2);
    sync.bind();
    const auto state_after = [&](const MeshParameter& param) {
      backward_of({param}, 1);
      return sync.state_text();
    };
    EXPECT_EQ(state_after(p1), "accumulating 1/2");
    EXPECT_EQ(state_after(p2), "accumulating 1/2");
    EXPECT_EQ(state_after(p1), "accumulating 2/2");
    sync.zero_grad();
    EXPECT_EQ(sync.state_text(), "idle");
    for (const MeshParameter& param : {p1, p2, p1}) backward_of({param}, 1);
    EXPECT_EQ(state_after(p2), "reducing");
    sync.wait();
    EXPECT_EQ(sync.state_text(), "ready");
    EXPECT_TRUE(grad_is(p1, 4));
    sync.zero_grad();
    EXPECT_EQ(state_after(p1), "accumulating 1/2");
  });
}

TEST(GradientSynchronizer, GA5TwoReplicatedAxesAreOneReduction) {
  CollectiveLog log;
  run_ranks(
      4,
      [](const ParallelState& state) {
        const DeviceMesh mesh(state, {2, 2}, {"a", "b"});
        const MeshParameters params = {ones_on(mesh, {5}, {Replicate{}, Replicate{}}, "weight")};
        GradientSynchronizer sync({params}, 1, 1);
        sync.bind();
        backward_of(params, static_cast<double>(state.rank() + 1));
        sync.wait();
        EXPECT_TRUE(grad_is(params[0], 10));
      },
      {.log = &log});
  EXPECT_EQ(sent_by(log, 2), (Sent{"all_gather [0 1 2 3] 8", "all_gather [0 1 2 3] 8",
                                   "all_reduce (sum) [0 1 2 3] 20"}));
}

/// Runs `body` with two replicated parameters "a" and "b" that need `backwards` backwards each.
std::vector<std::string> errors_with_two(
    int64_t world, int64_t backwards,
    const std::function<void(const ParallelState&, GradientSynchronizer&, const MeshParameters&)>&
        body) {
  return testing::errors_of_open_ranks(world, [&](const ParallelState& state) {
    const DeviceMesh mesh(state, {world}, {"dp"});
    const MeshParameters params = {ones_on(mesh, {2}, {Replicate{}}, "a"),
                                   ones_on(mesh, {3}, {Replicate{}}, "b")};
    GradientSynchronizer sync({params}, 1, backwards);
    sync.bind();
    body(state, sync, params);
  });
}

TEST(GradientSynchronizer, GX1ABackwardTooManyThrowsWithParameterAndCounts) {
  const auto errors = errors_with_two(4, 2, [](auto&, auto&, const MeshParameters& params) {
    for (int backwards = 0; backwards < 3; ++backwards) backward_of(params, 1);
  });
  for (const std::string& error : errors) {
    EXPECT_TRUE(
        error.find("gradient sync: 'b' received backward 3 of 2 expected in this step (state "
                   "reducing, bucket 0); state the backwards of a step with "
                   "set_required_accumulations(), and call zero_grad() between steps") !=
            std::string::npos ||
        error.find("'a' received backward 3 of 2") != std::string::npos)
        << error;
  }
}

TEST(GradientSynchronizer, GX2GradientsSetToNoneBetweenStepsAreAttachedAgain) {
  const auto errors = errors_with_two(
      4, 2,
      [](const ParallelState& state, GradientSynchronizer& sync, const MeshParameters& params) {
        const void* const place = params[0].tensor.grad().data_ptr();
        for (int step = 0; step < 3; ++step) {
          for (int backwards = 0; backwards < 2; ++backwards)
            backward_of(params, static_cast<double>(state.rank() + 1));
          sync.wait();
          for (const MeshParameter& param : params) EXPECT_TRUE(grad_is(param, 20));
          EXPECT_EQ(params[0].tensor.grad().data_ptr(), place);
          sync.zero_grad();
          for (const MeshParameter& param : params) param.tensor.mutable_grad().reset();
        }
      });
  EXPECT_EQ(errors, Sent(4));
}

TEST(GradientSynchronizer, GX2AGradientThatWasReplacedAfterBackwardThrowsByName) {
  const auto errors =
      errors_with_two(2, 1, [](auto&, GradientSynchronizer& sync, const MeshParameters& params) {
        backward_of(params, 1);
        params[1].tensor.mutable_grad() = params[1].tensor.grad() / 2;
        sync.wait();
      });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("gradient sync: the gradient of 'b' no longer lies in its buffer; it was "
                         "replaced after backward. Change gradients in place, and zero them with "
                         "zero_grad()"),
              std::string::npos)
        << error;
}

TEST(GradientSynchronizer, GX3ZeroingWithoutWaitThrows) {
  const auto errors =
      errors_with_two(2, 1, [](auto&, GradientSynchronizer& sync, const MeshParameters& params) {
        backward_of(params, 1);
        EXPECT_TRUE(throws_with<UsageError>([&] { sync.zero_grad(); },
                                            "zero_grad: the state is reducing; call wait() first, "
                                            "or abandon_step() after an exception"));
        sync.wait();
        EXPECT_TRUE(
            throws_with<UsageError>([&] { sync.set_required_accumulations(0); }, "found 0"));
        backward_of(params, 1);
      });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("are reduced already (state ready); call zero_grad() before the backward"),
              std::string::npos)
        << error;
}

TEST(GradientSynchronizer, AStepCanBeAbandonedOnAllRanks) {
  const auto errors = errors_with_two(
      2, 2,
      [](const ParallelState& state, GradientSynchronizer& sync, const MeshParameters& params) {
        for (int64_t backwards = 0; backwards < 2 * state.rank(); ++backwards)
          backward_of(params, 1);
        EXPECT_EQ(sync.state_text(), state.rank() == 0 ? "idle" : "reducing");
        sync.abandon_step();
        EXPECT_EQ(sync.state_text(), "idle");
        for (int backwards = 0; backwards < 2; ++backwards) backward_of(params, 1);
        sync.wait();
        for (const MeshParameter& param : params) EXPECT_TRUE(grad_is(param, 4));
      });
  EXPECT_EQ(errors, Sent(2));
}

TEST(GradientSynchronizer, GX4AnUnusedParameterIsNamedAndNoRankHangs) {
  const auto errors = errors_with_two(
      3, 2,
      [](const ParallelState& state, GradientSynchronizer& sync, const MeshParameters& params) {
        backward_of(params, 1);
        if (state.rank() == 1)
          backward_of({params[1]}, 1);
        else
          backward_of(params, 1);
        sync.wait();
      });
  const std::string expected =
      "gradient sync: 1 of 2 parameters received no gradient in one micro-batch or more (state "
      "accumulating 2/2): 'a' (1/2); check that the loss depends on them, or set "
      "GradientSynchronizerOptions::allow_unused_parameters";
  EXPECT_EQ(errors[1], expected);
  for (const int rank : {0, 2})
    EXPECT_NE(errors[rank].find("rank 1: " + expected), std::string::npos) << errors[rank];
}

TEST(GradientSynchronizer, GX5TheMeanOverTokensIsNotTheMeanOfMeans) {
  CollectiveLog log;
  run_ranks(2,
            [](const ParallelState& state) {
              const DeviceMesh mesh(state, {2}, {"cp"});
              const at::Tensor tokens =
                  state.rank() == 0 ? at::tensor({1., 2., 3., 4.}) : at::tensor({10.});
              const auto reduced = [&](GradientReduction kind) {
                const MeshParameter weight =
                    ones_on(mesh, {}, {Replicate{}}, "weight", at::kDouble);
                const at::Tensor local = at::ones({}, at::kDouble).requires_grad_(true);
                GradientSynchronizerOptions options = {.reduction = kind};
                const bool per_token = kind == GradientReduction::per_token;
                if (per_token) options.token_group = mesh.get_group();
                GradientSynchronizer sync({{weight, local}}, 1, 1, options);
                sync.bind();
                const at::Tensor of_tokens = weight.tensor * local * tokens;
                (kind == GradientReduction::mean ? of_tokens.mean() : of_tokens.sum()).backward();
                if (per_token) {
                  sync.wait(at::full({}, tokens.numel(), at::kLong));
                  EXPECT_EQ(local.grad().item<double>(), 10. / 5);  // also divides local gradients
                } else {
                  sync.wait();
                }
                return weight.tensor.grad().item<double>();
              };
              EXPECT_EQ(reduced(GradientReduction::per_token), 4.0);
              EXPECT_EQ(reduced(GradientReduction::mean), 6.25);
              EXPECT_EQ(reduced(GradientReduction::sum), 20);
            },
            {.log = &log});
  const Sent all = sent_by(log, 1);
  EXPECT_EQ(Sent(all.begin() + 1, all.begin() + 4),
            (Sent{"all_gather [0 1] 8", "all_reduce (sum) [0 1] 8", "all_reduce (sum) [0 1] 8"}));
}

}  // namespace
}  // namespace lockstep
