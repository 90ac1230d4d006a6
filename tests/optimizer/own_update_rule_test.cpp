#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

#include "lion.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::CollectiveLog;
using testing::DescribedParams;
using testing::expect_close;
using testing::kClip;
using testing::kDecay;
using testing::kLayers;
using testing::kRate;
using testing::kSamples;
using testing::kSteps;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;
using testing::train;
using testing::train_plainly;
using testing::Weights;
using testing::weights_of;

std::shared_ptr<const UpdateRule> lion(double beta1 = 0.9, StateDtype dtype = StateDtype::fp32) {
  return std::make_shared<Lion>(beta1, 0.99, dtype);
}

const Setting kSettingsOfRules[] = {
    {.ranks = 1, .distributed = false},
    {.ranks = 1, .bucket_size = 40},
    {.ranks = 2, .microbatches = 2, .distributed = false, .bucket_size = 40},
    {.ranks = 2, .microbatches = 2, .bucket_size = 40},
    {.ranks = 2, .overlap_gather = true, .bucket_size = 40},
    {.ranks = 2, .overlap_reduce = false, .overlap_gather = true},
    {.ranks = 4, .instances = 2, .overlap_gather = true, .bucket_size = 60}};

/// Parameters that are adjacent in memory are in different groups.
const std::vector<ParamOverride> kOwnGroups = {
    {.applies_to = matches_name("weight1", "bias?"), .max_lr = 0.03},
    {.applies_to = matches_name("weight2"), .wd_mult = 2}};

/// Lion with torch's tensors only, in fp64.
Weights lion_by_hand(bool groups) {
  const SmallNet net(kLayers);
  std::map<std::string, at::Tensor> means;
  return train_plainly(net, [&] {
    const at::NoGradGuard no_grad;
    for (const auto& item : net.named_parameters()) {
      const std::string& name = item.key();
      at::Tensor p = item.value();
      at::Tensor& m = means.try_emplace(name, at::zeros_like(p)).first->second;
      double rate = kRate, decay = p.dim() > 1 ? kDecay : 0;
      if (groups && (name == "weight1" || p.dim() == 1)) rate = 0.03;
      if (groups && name == "weight2") decay = 2 * kDecay;
      const at::Tensor direction = at::sgn(at::lerp(m, p.grad(), 0.1));
      p.mul_(1 - rate * decay).sub_(direction, rate);
      m.lerp_(p.grad(), 0.01);
    }
  });
}

TEST(OwnUpdateRule, LionFollowsPlainLibtorchInEverySetting) {
  for (const bool groups : {false, true}) {
    const Weights expected = lion_by_hand(groups);
    for (const Setting& setting : kSettingsOfRules)
      run_ranks(
          setting.ranks,
          [&](const ParallelState& state) {
            const auto overrides = groups ? kOwnGroups : std::vector<ParamOverride>();
            expect_close(train(state, setting, adamw_config(), at::kDouble, {}, overrides, lion()),
                         expected, 1e-9, setting.text());
          },
          setting.threads());
  }
}

TEST(OwnUpdateRule, SendsAReduceScatterAndAnAllGatherOfEveryBucketAsAdamDoes) {
  CollectiveLog log;
  const Setting setting = {.ranks = 2, .overlap_gather = true, .bucket_size = 60};
  testing::RankThreadOptions threads = setting.threads();
  threads.log = &log;
  run_ranks(
      2,
      [&](const ParallelState& state) {
        SmallNet net(kLayers, at::kBFloat16);
        DistributedDataParallel ddp(net, state, setting.ddp());
        const auto optimizer = make_optimizer({&ddp}, adamw_config(), {}, lion());
        const size_t before = log.of_rank(state.rank()).size();
        run_backwards(net, ddp, 0, 1, at::kBFloat16);
        reduce_gradients(ddp);
        optimizer->step();
        ddp.finish_param_sync();
        auto calls = log.of_rank(state.rank());
        calls.erase(calls.begin(), calls.begin() + static_cast<int64_t>(before));
        std::vector<std::pair<std::string, int64_t>> expected, found;
        for (const auto& bucket : ddp.buckets())
          expected.emplace_back("reduce_scatter (sum)", bucket.bytes);
        expected.emplace_back("all_reduce (sum)", 8);  // tokens
        expected.emplace_back("all_reduce (sum)", 8);  // norm
        const auto buckets = ddp.buckets();
        for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket)
          expected.emplace_back("all_gather", bucket->numel);  // bf16, half the bytes
        for (const auto& call : calls) found.emplace_back(call.operation, call.bytes);
        EXPECT_EQ(found, expected);
      },
      threads);
}

