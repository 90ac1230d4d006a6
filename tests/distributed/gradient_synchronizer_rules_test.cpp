// How GradientSynchronizer groups, cuts, orders and refuses.

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::backward_of;
using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::grad_is;
using testing::ones_on;
using testing::run_ranks;
using testing::sent_by;
using testing::throws_with;
using Names = std::vector<std::string>;
using Sent = std::vector<std::string>;

DeviceMesh one_rank() { return {ParallelState::single_process(), {1}, {"dp"}}; }

std::vector<Names> bucket_names(const GradientSynchronizer& sync) {
  std::vector<Names> names;
  for (const BucketInfo& bucket : sync.buckets()) names.push_back(bucket.parameters);
  return names;
}

/// Parameters of each bucket, in launch order.
std::vector<size_t> bucket_sizes(const std::vector<MeshParameter>& params, double megabytes) {
  GradientSynchronizer sync({params}, megabytes, 1);
  sync.bind();
  std::vector<size_t> sizes;
  for (const Names& names : bucket_names(sync)) sizes.push_back(names.size());
  return sizes;
}

TEST(GradientSynchronizer, BucketsCountLocalElementsOfTheGradientsDtypeAndMayBeFull) {
  using Sizes = std::vector<size_t>;
  constexpr int64_t kMebi = 1 << 20;
  const DeviceMesh mesh = one_rank();
  const auto some = [&](size_t count, int64_t numel, at::ScalarType dtype = at::kFloat) {
    std::vector<MeshParameter> params;
    for (size_t i = 0; i < count; ++i)
      params.push_back(ones_on(mesh, {numel}, {Replicate{}}, "", dtype));
    return params;
  };
  EXPECT_EQ(bucket_sizes(some(4, kMebi / 8), 1), (Sizes{2, 2}));     // half a MiB each: exact fit
  EXPECT_EQ(bucket_sizes(some(3, kMebi / 4), 1), (Sizes{1, 1, 1}));  // one MiB each
  EXPECT_EQ(bucket_sizes(some(3, kMebi / 4 + 1), 1), (Sizes{1, 1, 1}));
  EXPECT_EQ(bucket_sizes(some(5, kMebi / 8 + 1), 1.5), (Sizes{2, 2, 1}));
  EXPECT_EQ(bucket_sizes(some(4, kMebi / 4, at::kBFloat16), 1), (Sizes{2, 2}));
  std::vector<MeshParameter> wide = some(4, kMebi / 4, at::kBFloat16);
  for (const MeshParameter& param : wide) param.tensor.set_grad_dtype(at::kFloat);
  EXPECT_EQ(bucket_sizes(wide, 1), (Sizes{1, 1, 1, 1}));

  run_ranks(4, [&](const ParallelState& state) {  // each rank holds half of each parameter
    const DeviceMesh grid(state, {2, 2}, {"dp", "tp"});
    std::vector<MeshParameter> params;
    for (int i = 0; i < 4; ++i)
      params.push_back(ones_on(grid, {kMebi / 4}, {Replicate{}, Shard{0}}, ""));
    EXPECT_EQ(bucket_sizes(params, 1), (Sizes{2, 2}));
  });
}

