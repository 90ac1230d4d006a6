#include "lockstep/optimizer/clip_grads.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/unscale_grads.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::DescribedParams;
using testing::run_ranks;
using testing::SmallNet;
using testing::throws_with;
using enum MeshAxis;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One parameter of a model, with its whole gradient.
struct GlobalParam {
  std::string name;
  at::Tensor grad;
  ParamDescription description = {};
  int64_t stage = -1;  ///< of two stages; -1: both
};

/// The rows of the output layer before its padding; a second rank of tp has only padding.
constexpr int64_t kOutputRows = 3;

/// All kinds of parameters. Every third element of a gradient is zero, and all padding.
std::vector<GlobalParam> global_model() {
  int64_t count = 0;
  const auto grad = [&](std::vector<int64_t> shape) {
    at::Tensor values = at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) + ++count);
    values.slice(0, 0, std::nullopt, 3).zero_();
    return values.view(shape);
  };
  constexpr auto kSum = GradientState::partial_sum;
  const at::Tensor padded = grad({6, 2});
  padded.slice(0, kOutputRows).zero_();
  return {
      {"embedding", grad({8, 3}), {.placements = {{tp, Shard{0}}}, .tie = Tie{"embedding"}}},
      {"norm", grad({5}), {.gradient_states = {{tp, kSum}}}, 0},
      {"matrix", grad({6, 4}), {.placements = {{tp, Shard{1}}}}, 0},
      {"router", grad({4, 3}), {}, 1},
      {"experts",
       grad({4, 2, 3}),
       {.placements = {{ep, Shard{0}}, {etp, Shard{1}}}, .is_expert = true},
       1},
      {"expert norm",
       grad({4, 3}),
       {.placements = {{ep, Shard{0}}}, .gradient_states = {{etp, kSum}}, .is_expert = true},
       1},
      {"expert scale", grad({7}), {.gradient_states = {{ep, kSum}}, .is_expert = true}, 1},
      {"on all stages", grad({2}), {.gradient_states = {{pp, kSum}}}},
      {"same on all stages", grad({3, 5}), {.stages = StageCopies::all}},
      {"output", padded, {.placements = {{tp, Shard{0}}}, .unpadded_rows = kOutputRows}, 1},
  };
}

double reference_norm(double p) {
  std::vector<at::Tensor> all;
  for (const GlobalParam& param : global_model()) all.push_back(param.grad.flatten());
  return at::linalg_vector_norm(at::cat(all), p).item<double>();
}

/// A rank's part of the model, and its contribution to each gradient: of the ranks whose terms are
/// added, one contributes everything.
struct LocalModel {
  explicit LocalModel(const ParallelState& state,
                      const DistributedDataParallelConfig& config = {}) {
    const RankGrids& grids = state.grids();
    const auto position = [&](GroupKind kind) {
      const RankList ranks = grids.group_of(kind, state.rank());
      return std::find(ranks.begin(), ranks.end(), state.rank()) - ranks.begin();
    };
    const int64_t stages = grids.size(GroupKind::pp), stage = position(GroupKind::pp);
    for (const GlobalParam& param : global_model()) {
      if (stages > 1 && param.stage >= 0 && param.stage != stage) continue;
      const bool is_expert = param.description.is_expert;
      at::Tensor grad = param.grad;
      const bool added_over_stages =
          param.stage < 0 && param.description.stages == StageCopies::one;
      bool contributes = position(is_expert ? GroupKind::expert_dp : GroupKind::dp_cp) == 0 &&
                         (!added_over_stages || stage == 0);
      const std::map<MeshAxis, GroupKind> kinds = {
          {tp, GroupKind::tp}, {etp, GroupKind::expert_tp}, {ep, GroupKind::ep}};
      for (const auto& [axis, kind] : kinds) {
        if (const auto placement = param.description.placement(axis);
            const auto* shard = std::get_if<Shard>(&placement))
          grad = grad.chunk(grids.size(kind), shard->dim)[position(kind)].contiguous();
        if (param.description.gradient_state(axis) != GradientState::complete)
          contributes = contributes && position(kind) == 0;
      }
      net.add(param.name, grad.sizes().vec(), param.description);
      grads[param.name] = contributes ? grad : at::zeros_like(grad);
    }
    ddp = std::make_unique<DistributedDataParallel>(net, state, config);
    net.backward([&](const std::string& name, auto&) { return grads.at(name); });
    finalize_model_grads({ddp.get()}, at::zeros({}));
  }

