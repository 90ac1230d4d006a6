// Which parameters share learning rate and weight decay. The groups called G100 are those that
// Megatron Core forms for the same names.

#include "lockstep/optimizer/param_groups.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "lockstep/core/error.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::errors_of_ranks;
using testing::SmallNet;
using testing::throws_with;

using Names = std::vector<std::string>;

/// Weights as matrices, and biases and norms as vectors; default_description() distinguishes them.
std::vector<NamedParameter> params_of(const Names& names) {
  std::vector<NamedParameter> params;
  for (const std::string& name : names) {
    const bool vector = name.ends_with("bias") || name.find("norm") != std::string::npos;
    const at::Tensor tensor =
        at::zeros(vector ? std::vector<int64_t>{3} : std::vector<int64_t>{3, 2});
    params.push_back({name, tensor, default_description(tensor)});
  }
  return params;
}

const Names kTen = {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc1.weight",
                    "fc1.bias",     "fc2.weight", "fc2.bias",     "fc3.weight", "fc3.bias"};
const Names kWeights = {"conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "fc3.weight"};
const Names kBiases = {"conv1.bias", "conv2.bias", "fc1.bias", "fc2.bias", "fc3.bias"};

OptimizerConfig rate_of_a_hundredth() {
  OptimizerConfig config;
  config.lr = 0.01;
  return config;
}

/// The settings and names of each group.
using Expected = std::vector<std::pair<std::string, Names>>;

Expected grouped(const Names& names, const std::vector<ParamOverride>& overrides,
                 const OptimizerConfig& config = rate_of_a_hundredth()) {
  Expected found;
  for (const ParamGroup& group : group_params(params_of(names), config, overrides).groups) {
    found.emplace_back(to_string(group), group.names);
    EXPECT_EQ(group.lr, group.max_lr);
  }
  return found;
}

TEST(ParamGroups, G100FiveParametersDecayAndFiveDoNot) {
  const Expected expected = {{"max_lr 0.01, min_lr 0, wd_mult 1", kWeights},
                             {"max_lr 0.01, min_lr 0, wd_mult 0", kBiases}};
  EXPECT_EQ(grouped(kTen, {}), expected);
  EXPECT_EQ(grouped(kTen, {{.applies_to = matches_name("*.bias"), .wd_mult = 0}}), expected);
  EXPECT_EQ(grouped(kTen, {{.applies_to = matches_name("*"), .wd_mult = 1}}),
            (Expected{{"max_lr 0.01, min_lr 0, wd_mult 1", kTen}}));
}

TEST(ParamGroups, G100SevenAndSixWithNormalizedQueriesAndKeys) {
  Names names = kTen, decay = kWeights, none = kBiases;
  for (const char* name : {"q_layernorm.weight", "k_layernorm.weight", "layernorm.weight"})
    names.emplace_back(name);
  decay.insert(decay.end(), {"q_layernorm.weight", "k_layernorm.weight"});
  none.emplace_back("layernorm.weight");
  EXPECT_EQ(grouped(names,
                    {{.applies_to = matches_name("q_layernorm.*", "k_layernorm.*"), .wd_mult = 1}}),
            (Expected{{"max_lr 0.01, min_lr 0, wd_mult 1", decay},
                      {"max_lr 0.01, min_lr 0, wd_mult 0", none}}));
}

TEST(ParamGroups, G100OverlappingOverridesMakeThreeGroups) {
  Names fc(kTen.begin() + 4, kTen.end());
  const Expected expected = {{"max_lr 0.01, min_lr 0, wd_mult 1", fc},
                             {"max_lr 0.01, min_lr 0, wd_mult 0", {"conv2.weight", "conv2.bias"}},
                             {"max_lr 20, min_lr 10, wd_mult 0", {"conv1.weight", "conv1.bias"}}};
  std::vector<ParamOverride> overrides = {
      {.applies_to = matches_name("*conv*"), .wd_mult = 0},
      {.applies_to = matches_name("*conv1*"), .max_lr = 20, .min_lr = 10},
      {.applies_to = matches_name("fc?.bias"), .wd_mult = 1}};
  EXPECT_EQ(grouped(kTen, overrides), expected);
  std::swap(overrides[0], overrides[2]);
  EXPECT_EQ(grouped(kTen, overrides), expected);
}

TEST(ParamGroups, G100OverridesThatSayTheSameAgree) {
  const auto biases = [](const NamedParameter& param) { return param.tensor.dim() == 1; };
  const std::vector<ParamOverride> twice = {
      {.applies_to = matches_name("*.bias"), .min_lr = 1e-4, .wd_mult = 0},
      {.applies_to = biases, .min_lr = 1e-4, .wd_mult = 0}};
  EXPECT_EQ(grouped(kTen, twice), (Expected{{"max_lr 0.01, min_lr 0, wd_mult 1", kWeights},
                                            {"max_lr 0.01, min_lr 0.0001, wd_mult 0", kBiases}}));
}

TEST(ParamGroups, G100ConflictsNameParameterFieldAndBothValues) {
  EXPECT_TRUE(throws_with<ConfigError>(
      [] {
        grouped(kTen, {{.applies_to = matches_name("*conv*"), .wd_mult = 0},
                       {.applies_to = matches_name("*conv1*"), .wd_mult = 0.5}});
      },
      "parameter 'conv1.weight': wd_mult is set to 0 by override 1 of 2 and to 0.5 by override 2 "
      "of 2"));
}

TEST(ParamGroups, ComeInTheSameOrderWhicheverAreThere) {
  const std::vector<ParamOverride> overrides = {
      {.applies_to = matches_name("fc1.*"), .max_lr = 0.5},
      {.applies_to = matches_name("fc2.*"), .max_lr = 0.002},
      {.applies_to = matches_name("conv1.*"), .max_lr = 0.5, .min_lr = 0.1},
      {.applies_to = matches_name("conv2.*"), .wd_mult = 3}};
  const GroupedParams all = group_params(params_of(kTen), rate_of_a_hundredth(), overrides);
  const GroupedParams some = group_params(params_of({"fc1.weight", "fc2.bias"}),
                                          rate_of_a_hundredth(), overrides, ListedParams::some);
  Names rates;
  for (const ParamGroup& group : all.groups) rates.push_back(to_string(group));
  EXPECT_EQ(rates, (Names{"max_lr 0.01, min_lr 0, wd_mult 1", "max_lr 0.002, min_lr 0, wd_mult 0",
                          "max_lr 0.002, min_lr 0, wd_mult 1", "max_lr 0.01, min_lr 0, wd_mult 0",
                          "max_lr 0.01, min_lr 0, wd_mult 3", "max_lr 0.5, min_lr 0, wd_mult 0",
                          "max_lr 0.5, min_lr 0, wd_mult 1", "max_lr 0.5, min_lr 0.1, wd_mult 0",
                          "max_lr 0.5, min_lr 0.1, wd_mult 1"}));
  ASSERT_EQ(some.groups.size(), 3u);
  EXPECT_TRUE(some.groups[0].names.empty());
  EXPECT_EQ(some.groups[1].names, Names{"fc2.bias"});
  EXPECT_EQ(some.group_of, (std::vector<size_t>{2, 1}));
}

TEST(ParamGroups, NamesMatchWildcards) {
  const auto matches = [](const std::string& name, const std::string& pattern) {
    return matches_name(pattern)({name, {}, {}});
  };
  const std::string name = "decoder.layers.10.mlp.linear_fc1.weight";
  for (const char* pattern :
       {"decoder.layers.*.mlp.*", "*", "*.weight", "decoder*", "*layers.1?.*", "**fc1*weight**",
        "decoder.layers.10.mlp.linear_fc1.weight", "*.1*.w*"})
    EXPECT_TRUE(matches(name, pattern)) << pattern;
  for (const char* pattern : {"", "decoder", "*.bias", "decoder.layers.*.mlp", "?", "*layers.?.*",
                              "decoder.layers.10.mlp.linear_fc1.weight?", "weight*", "*fc2*"})
    EXPECT_FALSE(matches(name, pattern)) << pattern;
  EXPECT_TRUE(matches("", "*"));
  EXPECT_TRUE(matches("", ""));
  EXPECT_FALSE(matches("", "?"));
  EXPECT_TRUE(matches("aab", "*ab"));
  EXPECT_FALSE(matches_name(Names{})({name, {}, {}}));
  EXPECT_TRUE(matches_name("*.bias", name)({name, {}, {}}));
}

TEST(ParamGroups, RefuseWhatCannotBe) {
  const auto refuses = [](const ParamOverride& override, const std::string& part) {
    return throws_with<ConfigError>([&] { grouped(kTen, {override}); }, part);
  };
  const auto all = matches_name("*");
  const double infinite = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(refuses({.wd_mult = 0}, "override 1 of 1: applies_to is empty"));
  EXPECT_TRUE(refuses({.applies_to = all, .wd_mult = -1}, "wd_mult: found -1, allowed: >= 0"));
  EXPECT_TRUE(refuses({.applies_to = all, .max_lr = std::nan("")}, "max_lr: found nan"));
  EXPECT_TRUE(refuses({.applies_to = all, .min_lr = infinite}, "min_lr: found inf"));
  EXPECT_TRUE(refuses({.applies_to = all, .min_lr = 0.02},
                      "parameter 'conv1.weight': min_lr: found 0.02, allowed: <= max_lr (0.01)"));
  EXPECT_TRUE(refuses({.applies_to = matches_name("fc4.*"), .wd_mult = 0},
                      "override 1 of 1: applies to none of the 10 parameters"));
}

TEST(ParamGroups, TheConfigurationDecouplesEmbeddingAndOutputLayer) {
  std::vector<NamedParameter> params = params_of(kTen);
  params[0].description.is_embedding_or_output = true;
  OptimizerConfig config = rate_of_a_hundredth();
  config.min_lr = 0.001;
  config.decoupled_lr = 0.5;
  const auto last = [&](const std::vector<ParamOverride>& overrides = {}) {
    const ParamGroup group = group_params(params, config, overrides).groups.back();
    EXPECT_EQ(group.names, Names{"conv1.weight"});
    return to_string(group);
  };
  EXPECT_EQ(last(), "max_lr 0.5, min_lr 0.001, wd_mult 1");
  config.decoupled_min_lr = 0.02;
  EXPECT_EQ(last({{.applies_to = matches_name("conv*"), .wd_mult = 0}}),
            "max_lr 0.5, min_lr 0.02, wd_mult 0");
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { last({{.applies_to = matches_name("conv*"), .max_lr = 0.1}}); },
      "max_lr is set to 0.5 by optimizer.decoupled_lr and to 0.1 by override 1 of 1"));
}

