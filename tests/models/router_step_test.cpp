// A training loop of one's own for a GPT with experts, in fp64. It needs only what lockstep.h
// declares.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/lockstep.h"

namespace lockstep {
namespace {

using GradientsByName = std::map<std::string, at::Tensor>;

TransformerConfig gpt_with_experts() {
  TransformerConfig config;
  config.num_layers = 2;
  config.hidden_size = 16;
  config.num_attention_heads = 4;
  config.ffn_hidden_size = 16;
  config.seq_length = 8;
  config.vocab_size = 11;
  config.init_method_std = 0.2;
  config.num_experts = 4;
  return config;
}

TransformerConfig gpt_with_bias() {
  TransformerConfig config = gpt_with_experts();
  config.moe_router_score_function = RouterScoreFunction::sigmoid;
  config.moe_router_enable_expert_bias = true;
  config.moe_router_bias_update_rate = 0.25;
  return config;
}

TransformerConfig gpt_with_losses() {
  TransformerConfig config = gpt_with_experts();
  config.moe_aux_loss_coeff = 0.5;
  config.moe_z_loss_coeff = 0.1;
  return config;
}

/// [3, 9]: inputs and labels of batch `number`.
at::Tensor words_of_batch(int64_t number) {
  const at::Tensor i = at::arange(3 * 9).view({3, 9}) + 31 * number;
  return (i * i + 3 * i).remainder(11);
}

at::Tensor losses_of_batch(const GPTModel& model, int64_t number) {
  const at::Tensor words = words_of_batch(number);
  return model.forward(words.narrow(1, 0, 8), words.narrow(1, 1, 8));
}

/// The gradients, divided by `scale`; sets them to zero.
GradientsByName take_gradients(GPTModel& model, double scale = 1) {
  GradientsByName gradients;
  for (const NamedParameter& param : collect_parameters(model))
    gradients[param.name] = param.tensor.grad() / scale;
  model.zero_grad();
  return gradients;
}

/// The largest difference between the gradients of routers, or of all parameters; NaN if one is.
double difference(const GradientsByName& one, const GradientsByName& other, bool of_routers) {
  double most = 0;
  for (const auto& [name, gradient] : one) {
    if (of_routers && name.find("router") == std::string::npos) continue;
    const double apart = (gradient - other.at(name)).abs().max().item<double>();
    if (std::isnan(apart)) return apart;
    most = std::max(most, apart);
  }
  return most;
}

TEST(RouterStep, BiasesMoveByTheTokensOfTheStep) {
  const ParallelState state = ParallelState::single_process();
  const auto scale = std::make_shared<TokenLossScale>();
  GPTModel twin(gpt_with_bias(), {.dtype = at::kDouble});
  GPTModel model(gpt_with_bias(), {.dtype = at::kDouble, .loss_scale = scale});
  DistributedDataParallel ddp(model, state);
  Optimizer optimizer({&ddp}, OptimizerConfig{});
  losses_of_batch(twin, 0);
  const at::Tensor words = words_of_batch(0);
  const at::Tensor tokens = words.narrow(1, 0, 8), labels = words.narrow(1, 1, 8);
  // [gpt]
  ddp.zero_grad_buffer();
  scale->value = optimizer.loss_scale();  // GPTModelOptions::loss_scale
  const at::Tensor losses = model.forward(tokens, labels);
  (losses.sum() * scale->value).backward();
  lockstep::finalize_model_grads({&ddp}, at::scalar_tensor(losses.numel()),
                                 lockstep::router_biases(model));
  lockstep::end_router_step(model);
  optimizer.step();
  // [gpt]
  const std::vector<RouterBias> found = router_biases(model), counted = router_biases(twin);
  ASSERT_EQ(found.size(), 2u);
  ASSERT_EQ(counted.size(), 2u);
  for (size_t layer = 0; layer < 2; ++layer) {
    const at::Tensor counts = counted[layer].tokens_per_expert;
    EXPECT_EQ(counts.sum().item<int64_t>(), 3 * 8 * 2);
    const at::Tensor expected = at::sign(counts.sum() - counts * 4).to(at::kFloat) * 0.25;
    EXPECT_GT(expected.abs().max().item<double>(), 0);
    EXPECT_TRUE(at::equal(found[layer].bias, expected)) << layer;
    EXPECT_EQ(found[layer].tokens_per_expert.sum().item<int64_t>(), 0);
    EXPECT_EQ(found[layer].rate, 0.25);
  }
}

TEST(RouterStep, GlobalLossesAreOfTheirOwnStep) {
  TransformerConfig config = gpt_with_losses();
  config.moe_router_load_balancing_type = RouterLoadBalancing::global_aux_loss;
  GPTModel fresh(config, {.dtype = at::kDouble});
  losses_of_batch(fresh, 1).sum().backward();
  const GradientsByName expected = take_gradients(fresh);
  const auto second_step = [&](const auto& end) {
    GPTModel model(config, {.dtype = at::kDouble});
    losses_of_batch(model, 0).sum().backward();
    take_gradients(model);
    end(model);
    losses_of_batch(model, 1).sum().backward();
    return take_gradients(model);
  };
  EXPECT_EQ(difference(second_step(end_router_step), expected, false), 0);
  EXPECT_EQ(difference(second_step(abandon_router_step), expected, false), 0);
  EXPECT_GT(difference(second_step([](const GPTModel&) {}), expected, true), 1e-6);
}

TEST(RouterStep, AbandonedStepsAndFrozenRoutersCountNothing) {
  GPTModel model(gpt_with_bias(), {.dtype = at::kDouble});
  const auto tokens = [&] {
    int64_t sum = 0;
    for (const RouterBias& router : router_biases(model))
      sum += router.tokens_per_expert.sum().item<int64_t>();
    return sum;
  };
  const auto train_routers = [&](bool on) {
    for (const NamedParameter& param : collect_parameters(model))
      if (param.name.find("router") != std::string::npos) param.tensor.requires_grad_(on);
  };
  losses_of_batch(model, 0);
  EXPECT_EQ(tokens(), 2 * 3 * 8 * 2);
  abandon_router_step(model);
  EXPECT_EQ(tokens(), 0);
  train_routers(false);
  EXPECT_TRUE(router_biases(model).empty());
  losses_of_batch(model, 0);
  end_router_step(model);
  train_routers(true);
  EXPECT_EQ(router_biases(model).size(), 2u);
  EXPECT_EQ(tokens(), 0);
  EXPECT_TRUE(router_biases(GPTModel(gpt_with_experts(), {})).empty());
}

/// The gradients of two steps whose losses are multiplied by `factor`, divided by it. The scale of
/// the routers' losses is `scale`, or null.
std::vector<GradientsByName> two_scaled_steps(double factor, const double* scale) {
  std::shared_ptr<TokenLossScale> given;
  if (scale) given = std::make_shared<TokenLossScale>(TokenLossScale{.value = *scale});
  GPTModel model(gpt_with_losses(), {.dtype = at::kDouble, .loss_scale = given});
  std::vector<GradientsByName> steps;
  for (int64_t step = 0; step < 2; ++step) {
    (losses_of_batch(model, step).sum() * factor).backward();
    steps.push_back(take_gradients(model, factor));
    const at::NoGradGuard no_grad;
    for (const NamedParameter& param : collect_parameters(model))
      param.tensor.sub_(steps.back().at(param.name), 0.01);
  }
  return steps;
}

TEST(RouterStep, LossesOfRoutersHaveTheScaleOfTheTokens) {
  const auto expected = two_scaled_steps(1, nullptr);
  for (const double factor : {1.0, 1024.0, 1.0 / (3 * 8)}) {
    const auto found = two_scaled_steps(factor, &factor);
    for (size_t step = 0; step < 2; ++step)
      EXPECT_LT(difference(found[step], expected[step], false), 1e-12) << factor;
  }
  // Null is 1, whatever the loop multiplies its losses by.
  EXPECT_GT(difference(two_scaled_steps(1024, nullptr)[0], expected[0], true), 1e-3);
}

}  // namespace
}  // namespace lockstep