  std::vector<DistributedDataParallel*> models() const { return {ddp.get()}; }

  DescribedParams net;
  std::map<std::string, at::Tensor> grads;
  std::unique_ptr<DistributedDataParallel> ddp;
};

struct Layout {
  int64_t world;
  ParallelSizes sizes;
};

const std::vector<Layout> kLayouts = {
    {1, {}},
    {2, {.tensor = 2}},
    {2, {.pipeline = 2}},
    {4, {.tensor = 2, .pipeline = 2}},
    {4, {.context = 2, .expert = 2}},
    {4, {.tensor = 2, .expert = 2}},
    {4, {.tensor = 2, .expert = 2, .expert_tensor = 1}},
    {4, {.expert = 2, .expert_tensor = 2}},
    {8, {.tensor = 2, .pipeline = 2, .expert = 2}},
    {8, {.tensor = 2, .pipeline = 2, .expert = 4, .expert_tensor = 1}},
};

/// Expects the same bits on all ranks.
void expect_same_on_all_ranks(const ParallelState& state, const at::Tensor& value) {
  at::Tensor all = at::empty({state.world_size()}, value.options());
  all_gather(state.world(), all, value.reshape({1}), "value").wait();
  EXPECT_TRUE(at::equal(all, value.expand({state.world_size()}))) << all;
}

TEST(GradNorm, G103IsTheSameOnEveryLayoutForEveryNorm) {
  for (const Layout& layout : kLayouts)
    for (const bool sharded : {false, true})
      run_ranks(layout.world,
                [&](const ParallelState& state) {
                  DistributedDataParallelConfig config;
                  config.use_distributed_optimizer = sharded;
                  const LocalModel model(state, config);
                  for (const double p : {1.0, 2.0, 3.0, 7.5, kInfinity}) {
                    const at::Tensor norm = grad_norm(model.models(), p);
                    EXPECT_NEAR(norm.item<double>(), reference_norm(p), 1e-14 * reference_norm(p))
                        << "p " << p << ", rank " << state.rank() << " of " << layout.world
                        << ", tp " << layout.sizes.tensor << ", ep " << layout.sizes.expert
                        << ", sharded " << sharded;
                    expect_same_on_all_ranks(state, norm);
                  }
                },
                {.sizes = layout.sizes});
}

TEST(CountZeros, CountsEachElementOfTheModelOnceAndNoPadding) {
  int64_t expected = 0;
  for (const GlobalParam& param : global_model()) {
    const at::Tensor counted = param.grad.slice(0, 0, param.description.unpadded_rows);
    expected += counted.numel() - at::count_nonzero(counted).item<int64_t>();
  }
  EXPECT_EQ(expected, 8 + 2 + 8 + 4 + 8 + 4 + 3 + 1 + 5 + 2);
  for (const Layout& layout : kLayouts)
    for (const bool sharded : {false, true})
      run_ranks(layout.world,
                [&](const ParallelState& state) {
                  DistributedDataParallelConfig config;
                  config.use_distributed_optimizer = sharded;
                  const LocalModel model(state, config);
                  EXPECT_EQ(count_zeros(model.models()).item<int64_t>(), expected);
                },
                {.sizes = layout.sizes});
}

TEST(CountZeros, GradientsThatAreNotFinalOnSomeStagesEndTheOthers) {
  const auto errors =
      testing::errors_of_open_ranks(3,
                                    [](const ParallelState& state) {
                                      DescribedParams net;
                                      if (state.rank() == 1)
                                        net.add("own", {4});
                                      else
                                        net.add("embedding", {4}, {.tie = Tie{"embedding"}});
                                      DistributedDataParallelConfig config;
                                      config.calculate_per_token_loss = false;
                                      DistributedDataParallel ddp(net, state, config);
                                      net.backward([](auto&, auto&) { return 1.0; });
                                      ddp.finish_grad_sync();
                                      count_zeros({&ddp});
                                    },
                                    {.sizes = {.pipeline = 3}, .timeout = std::chrono::seconds(6)});
  testing::expect_all_contain(errors, "count_zeros: the gradients are not final", "");
}

/// "operation group bytes" of the calls with this label.
std::vector<std::string> sent(const CollectiveLog& log, const std::string& label) {
  std::vector<std::string> calls;
  for (const CollectiveRecord& call : log.of_rank(0))
    if (call.label == label)
      calls.push_back(call.operation + " " + call.group + " " + std::to_string(call.bytes));
  return calls;
}

