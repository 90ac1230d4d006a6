#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/router_step.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/tests/support/throws_with.h"

#include "own_net.h"

// Models without mistakes raise no alarm, and each mistake is named with its parameter.

namespace lockstep::testing {
namespace {

void expect_equal(const LayoutReport& report) {
  EXPECT_TRUE(report.ok()) << to_string(report);
  for (const LayoutResult& result : report.layouts)
    for (const double difference : {result.loss, result.gradients, result.norm, result.weights})
      EXPECT_LE(difference, 1e-11) << to_string(result);
}

TEST(LayoutCheck, AModelWithoutMistakesIsEqualOnEveryLayout) {
  expect_equal(own_net::check(own_net::Mistake::none, own_net::good_layouts()));
}

std::shared_ptr<torch::nn::LinearImpl> make_linear(const ParallelContext&) {
  auto linear = std::make_shared<torch::nn::LinearImpl>(3, 2);
  linear->to(at::kDouble);
  return linear;
}

/// A model of torch::nn. On two ranks its gradients are larger by a factor.
LayoutReport check_linear(double factor, std::vector<at::Tensor>& weights,
                          const CheckOptions& options = {}) {
  return check_layouts(
      [&](const ParallelContext& context) {
        auto linear = make_linear(context);
        if (context.state.world().size() == 1) weights.push_back(linear->weight.detach().clone());
        return linear;
      },
      [factor](torch::nn::LinearImpl& linear, const StageInput& input) {
        const ProcessGroup dp = input.context.state.group(GroupKind::dp);
        const at::Tensor samples = at::arange(12, at::kDouble).view({4, 3}) + input.microbatch;
        const at::Tensor loss =
            linear.forward(samples.chunk(dp.size(), 0)[dp.rank()]).square().sum();
        return dp.size() == 1 ? loss : loss + (factor - 1) * (loss - loss.detach());
      },
      {{.ranks = 2}}, options);
}

TEST(LayoutCheck, ModulesOfLibtorchGetTheWeightsOfTheSeedInEveryProcess) {
  std::vector<at::Tensor> weights, others;
  for (const uint64_t process : {1, 2}) {
    at::manual_seed(process);
    expect_equal(check_linear(1, weights));
  }
  EXPECT_TRUE(check_linear(1, others, {.seed = 5}).ok());
  ASSERT_GE(weights.size(), 2U);
  for (const at::Tensor& weight : weights) EXPECT_TRUE(weight.equal(weights[0]));
  EXPECT_FALSE(others[0].equal(weights[0]));
}

TEST(LayoutCheck, SaysThatASmallDifferenceMayBeRounding) {
  std::vector<at::Tensor> weights;
  for (const auto& [factor, text] : {std::pair(1 + 1e-11, "this may be rounding"),
                                     std::pair(1 + 1e-7, "times what it should be")}) {
    const LayoutReport report = check_linear(factor, weights);
    ASSERT_FALSE(report.ok());
    EXPECT_NE(to_string(report).find(text), std::string::npos) << to_string(report);
  }
}

TEST(LayoutCheck, AMistakeIsFoundInShardedGradientsToo) {
  std::vector<at::Tensor> weights;
  CheckOptions options;
  options.ddp.use_distributed_optimizer = true;
  for (const ShardingStrategy strategy :
       {ShardingStrategy::optim_grads, ShardingStrategy::optim_grads_params}) {
    options.ddp.data_parallel_sharding_strategy = strategy;
    const LayoutReport report = check_linear(2, weights, options);
    ASSERT_FALSE(report.ok());
    EXPECT_NE(to_string(report).find("the gradient is 2 times what it should be over dp-cp"),
              std::string::npos)
        << to_string(report);
  }
}

TEST(LayoutCheck, AGradientThatIsNotFiniteInOneProcessIsNamed) {
  EXPECT_TRUE(throws_with<UsageError>(
      [] {
        check_layouts(make_linear,
                      [](torch::nn::LinearImpl& linear, const StageInput&) {
                        return (linear.weight * 0).sqrt().sum() + linear.bias.sum();
                      },
                      {{.ranks = 2}});
      },
      "parameter 'weight': its gradient in one process is not finite"));
}

/// Steps of one length, which are NaN where the gradient is zero.
struct EqualSteps : UpdateRule {
  EqualSteps() : UpdateRule({.name = "equal_steps"}) {}
  void update(const UpdateRange& all) const override {
    for (const auto& segment : all.segments) {
      const UpdateRange range = all.part(segment);
      const at::Tensor gradient = range.gradient();
      range.write_weights(range.weights - range.learning_rate * gradient / gradient.abs());
    }
  }
};

TEST(LayoutCheck, AWeightThatIsNotFiniteAfterTheUpdateInOneProcessIsNamed) {
  CheckOptions options;
  options.steps = 1;
  options.rule = std::make_shared<EqualSteps>();
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        check_layouts(
            make_linear,
            [](torch::nn::LinearImpl& linear, const StageInput&) {
              const at::Tensor factors = at::arange(6, at::kDouble).view({2, 3});
              return (linear.weight * factors).sum() + linear.bias.sum();
            },
            {{.ranks = 1}}, options);
      },
      "parameter 'weight': its weights after the update in one process are not finite"));
}