/// Values of the shape of `like`. They serve as weights and gradients in bf16.
at::Tensor narrow_value(const at::Tensor& like, double pace) {
  return at::sin(at::arange(like.numel(), at::kDouble) * pace).view(like.sizes());
}

/// Three steps on fp32 master weights, written out.
struct ByHand {
  at::Tensor master, mean;

  void step(const at::Tensor& grad, double decay, at::ScalarType kept) {
    const at::Tensor direction = (mean * 0.9 + grad * (1 - 0.9)).sign();
    master = master * (1 - kRate * decay) - direction * kRate;
    mean = (mean * 0.99 + grad * (1 - 0.99)).to(kept).to(at::kFloat);
  }
};

void expect_master_weights_follow(const ParallelState& state, bool distributed, StateDtype dtype) {
  DescribedParams module;
  module.add("weight", {31, 3}, {}, at::kBFloat16);
  module.add("bias", {7}, {.apply_weight_decay = false}, at::kBFloat16);
  std::map<std::string, ByHand> by_hand;
  for (const auto& [name, param] : module.params()) {
    const at::NoGradGuard no_grad;
    at::Tensor(param).copy_(narrow_value(param, 1.1));
    by_hand[name] = {param.detach().to(at::kFloat), at::zeros(param.sizes(), at::kFloat)};
  }
  const Setting setting = {.distributed = distributed, .bucket_size = 40};
  DistributedDataParallel ddp(module, state, setting.ddp());
  OptimizerConfig config = adamw_config(/*clip=*/0);
  config.loss_scale = 64;
  const auto optimizer = make_optimizer({&ddp}, config, {}, lion(0.9, dtype));
  const int64_t kept = dtype == StateDtype::bf16 ? 2 : 4;
  EXPECT_EQ(optimizer->state_bytes(), ddp.buffers()[0]->owned_numel() * (4 + kept));
  const at::ScalarType stored = dtype == StateDtype::bf16 ? at::kBFloat16 : at::kFloat;
  const auto grad_of = [](const at::Tensor& param, int step) {  // exact in bf16 and in the sum
    return (narrow_value(param, 0.7 + step) * 8).round() / 8;
  };
  for (int step = 0; step < 3; ++step) {
    ddp.zero_grad_buffer();
    module.backward([&](auto&&, const at::Tensor& param) {
      return grad_of(param, step) * optimizer->loss_scale() /
             static_cast<double>(state.world_size());
    });
    finalize_model_grads({&ddp}, at::full({}, 1.0 / static_cast<double>(state.world_size())));
    EXPECT_FALSE(optimizer->step().skipped);
    for (const auto& [name, param] : module.params())
      by_hand[name].step(grad_of(param, step).to(at::kFloat), param.dim() > 1 ? kDecay : 0, stored);
  }
  ddp.finish_param_sync();
  for (const auto& [name, param] : module.params())
    EXPECT_TRUE(at::equal(param, by_hand[name].master.to(at::kBFloat16))) << name;
  for (const StateSlice& slice : optimizer->state_slices()) {
    ASSERT_EQ(slice.values.size(), 2u);
    EXPECT_EQ(slice.values[0].name, "master");
    EXPECT_EQ(slice.values[1].name, "exp_avg");
    EXPECT_EQ(slice.values[1].tensor.scalar_type(), stored);
    const auto part = [&](const at::Tensor& whole) {
      return whole.view(-1).slice(0, slice.range.start, slice.range.end);
    };
    EXPECT_TRUE(at::equal(slice.values[0].tensor, part(by_hand[slice.parameter].master)));
    EXPECT_TRUE(
        at::equal(slice.values[1].tensor.to(at::kFloat), part(by_hand[slice.parameter].mean)));
  }
}