TEST(GradNorm, SendsEightBytesOverEachGridThatItHasTo) {
  const auto sent_on = [](const Layout& layout, bool sharded) {
    CollectiveLog log;
    run_ranks(layout.world,
              [&](const ParallelState& state) {
                DistributedDataParallelConfig config;
                config.use_distributed_optimizer = sharded;
                grad_norm(LocalModel(state, config).models());
              },
              {.sizes = layout.sizes, .log = &log});
    return sent(log, "gradient norm");
  };
  using Sent = std::vector<std::string>;
  EXPECT_EQ(sent_on({2, {}}, false), Sent{});
  EXPECT_EQ(sent_on({2, {}}, true), Sent{"all_reduce (sum) intra-optimizer 8"});
  EXPECT_EQ(sent_on({4, {.tensor = 2}}, false), Sent{"all_reduce (sum) tp-pp 8"});
  EXPECT_EQ(sent_on({4, {.expert = 2}}, false), Sent{"all_reduce (sum) tp-ep-pp 8"});
  EXPECT_EQ(sent_on({4, {.tensor = 2, .expert = 2}}, false),
            (Sent{"all_reduce (sum) tp-pp 8", "all_reduce (sum) tp-ep-pp 8"}));
  EXPECT_EQ(sent_on({4, {.tensor = 2, .expert = 2}}, true),
            Sent{"all_reduce (sum) intra-optimizer 8"});
}

TEST(GradNorm, WhatIsNotFiniteOnOneRankIsNotFiniteOnAll) {
  for (const double poison : {kInfinity, std::nan("")})
    for (const double p : {1.0, 2.0, 3.0, kInfinity})
      run_ranks(4,
                [&](const ParallelState& state) {
                  LocalModel model(state);
                  if (state.rank() == 3) model.net.grad("experts").view(-1)[2] = poison;
                  const double norm = grad_norm(model.models(), p).item<double>();
                  EXPECT_FALSE(std::isfinite(norm));
                  EXPECT_TRUE(p != kInfinity || norm == kInfinity);  // even for a NaN
                  const at::Tensor before = model.net.grad("router").clone();
                  EXPECT_FALSE(std::isfinite(clip_grad_norm_(model.models(), 0.1, p)));
                  EXPECT_TRUE(at::equal(before, model.net.grad("router")));
                  EXPECT_TRUE(found_inf(model.models()));
                },
                {.sizes = {.tensor = 2, .expert = 2}});
}

TEST(ClipGradNorm, EveryNormEqualsPyTorch) {
  for (const double p : {1.0, 2.0, 2.5, 4.0, kInfinity}) {
    SmallNet ours, theirs;
    DistributedDataParallel ddp(ours, ParallelState::single_process());
    ours.loss(SmallNet::samples(0, 4)).backward();
    theirs.loss(SmallNet::samples(0, 4)).backward();
    finalize_model_grads({&ddp}, at::ones({}));
    const double norm = clip_grad_norm_({&ddp}, 0.1, p);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(theirs.parameters(), 0.1, p), 1e-13 * norm);
    for (size_t i = 0; i < ours.parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(ours.parameters()[i].grad(), theirs.parameters()[i].grad(), 1e-12));
  }
}

/// A wrapped parameter with the gradient `values`.
struct Single {
  explicit Single(const at::Tensor& values, const DistributedDataParallelConfig& config = {})
      : ddp(net.add("weight", values.sizes().vec(), {}, values.scalar_type()),
            ParallelState::single_process(), config) {
    net.backward([](auto&, auto&) { return 0.0; });
    finalize_model_grads({&ddp}, at::ones({}));
    net.grad("weight").copy_(values);
  }
  DescribedParams net;
  DistributedDataParallel ddp;
};

TEST(GradNorm, NoPowerOverflowsOrVanishes) {
  for (const double size : {1e-200, 1e-30, 1.0, 1e30, 1e200}) {
    Single grads(at::tensor({3 * size, 0., -4 * size}, at::kDouble));
    for (const double p : {1.0, 4.0, 100.0}) {
      const double expected = size * std::pow(std::pow(3, p) + std::pow(4, p), 1 / p);
      EXPECT_NEAR(grad_norm({&grads.ddp}, p).item<double>(), expected, 1e-14 * expected) << p;
    }
  }
  Single zero(at::zeros({5}, at::kDouble));
  for (const double p : {1.0, 2.0, 3.0, kInfinity})
    EXPECT_EQ(grad_norm({&zero.ddp}, p).item<double>(), 0) << p;
}