TEST(GradientSynchronizer, ParameterGroupsDtypesAndMeshesHaveBucketsOfTheirOwn) {
  CollectiveLog log;
  run_ranks(
      4,
      [](const ParallelState& state) {
        const DeviceMesh grid(state, {2, 2}, {"dp", "tp"});
        const std::vector<Placement> both = {Replicate{}, Replicate{}},
                                     dp = {Replicate{}, Shard{0}};
        MeshParameter norm = ones_on(grid, {2}, both, "norm");
        norm.complete_axes = {"tp"};
        const MeshParameters first = {ones_on(grid, {4}, both, "both"),
                                      ones_on(grid, {4}, dp, "dp"),
                                      ones_on(grid, {4}, dp, "dp bf16", at::kBFloat16),
                                      norm,
                                      ones_on(grid, {4}, {Shard{0}, Shard{0}}, "nowhere"),
                                      ones_on(grid, {6}, dp, "dp too")};
        const MeshParameters second = {ones_on(grid, {8}, dp, "other group")};
        GradientSynchronizer sync({first, second}, 1, 1);
        sync.bind();
        EXPECT_EQ(
            bucket_names(sync),
            (std::vector<Names>{{"dp bf16"}, {"dp too", "norm", "dp"}, {"both"}, {"other group"}}));
        EXPECT_EQ(sync.grad(norm).placements(), (std::vector<Placement>{Partial{}, Replicate{}}));
        EXPECT_TRUE(
            sync.describe().starts_with("sum reduction, 1 backwards a step, state idle\n"
                                        "bucket 0 ('dp bf16' to 'dp bf16'): all-reduce sum "
                                        "over dp ["))
            << sync.describe();
        EXPECT_TRUE(sync.describe().ends_with("12 bytes, 1 parameters\n1 local parameters\n") ||
                    sync.describe().ends_with("1 parameters\n1 local parameters\n"))
            << sync.describe();
        backward_of(first, static_cast<double>(state.rank() + 1));
        backward_of(second, 1);
        sync.wait();
        const double over_dp = state.rank() % 2 == 0 ? 1 + 3 : 2 + 4;
        for (const size_t i : {1, 2, 3, 5}) EXPECT_TRUE(grad_is(first[i], over_dp)) << i;
        EXPECT_TRUE(grad_is(first[0], 10));
        EXPECT_TRUE(grad_is(first[4], static_cast<double>(state.rank() + 1)));
        EXPECT_TRUE(grad_is(second[0], 2));
      },
      {.log = &log});
  Sent steps = sent_by(log, 3);
  steps.erase(steps.begin(), steps.begin() + 9);  // the comparisons of bind()
  EXPECT_EQ(steps, (Sent{"all_reduce (sum) [1 3] 4", "all_reduce (sum) [1 3] 28",
                         "all_reduce (sum) [0 1 2 3] 16", "all_reduce (sum) [1 3] 16"}));
}

TEST(GradientSynchronizer, BucketsLeaveInsideBackwardInOneOrderOnAllRanks) {
  CollectiveLog log;
  run_ranks(3,
            [&](const ParallelState& state) {
              const DeviceMesh mesh(state, {3}, {"dp"});
              std::vector<MeshParameter> params;
              for (int i = 0; i < 4; ++i)
                params.push_back(ones_on(mesh, {i + 1}, {Replicate{}}, std::to_string(i)));
              GradientSynchronizer sync({params}, 1. / (1 << 20), 1);
              sync.bind();
              const auto sent = [&] { return sent_by(log, state.rank()).size() - 2; };
              for (size_t i = 0; i < 4; ++i) {  // rank 1 uses the reverse order
                backward_of({params[state.rank() == 1 ? i : 3 - i]}, 1);
                EXPECT_EQ(sent(), state.rank() != 1 ? i + 1 : i < 3 ? 0 : 4);
              }
              sync.wait();
              for (const MeshParameter& param : params) EXPECT_TRUE(grad_is(param, 3));
            },
            {.log = &log});
  for (int64_t rank = 0; rank < 3; ++rank)
    EXPECT_EQ(sent_by(log, rank),
              (Sent{"all_gather [0 1 2] 8", "all_gather [0 1 2] 32", "all_reduce (sum) [0 1 2] 16",
                    "all_reduce (sum) [0 1 2] 12", "all_reduce (sum) [0 1 2] 8",
                    "all_reduce (sum) [0 1 2] 4"}));
}

TEST(GradientSynchronizer, TheNumberOfBackwardsMayChangeFromStepToStep) {
  const MeshParameters params = {ones_on(one_rank(), {2}, {Replicate{}}, "weight")};
  GradientSynchronizer sync({params}, 1, 1);
  sync.set_required_accumulations(2);
  sync.bind();
  for (const int64_t count : {2, 3, 1, 4}) {
    sync.set_required_accumulations(count);
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(
          sync.state_text(),
          i == 0 ? "idle" : "accumulating " + std::to_string(i) + "/" + std::to_string(count));
      backward_of(params, 1);
      if (i + 1 < count) {
        EXPECT_TRUE(throws_with<UsageError>([&] { sync.set_required_accumulations(7); },
                                            "set_required_accumulations: the state is "
                                            "accumulating"));
      }
    }
    sync.wait();
    EXPECT_TRUE(grad_is(params[0], static_cast<double>(count)));
    EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(); }, "wait: the state is ready"));
    sync.zero_grad();
  }
}