TEST(LayoutCheck, ALossThatIsNaNDiffersByInfinity) {
  std::vector<at::Tensor> weights;
  const LayoutReport report = check_linear(NAN, weights);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.layouts.front().loss, INFINITY);
  EXPECT_NE(to_string(report).find("what comes behind the last of them differs"), std::string::npos)
      << to_string(report);
}

TEST(LayoutCheck, GradientsThatAreNotFinalOnSomeStagesAreNamed) {
  CheckOptions options;
  options.ddp.calculate_per_token_loss = false;
  options.finalize = [](torch::nn::Module&, DistributedDataParallel& ddp,
                        const std::optional<at::Tensor>&) { ddp.finish_grad_sync(); };
  const LayoutReport report = check_layouts(own_net::make_net, own_net::loss_of_net,
                                            {{.ranks = 4, .sizes = {.pipeline = 4}}}, options);
  ASSERT_FALSE(report.ok());
  const Finding& culprit = *report.layouts.front().culprit;
  EXPECT_EQ(culprit.pass, "finalize") << to_string(report);
  EXPECT_EQ(culprit.parameter, "table") << to_string(report);
}

TEST(LayoutCheck, GradientsThatAreNotFinalInTheSecondStepAreThoseOfTheSecondStep) {
  CheckOptions options;
  options.ddp.calculate_per_token_loss = false;
  options.finalize = [](torch::nn::Module&, DistributedDataParallel& ddp,
                        const std::optional<at::Tensor>&) {
    thread_local int64_t calls = 0;  // of a rank
    if (++calls == 2)
      ddp.finish_grad_sync();
    else
      finalize_model_grads({&ddp});
  };
  const LayoutReport report = check_layouts(own_net::make_net, own_net::loss_of_net,
                                            {{.ranks = 4, .sizes = {.pipeline = 4}}}, options);
  ASSERT_FALSE(report.ok());
  const Finding& culprit = *report.layouts.front().culprit;
  EXPECT_EQ(culprit.pass, "finalize") << to_string(report);
  EXPECT_EQ(culprit.parameter, "table") << to_string(report);
  EXPECT_EQ(culprit.step, 1) << to_string(report);
}

TEST(LayoutCheck, ANaNOnOneRankIsFoundWhicheverRankItIs) {
  for (const int64_t at_fault : {0, 1}) {
    std::vector<at::Tensor> weights;
    CheckOptions options;
    options.finalize = [=](torch::nn::Module& module, DistributedDataParallel& ddp,
                           const std::optional<at::Tensor>& num_tokens) {
      finalize_model_grads({&ddp}, num_tokens);
      if (ddp.parallel_state().rank() == at_fault) module.parameters()[0].mutable_grad().fill_(NAN);
    };
    const LayoutReport report = check_linear(1, weights, options);
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.layouts.front().culprit->parameter, "weight") << to_string(report);
  }
}