TEST(GradNorm, HundredByHundredOnesInEveryDtype) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    DistributedDataParallelConfig config;
    config.grad_reduce_in_fp32 = false;
    Single grads(at::ones({100, 100}, dtype), config);
    EXPECT_EQ(grads.ddp.buffers().front()->grad_data().scalar_type(), dtype);
    EXPECT_EQ(grad_norm({&grads.ddp}).item<double>(), 100) << dtype;
    EXPECT_NEAR(grad_norm({&grads.ddp}, 4).item<double>(), 10, 1e-12) << dtype;
    EXPECT_EQ(grad_norm({&grads.ddp}, kInfinity).item<double>(), 1) << dtype;
    EXPECT_EQ(count_zeros({&grads.ddp}).item<int64_t>(), 0) << dtype;
  }
}

TEST(GradNorm, WhatStagesHoldWithoutATieCountsForEachOfThem) {
  const auto norm_of = [](const ParamDescription& description) {
    double norm = 0;
    run_ranks(2,
              [&](const ParallelState& state) {
                DescribedParams net;
                net.add("norm", {4}, description);
                DistributedDataParallel ddp(net, state);
                net.backward([](const auto&, const auto&) { return 3.; });
                finalize_model_grads({&ddp}, testing::no_tokens());
                const double found = grad_norm({&ddp}).item<double>();
                if (state.rank() == 1) norm = found;
              },
              {.sizes = {.pipeline = 2}});
    return norm;
  };
  EXPECT_DOUBLE_EQ(norm_of({}), std::sqrt(2 * 4 * 9.));
  EXPECT_DOUBLE_EQ(norm_of({.gradient_states = {{pp, GradientState::partial_sum}}}),
                   std::sqrt(4 * 36.));
}

TEST(GradNorm, RefusesANormBelowOne) {
  Single grads(at::ones({2}));
  EXPECT_TRUE(throws_with<UsageError>([&] { grad_norm({&grads.ddp}, 0.5); }, "found 0.5"));
  EXPECT_TRUE(throws_with<UsageError>([&] { grad_norm({&grads.ddp}, std::nan("")); }, "found nan"));
  EXPECT_TRUE(throws_with<UsageError>([] { count_zeros({}); }, "count_zeros: no model"));
}

TEST(SkipsStep, G101ANormAboveTheThresholdOrNotFinite) {
  OptimizerConfig config;
  EXPECT_FALSE(skips_step(1e300, config));
  EXPECT_TRUE(skips_step(kInfinity, config));
  EXPECT_TRUE(skips_step(std::nan(""), config));
  config.grad_norm_skip_threshold = 1;
  EXPECT_TRUE(skips_step(2, config));
  EXPECT_FALSE(skips_step(1, config));
}

TEST(FoundInf, UnscalesInTheSamePass) {
  run_ranks(
      2,
      [](const ParallelState& state) {
        LocalModel model(state);
        std::map<std::string, at::Tensor> expected;
        for (const auto& [name, param] : model.net.params()) expected[name] = param.grad() / 1024;
        EXPECT_FALSE(found_inf(model.models(), 1. / 1024));
        for (const auto& [name, param] : model.net.params())
          EXPECT_TRUE(at::equal(param.grad(), expected[name])) << name;
        EXPECT_FALSE(found_inf(model.models()));
        if (state.rank() == 1) model.net.grad("norm")[4] = std::nan("");
        EXPECT_TRUE(found_inf(model.models()));
        EXPECT_TRUE(throws_with<UsageError>([&] { found_inf(model.models(), 0); }, "found 0"));
      },
      {.sizes = {.tensor = 2}});
}

TEST(FoundInf, AnOverflowInAShardIsSeenByAll) {
  // tp 2, dp 2: the shard of one data-parallel rank overflows when it is scaled.
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("weight", {300}, {}, at::kFloat);
              DistributedDataParallelConfig config;
              config.use_distributed_optimizer = true;
              DistributedDataParallel ddp(net, state, config);
              net.backward([](auto&, auto&) { return 1.0; });
              finalize_model_grads({&ddp}, at::zeros({}));
              EXPECT_FALSE(found_inf({&ddp}, 0.5));
              if (state.rank() == 3) net.grad("weight")[299] = 3e38;
              EXPECT_TRUE(found_inf({&ddp}, 2));
            },
            {.sizes = {.tensor = 2}, .log = &log});
  EXPECT_EQ(sent(log, "gradients that are not finite"),
            std::vector<std::string>(2, "all_reduce (max) intra-optimizer 8"));
}

}  // namespace
}  // namespace lockstep