/// The example of docs/library.md.
struct WordNet : torch::nn::Module {
  WordNet() {
    embedding = register_module("embedding", torch::nn::Embedding(8, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    head = register_module("head", torch::nn::Linear(4, 8));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(ParamGroups, AScheduleSetsEachGroupByItsOwnRates) {
  WordNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  OptimizerConfig config = rate_of_a_hundredth();
  config.lr_warmup_iters = 10;
  config.weight_decay = 0.1;
  constexpr int64_t kIterations = 110, kBatch = 4;
  // [groups]
  lockstep::Optimizer optimizer(
      {&ddp}, config,
      {{.applies_to = lockstep::matches_name("embedding.*"), .max_lr = 0.1, .min_lr = 0.02},
       {.applies_to = lockstep::matches_name("*norm*", "*.bias"), .wd_mult = 0.5}});
  const lockstep::OptimizerParamScheduler scheduler(config, kIterations, kBatch);
  for (int64_t samples = 0; samples < kIterations * kBatch; samples += kBatch) {
    optimizer.apply_schedule(scheduler, samples);  // each group by its own max_lr and min_lr
    // forward, backward, optimizer.step() as above
  }
  // [groups]
  const auto rates = [&] {
    std::vector<double> list;
    for (const ParamGroup& group : optimizer.param_groups()) list.push_back(group.lr);
    return list;
  };
  ASSERT_EQ(optimizer.param_groups().size(), 3u);
  EXPECT_EQ(optimizer.param_groups()[0].names, Names{"head.weight"});
  EXPECT_EQ(optimizer.param_groups()[1].names, (Names{"norm.weight", "norm.bias", "head.bias"}));
  EXPECT_EQ(optimizer.param_groups()[2].names, Names{"embedding.weight"});
  for (const auto& [samples, rate, fast] : std::vector<std::tuple<int64_t, double, double>>{
           {20, 0.005, 0.05}, {40, 0.01, 0.1}, {240, 0.005, 0.06}, {440, 0, 0.02}}) {
    optimizer.apply_schedule(scheduler, samples);
    EXPECT_NEAR(rates()[0], rate, 1e-15) << samples;
    EXPECT_NEAR(rates()[1], rate, 1e-15) << samples;
    EXPECT_NEAR(rates()[2], fast, 1e-15) << samples;
    EXPECT_EQ(optimizer.learning_rate(), rates()[0]);
    EXPECT_EQ(optimizer.weight_decay(), 0.1);
  }
  optimizer.set_learning_rate(0.25);
  EXPECT_EQ(rates(), (std::vector<double>{0.25, 0.25, 0.02}));
  optimizer.set_learning_rate(2, 0.75);
  EXPECT_EQ(rates(), (std::vector<double>{0.25, 0.25, 0.75}));
  EXPECT_TRUE(throws_with<UsageError>([&] { optimizer.set_learning_rate(3, 1); },
                                      "found group 3, allowed: < 3"));
}

TEST(ParamGroups, AnOverrideMayApplyOnOtherPipelineStagesOnly) {
  const auto errors = [](int64_t pipeline) {
    return errors_of_ranks(
        2,
        [](const ParallelState& state) {
          DescribedParams net;
          net.add("stage" + std::to_string(state.group(GroupKind::pp).rank()), {2, 2});
          DistributedDataParallel ddp(net, state);
          const Optimizer optimizer({&ddp}, {},
                                    {{.applies_to = matches_name("stage1"), .wd_mult = 0}});
        },
        {.sizes = {.pipeline = pipeline}});
  };
  for (const std::string& error : errors(2)) EXPECT_EQ(error, "");
  for (const std::string& error : errors(1))
    EXPECT_NE(error.find("applies to none of the 1 parameters, such as 'stage0'"),
              std::string::npos)
        << error;
}

TEST(ParamGroups, CopiesOfATiedParameterMustHaveEqualSettings) {
  const auto errors = [](const std::vector<ParamOverride>& overrides) {
    return errors_of_ranks(
        2,
        [&](const ParallelState& state) {
          DescribedParams net;
          net.add(state.rank() == 0 ? "words" : "output", {2, 2}, {.tie = Tie{"table"}});
          DistributedDataParallel ddp(net, state);
          const Optimizer optimizer({&ddp}, {}, overrides);
        },
        {.sizes = {.pipeline = 2}});
  };
  const std::vector<ParamOverride> both = {
      {.applies_to = matches_name("words", "output"), .max_lr = 0.1}};
  for (const std::string& error : errors(both)) EXPECT_EQ(error, "");
  for (const std::string& error : errors({{.applies_to = matches_name("words"), .max_lr = 0.1}}))
    EXPECT_EQ(error,
              "the parameter tied as 'table' on the first and the last stage: found copies with "
              "[2, 2] Double, max_lr 0.1, min_lr 0, wd_mult 1 on rank 0 and with [2, 2] Double, "
              "max_lr 0.0003, min_lr 0, wd_mult 1 on rank 1, allowed: equal settings");
}

}  // namespace
}  // namespace lockstep