TEST(OwnUpdateRule, MasterWeightsLossScaleAndNarrowStateFollowOneProcessToTheBit) {
  for (const int64_t ranks : {1, 2})
    run_ranks(ranks, [&](const ParallelState& state) {
      for (const bool distributed : {false, true})
        for (const auto dtype : {StateDtype::fp32, StateDtype::bf16})
          expect_master_weights_follow(state, distributed, dtype);
    });
}

using SavedSlices = std::map<std::pair<std::string, std::string>, at::Tensor>;

/// Runs steps [first, last) of a net. Starts from `params` and `saved` if they are not empty.
Weights go_on(const ParallelState& state, const Setting& setting, int first, int last,
              const Weights& params, SavedSlices& saved) {
  SmallNet net(kLayers, at::kBFloat16);
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) net.parameters()[i].copy_(params[i]);
  }
  DistributedDataParallel ddp(net, state, setting.ddp());
  const auto optimizer = make_optimizer({&ddp}, adamw_config(), {}, lion());
  const auto key = [](const StateSlice& slice, const std::string& name) {
    return std::pair(slice.parameter + "@" + std::to_string(slice.range.start), name);
  };
  if (!saved.empty()) {
    for (StateSlice& slice : optimizer->state_slices())
      for (auto& [name, tensor] : slice.values) tensor.copy_(saved.at(key(slice, name)));
    optimizer->restore({.num_steps = first});
    optimizer->apply_master_weights();
  }
  for (int step = first; step < last; ++step) {
    ddp.zero_grad_buffer();
    run_backwards(net, ddp, step, 2, at::kBFloat16);
    reduce_gradients(ddp);
    EXPECT_FALSE(optimizer->step().skipped);
  }
  EXPECT_EQ(optimizer->num_steps(), last);
  ddp.finish_param_sync();
  for (const StateSlice& slice : optimizer->state_slices())
    for (const auto& [name, tensor] : slice.values) saved[key(slice, name)] = tensor.clone();
  return weights_of(net);
}

TEST(OwnUpdateRule, ASavedStateGoesOnToTheBit) {
  for (const Setting& setting : kSettingsOfRules)
    run_ranks(
        setting.ranks,
        [&](const ParallelState& state) {
          SavedSlices whole, parts;
          const Weights expected = go_on(state, setting, 0, 8, {}, whole);
          const Weights half = go_on(state, setting, 0, 4, {}, parts);
          const Weights found = go_on(state, setting, 4, 8, half, parts);
          ASSERT_EQ(parts.size(), whole.size());
          for (const auto& [key, tensor] : whole)
            EXPECT_TRUE(at::equal(parts.at(key), tensor)) << key.first << " " << key.second;
          for (size_t i = 0; i < expected.size(); ++i)
            EXPECT_TRUE(at::equal(found[i], expected[i])) << setting.text() << ", " << i;
        },
        setting.threads());
}

/// Scales a matrix's gradient to norm 1, so it needs the whole gradient.
struct UnitMatrices final : UpdateRule {
  UnitMatrices() : UpdateRule({.name = "unit_matrices", .unit = UpdateUnit::matrix}) {}

  void update(const UpdateRange& range) const override {
    EXPECT_EQ(range.weights.numel(), range.parameter->tensor.numel());
    const at::Tensor grad = range.gradient();
    range.write_weights(range.weights - range.learning_rate * grad / grad.norm());
  }
};