TEST(GradientSynchronizer, UnusedParametersAreZerosOnRequest) {
  run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    const MeshParameters params = {ones_on(mesh, {2}, {Replicate{}}, "a"),
                                   ones_on(mesh, {2}, {Replicate{}}, "b"),
                                   ones_on(mesh, {2}, {Replicate{}}, "c")};
    GradientSynchronizer sync({params}, 1, 2, {.allow_unused_parameters = true});
    sync.bind();
    if (state.rank() == 0) {
      backward_of({params[0], params[1]}, 1);
      EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(); }, "came before the last of 2"));
      backward_of({params[0], params[1]}, 1);
    }
    sync.wait();
    for (const size_t i : {0, 1, 2}) EXPECT_TRUE(grad_is(params[i], i == 2 ? 0 : 2));
  });
}

TEST(GradientSynchronizer, ParametersStayWhereTheyAreAndGradientsOutliveIt) {
  const MeshParameters params = {ones_on(one_rank(), {2}, {Replicate{}}, "weight")};
  const void* const place = params[0].tensor.data_ptr();
  {
    GradientSynchronizer sync({params}, 1, 1);
    sync.bind();
    backward_of(params, 3);
    sync.wait();
  }
  EXPECT_EQ(params[0].tensor.data_ptr(), place);
  EXPECT_TRUE(grad_is(params[0], 3));
  EXPECT_FALSE(torch::autograd::impl::post_acc_grad_hooks(params[0].tensor));
}

TEST(GradientSynchronizer, BindTwiceAndTwoFrontsAreRefused) {
  const MeshParameters params = {ones_on(one_rank(), {2}, {Replicate{}}, "weight")};
  GradientSynchronizer sync({params}, 1, 1);
  EXPECT_TRUE(
      throws_with<UsageError>([&] { sync.wait(); }, "wait: the state is unbound; call bind"));
  EXPECT_TRUE(
      throws_with<UsageError>([&] { sync.zero_grad(); }, "zero_grad: the state is unbound"));
  sync.unbind();  // nothing to do
  sync.bind();
  EXPECT_TRUE(
      throws_with<UsageError>([&] { sync.bind(); }, "bind: the state is idle; call unbind"));
  GradientSynchronizer another({params}, 1, 1);
  const char* const taken = "'weight' has a post-accumulate-gradient hook already";
  EXPECT_TRUE(throws_with<UsageError>([&] { another.bind(); }, taken));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        DistributedDataParallel ddp(std::vector<NamedParameter>{{"weight", params[0].tensor, {}}},
                                    ParallelState::single_process());
      },
      taken));
  sync.unbind();
  another.bind();
  backward_of(params, 2);
  another.wait();
  EXPECT_TRUE(grad_is(params[0], 2));
}

TEST(GradientSynchronizer, UnbindWaitsForWhatIsUnderWay) {
  run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    const MeshParameters params = {ones_on(mesh, {100000}, {Replicate{}}, "weight")};
    GradientSynchronizer sync({params}, 1, 1);
    for (int round = 0; round < 5; ++round) {
      sync.bind();
      backward_of(params, 1);
      const at::Tensor grad = params[0].tensor.grad();
      sync.unbind();
      EXPECT_TRUE(grad.eq(2).all().item<bool>());
      EXPECT_FALSE(params[0].tensor.grad().defined());
    }
  });
}

// Without a bucket, nothing else shows that a step has ended.
TEST(GradientSynchronizer, LocalGradientsAreDividedByTheirTokensOnce) {
  const ParallelState state = ParallelState::single_process();
  const at::Tensor weight = at::ones({3}).requires_grad_(true), tokens = at::full({1}, 4);
  GradientSynchronizer sync(
      {{weight}}, 1, 1, {.reduction = GradientReduction::per_token, .token_group = state.world()});
  sync.bind();
  for (int step = 0; step < 2; ++step) {
    backward_of({weight}, 2);
    sync.wait(tokens);
    EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(tokens); }, "divided by their tokens"));
    EXPECT_TRUE(grad_is(weight, 0.5));
    sync.zero_grad();
  }
}