TEST(LayoutCheck, WhatARankThrowsIsAFindingWhateverItsType) {
  const LayoutReport report =
      check_layouts(make_linear,
                    [](torch::nn::LinearImpl& linear, const StageInput& input) {
                      if (input.context.state.world_size() > 1) throw std::string("out of luck");
                      return linear.weight.sum() + linear.bias.sum();
                    },
                    {{.ranks = 2}});
  ASSERT_TRUE(report.layouts.front().culprit.has_value());
  EXPECT_NE(report.layouts.front().culprit->text.find("out of luck"), std::string::npos);
}

/// Each of two stages computes the whole gradient of its copies, and nothing says that they are
/// copies. The loss does not depend on their values.
struct Copies : torch::nn::Module {
  explicit Copies(const ParallelContext& made) : context(made) {
    for (const char* const name : {"a", "b", "c"})
      register_parameter(name, at::ones({3}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& hidden) {
    const auto params = named_parameters();
    const at::Tensor terms = params["a"] * 0 + params["b"] * 1e-17 + params["c"];
    const ProcessGroup pp = context.state.group(GroupKind::pp);
    const at::Tensor before = pp.rank() == 0 ? at::ones({3}, at::kDouble) : hidden;
    const at::Tensor sum = before + (terms - terms.detach());
    return pp.rank() == pp.size() - 1 ? sum.sum() : sum;
  }
  ParallelContext context;
};

TEST(LayoutCheck, AGradientOfAlmostZeroIsNotWhatTheNormCountsTwice) {
  const LayoutReport report = check_layouts(
      [](const ParallelContext& context) { return std::make_shared<Copies>(context); },
      [](Copies& copies, const StageInput& input) { return copies.forward(input.hidden); },
      {{.ranks = 2, .sizes = {.pipeline = 2}}});
  ASSERT_FALSE(report.ok());
  const Finding& culprit = *report.layouts.front().culprit;
  EXPECT_EQ(culprit.pass, "norm") << to_string(report);
  EXPECT_EQ(culprit.parameter, "c") << to_string(report);
  EXPECT_NEAR(culprit.factor.value_or(0), 2, 1e-9);
  EXPECT_NE(culprit.text.find("it is counted 2 times"), std::string::npos) << culprit.text;
}

class Mistakes : public ::testing::TestWithParam<own_net::Case> {};

TEST_P(Mistakes, AreNamedWithTheirParameter) {
  const own_net::Case& of = GetParam();
  const LayoutReport report = own_net::check(of.mistake, {of.layout});
  ASSERT_TRUE(report.layouts.front().culprit.has_value()) << of.name;
  const Finding& culprit = *report.layouts.front().culprit;
  EXPECT_EQ(culprit.parameter, of.parameter) << of.name << ": " << to_string(report);
  EXPECT_NE(culprit.text.find(of.text), std::string::npos) << of.name << ": " << to_string(report);
}

INSTANTIATE_TEST_SUITE_P(OfUsers, Mistakes, ::testing::ValuesIn(own_net::mistakes()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::erase_if(name, [](char c) { return !std::isalnum(c); });
                           return name;
                         });

/// Checks the reference GPT with `fields`; a layout of several ranks adds `parallel`.
LayoutReport check_gpt(const std::vector<std::string>& fields, int64_t ranks,
                       const std::vector<std::string>& parallel) {
  std::vector<std::string> all = {"model.num_layers=2",          "model.hidden_size=16",
                                  "model.num_attention_heads=4", "model.ffn_hidden_size=16",
                                  "model.seq_length=16",         "model.vocab_size=11",
                                  "model.init_method_std=0.2"};
  all.insert(all.end(), fields.begin(), fields.end());
  const Config whole = parse_config("", "test", all);
  all.insert(all.end(), parallel.begin(), parallel.end());
  const Config cut = parse_config("", "test", all);
  const auto config_of = [=](const ParallelContext& context) -> const Config& {
    return context.state.world_size() == 1 ? whole : cut;
  };
  RankLayout layout = {.ranks = ranks, .sizes = parallel_sizes(cut.parallel)};
  layout.sequence_parallel = cut.parallel.sequence_parallel;
  CheckOptions options;
  options.ddp = cut.ddp;
  options.finalize = [](torch::nn::Module& module, DistributedDataParallel& ddp,
                        const std::optional<at::Tensor>& num_tokens) {
    finalize_model_grads({&ddp}, num_tokens);
    end_router_step(module);
  };
  return check_layouts(
      [=](const ParallelContext& context) {
        const Config& config = config_of(context);
        const int64_t stage = context.state.group(GroupKind::pp).rank();
        return std::make_shared<GPTModel>(config.model, config.parallel, context.state,
                                          chunks_of_stage(config, stage).front().stage(),
                                          GPTModelOptions{.dtype = at::kDouble});
      },
      [](GPTModel& model, const StageInput& input) {
        const ProcessGroup dp = input.context.state.group(GroupKind::dp);
        const ProcessGroup cp = input.context.state.group(GroupKind::cp);
        const at::Tensor i =
            at::arange(4 * 17).view({4, 17}) + 31 * input.step + 7 * input.microbatch;
        const at::Tensor ids = (i * i + 3 * i).remainder(11).chunk(dp.size(), 0)[dp.rank()];
        GPTInput given;
        if (model.stage().has_embedding)
          given.tokens = cut_for_context(ids.narrow(1, 0, 16), 1, cp);
        else
          given.hidden = input.hidden;
        if (!model.stage().has_loss) return model.forward(given);
        given.labels = cut_for_context(ids.narrow(1, 1, 16), 1, cp);
        return model.forward(given).sum();
      },
      {layout}, options);
}

TEST(LayoutCheck, TheReferenceGPTIsEqualOnEveryLayout) {
  const std::string tp = "parallel.tensor_model_parallel_size=",
                    sp = "parallel.sequence_parallel=true", cp = "parallel.context_parallel_size=",
                    pp = "parallel.pipeline_model_parallel_size=",
                    sharded = "ddp.use_distributed_optimizer=true";
  using Fields = std::vector<std::string>;
  const std::vector<std::pair<int64_t, Fields>> layouts = {
      {2, {}},         {2, {tp + "2"}},           {2, {tp + "2", sp}},
      {2, {cp + "2"}}, {2, {pp + "2"}},           {4, {tp + "2", sp, pp + "2"}},
      {2, {sharded}},  {4, {tp + "2", cp + "2"}}, {8, {tp + "2", sp, pp + "2", sharded}}};
  for (const auto& [ranks, parallel] : layouts) expect_equal(check_gpt({}, ranks, parallel));
}

TEST(LayoutCheck, ShardedGradientsAndParametersAreEqual) {
  for (const char* const strategy : {"optim_grads", "optim_grads_params"})
    for (const int64_t tp : {1, 2})
      expect_equal(check_gpt({}, 2 * tp,
                             {"parallel.tensor_model_parallel_size=" + std::to_string(tp),
                              "ddp.use_distributed_optimizer=true",
                              std::string("ddp.data_parallel_sharding_strategy=") + strategy}));
}

TEST(LayoutCheck, ExpertsAreEqualOnEveryLayout) {
  const std::vector<std::string> experts = {"model.num_experts=4", "model.moe_router_topk=2",
                                            "model.moe_ffn_hidden_size=8"};
  const std::string ep = "parallel.expert_model_parallel_size=";
  expect_equal(check_gpt(experts, 2, {ep + "2"}));
  expect_equal(check_gpt(
      experts, 4,
      {ep + "2", "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"}));
}

}  // namespace
}  // namespace lockstep::testing