TEST(OwnUpdateRule, ARuleOfMatricesGetsThemWholeAndTheOthersTakeAdam) {
  const SmallNet net(kLayers);
  Weights bias, matrices;
  for (const at::Tensor& param : net.parameters())
    (param.dim() > 1 ? matrices : bias).push_back(param);
  torch::optim::AdamW adam(bias,
                           torch::optim::AdamWOptions(kRate).betas({0.9, 0.95}).weight_decay(0));
  const Weights expected = train_plainly(net, [&] {
    adam.step();
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : matrices) param.sub_(param.grad() / param.grad().norm(), kRate);
  });
  OptimizerConfig config = adamw_config();
  config.optimizer = OptimizerKind::sgd;  // replaced by the rule
  const auto is_matrix = [](const NamedParameter& param) { return param.tensor.dim() > 1; };
  for (const Setting& setting : kSettingsOfRules)
    run_ranks(
        setting.ranks,
        [&](const ParallelState& state) {
          expect_close(train(state, setting, config, at::kDouble, is_matrix, {},
                             std::make_shared<UnitMatrices>()),
                       expected, 1e-9, setting.text());
        },
        setting.threads());
}

TEST(OwnUpdateRule, WhatItCannotDoIsRefusedByName) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  const auto optimizer = [&](std::shared_ptr<const UpdateRule> rule) {
    return [&ddp, rule = std::move(rule)] { Optimizer({&ddp}, adamw_config(), {}, rule); };
  };
  EXPECT_TRUE(throws_with<ConfigError>(
      optimizer(std::make_shared<UnitMatrices>()),
      "update rule: found unit_matrices, but no parameter is a whole matrix"));
  EXPECT_TRUE(throws_with<ConfigError>(optimizer(lion(0.9, StateDtype::bf16)),
                                       "update rule lion, state exp_avg: found bf16, allowed with "
                                       "fp64 parameters: fp32"));
  const auto refused = [](UpdateStatement statement, const char* message) {
    EXPECT_TRUE(throws_with<UsageError>([&] { statement.validate(); }, message));
  };
  refused({}, "update rule: found no name");
  refused({.name = "x", .state = {{"master"}}}, "update rule x: found a state 'master', allowed");
  refused({.name = "x", .state = {{"a.b"}}}, "update rule x: found a state 'a.b', allowed");
  refused({.name = "x", .state = {{"a"}, {"a"}}}, "update rule x: found two states 'a'");
}

TEST(OwnUpdateRule, RanksWithOtherRulesAreToldOnAllRanks) {
  const std::shared_ptr<const UpdateRule> others[] = {nullptr, lion(0.95),
                                                      lion(0.9, StateDtype::bf16)};
  for (const auto& other : others)
    run_ranks(2, [&](const ParallelState& state) {
      SmallNet net(kLayers, at::kFloat);
      DistributedDataParallel ddp(net, state);
      const auto rule = state.rank() == 1 ? other : lion();
      EXPECT_TRUE(throws_with<CommunicationError>(
          [&] { Optimizer({&ddp}, adamw_config(), {}, rule); }, "update rule"));
      EXPECT_TRUE(throws_with<CommunicationError>(
          [&] { Optimizer({&ddp}, adamw_config(), {}, rule); },
          "lion (beta1 0.900000, beta2 0.990000), by range, state: exp_avg fp32"));
    });
}

TEST(OwnUpdateRule, AStepThatIsSkippedLeavesItsStateAlone) {
  run_ranks(2, [&](const ParallelState& state) {
    SmallNet net(kLayers);
    DistributedDataParallel ddp(net, state, Setting{}.ddp());
    OptimizerConfig config = adamw_config();
    config.grad_norm_skip_threshold = 1e-9;
    const auto optimizer = make_optimizer({&ddp}, config, {}, lion());
    const Weights before = weights_of(net);
    run_backwards(net, ddp, 0, 1, at::kDouble);
    reduce_gradients(ddp);
    EXPECT_TRUE(optimizer->step().skipped);
    ddp.finish_param_sync();
    for (const StateSlice& slice : optimizer->state_slices())
      EXPECT_TRUE(at::equal(slice.values.at(0).tensor, at::zeros_like(slice.values[0].tensor)));
    const Weights after = weights_of(net);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
  });
}

}  // namespace
}  // namespace lockstep