TEST(GradientSynchronizer, ATokenCountThatOneRankGetsWrongEndsAll) {
  const std::pair<at::Tensor, const char*> wrong[] = {
      {at::full({}, -1), "wait: num_tokens: found -1, allowed: a count >= 0"},
      {at::full({}, NAN), "wait: num_tokens: found nan, allowed: a count >= 0"},
      {at::ones({2}), "wait: num_tokens must have one element"}};
  for (const auto& [tokens, text] : wrong) {
    const auto errors =
        testing::errors_of_open_ranks(2, [&, &of_one = tokens](const ParallelState& state) {
          const DeviceMesh mesh(state, {2}, {"dp"});
          const MeshParameters params = {ones_on(mesh, {2}, {Replicate{}}, "weight")};
          GradientSynchronizer sync(
              {params}, 1, 1,
              {.reduction = GradientReduction::per_token, .token_group = state.world()});
          sync.bind();
          backward_of(params, 1);
          sync.wait(state.rank() == 1 ? of_one : at::full({}, 4));
        });
    testing::expect_all_contain(errors, text, "");
  }
}

TEST(GradientSynchronizer, WrongArgumentsAreNamed) {
  const DeviceMesh mesh = one_rank();
  const MeshParameter weight = ones_on(mesh, {2}, {Replicate{}}, "weight");
  const auto refuses = [](const std::vector<MeshParameters>& groups, double size, int64_t count,
                          const GradientSynchronizerOptions& options, const std::string& part) {
    return throws_with<UsageError>(
        [&] { GradientSynchronizer(groups, size, count, options).bind(); }, part);
  };
  const GradientSynchronizerOptions plain;
  EXPECT_TRUE(refuses({{weight}}, 0, 1, plain, "bucket_size_mb: found 0, allowed: > 0"));
  EXPECT_TRUE(refuses({{weight}}, 1, 0, plain, "require_accumulations: found 0, allowed: >= 1"));
  EXPECT_TRUE(refuses({{weight}, {weight}}, 1, 1, plain,
                      "parameter 'weight' is in two parameter groups, once as 'weight'"));
  const DTensor partial = DTensor::from_local(at::ones({2}).requires_grad_(), mesh, {Partial{}});
  EXPECT_TRUE(
      refuses({{MeshParameter(partial, "term")}}, 1, 1, plain,
              "parameter 'term': found Partial(sum) on axis 'dp', allowed: Replicate, Shard"));
  MeshParameter norm = weight;
  norm.complete_axes = {"tp"};
  EXPECT_TRUE(refuses({{norm}}, 1, 1, plain, "parameter 'weight': complete on axis 'tp', allowed"));
  const char* const tokens = "token_group: found none with the reduction per-token, allowed: one";
  EXPECT_TRUE(refuses({{weight}}, 1, 1, {.reduction = GradientReduction::per_token}, tokens));
  EXPECT_TRUE(refuses({{weight}}, 1, 1, {.token_group = mesh.get_group()},
                      "token_group: found one with the reduction sum"));
  GradientSynchronizer sync({{weight}}, 1, 1);
  EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(at::ones({})); },
                                      "wait: num_tokens was given, but the reduction is sum"));
  GradientSynchronizer counting(
      {{weight}}, 1, 1,
      {.reduction = GradientReduction::per_token, .token_group = mesh.get_group()});
  EXPECT_TRUE(throws_with<UsageError>([&] { counting.wait(); }, "wait: num_tokens is missing"));
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)sync.grad(norm); }, "grad: 'weight' is not"));
}

TEST(GradientSynchronizer, RanksWithDifferentParametersAllThrow) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    GradientSynchronizer sync({{ones_on(mesh, {2 + state.rank()}, {Replicate{}}, "weight")}}, 1, 1);
    sync.bind();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("parameter 'weight' is [2] Float, trained"), std::string::npos) << error;
}

}  // namespace
}  // namespace lockstep
