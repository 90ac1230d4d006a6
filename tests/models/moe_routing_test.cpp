#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include <ATen/ATen.h>

#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/router_losses.h"
#include "lockstep/models/routing.h"

namespace lockstep {
namespace {

TransformerConfig router_config(int64_t experts, int64_t topk) {
  TransformerConfig config;
  config.num_experts = experts;
  config.moe_router_topk = topk;
  return config;
}

at::Tensor random_logits(int64_t tokens, int64_t experts, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  at::Tensor logits = at::empty({tokens, experts}, at::kDouble);
  for (int64_t i = 0; i < logits.numel(); ++i)
    logits.mutable_data_ptr<double>()[i] = normal(engine);
  return logits;
}

using Row = std::vector<double>;

Row row_of(const at::Tensor& matrix, int64_t row) {
  const auto* const data = matrix[row].contiguous().const_data_ptr<double>();
  return {data, data + matrix.size(1)};
}

/// Indices of the `count` largest values.
std::vector<size_t> best(const Row& values, int64_t count) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

/// The weights of one token, written out.
Row expected_weights(const Row& logits, const TransformerConfig& config, const Row& bias) {
  const bool softmax = config.moe_router_score_function == RouterScoreFunction::softmax;
  Row scores = logits;
  double total = 0;
  for (double& score : scores) {
    score = softmax ? std::exp(score) : 1 / (1 + std::exp(-score));
    total += score;
  }
  if (softmax)
    for (double& score : scores) score /= total;
  Row preference = softmax && !config.moe_router_pre_softmax ? logits : scores;
  for (size_t e = 0; e < bias.size(); ++e) preference[e] += bias[e];
  if (config.moe_router_num_groups) {
    const auto groups = static_cast<size_t>(*config.moe_router_num_groups);
    const size_t size = logits.size() / groups;
    Row sums;
    for (size_t g = 0; g < groups; ++g) {
      Row members(preference.begin() + static_cast<int64_t>(g * size),
                  preference.begin() + static_cast<int64_t>((g + 1) * size));
      std::sort(members.rbegin(), members.rend());
      members.resize(static_cast<size_t>(config.moe_router_topk / *config.moe_router_group_topk));
      sums.push_back(std::accumulate(members.begin(), members.end(), 0.0));
    }
    const auto kept = best(sums, *config.moe_router_group_topk);
    for (size_t e = 0; e < preference.size(); ++e)
      if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) preference[e] = -1e300;
  }
  Row weights(logits.size(), 0.0);
  double sum = 0;
  for (const size_t e : best(preference, config.moe_router_topk)) {
    weights[e] = softmax && !config.moe_router_pre_softmax ? std::exp(logits[e]) : scores[e];
    sum += weights[e];
  }
  const bool normalized = softmax ? !config.moe_router_pre_softmax : config.moe_router_topk > 1;
  for (double& weight : weights)
    weight *= config.moe_router_topk_scaling_factor.value_or(1) / (normalized ? sum : 1);
  return weights;
}

void expect_routing(const TransformerConfig& config, const at::Tensor& bias = {}) {
  const at::Tensor logits = random_logits(50, *config.num_experts, 7);
  const Routing routing = route_tokens(logits, config, bias);
  EXPECT_TRUE(at::equal(routing.map.sum(1), at::full({50}, config.moe_router_topk, at::kLong)));
  for (int64_t token = 0; token < 50; ++token) {
    const Row expected =
        expected_weights(row_of(logits, token), config,
                         bias.defined() ? row_of(bias.to(at::kDouble).unsqueeze(0), 0) : Row{});
    const Row found = row_of(routing.probs, token);
    for (size_t e = 0; e < found.size(); ++e) EXPECT_NEAR(found[e], expected[e], 1e-14);
  }
}

TEST(Routing, EqualsTheDefinitionTokenByToken) {
  for (const bool pre_softmax : {false, true})
    for (const auto function : {RouterScoreFunction::softmax, RouterScoreFunction::sigmoid})
      for (const int64_t topk : {1, 2, 4}) {
        TransformerConfig config = router_config(8, topk);
        config.moe_router_pre_softmax = pre_softmax;
        config.moe_router_score_function = function;
        expect_routing(config);
        config.moe_router_topk_scaling_factor = 2.5;
        expect_routing(config);
        if (topk == 1) continue;
        config.moe_router_num_groups = 4;
        config.moe_router_group_topk = 2;
        expect_routing(config);
      }
}

TEST(Routing, TheBiasChangesTheChoiceAndNotTheWeight) {
  TransformerConfig config = router_config(6, 2);
  config.moe_router_score_function = RouterScoreFunction::sigmoid;
  const at::Tensor bias = at::tensor({0.0, 2.0, 0.0, -2.0, 0.1, 0.0}, at::kFloat);
  expect_routing(config, bias);
  const at::Tensor counts = route_tokens(random_logits(50, 6, 7), config, bias).map.sum(0);
  EXPECT_EQ(counts[1].item<int64_t>(), 50);
  EXPECT_EQ(counts[3].item<int64_t>(), 0);
}

TransformerConfig golden_router(const nlohmann::json& fields) {
  TransformerConfig config = router_config(8, 4);
  config.moe_aux_loss_coeff = 0.5;
  config.moe_router_pre_softmax = fields.value("moe_router_pre_softmax", false);
  config.moe_router_enable_expert_bias = fields.value("moe_router_enable_expert_bias", false);
  if (fields.value("moe_router_score_function", "softmax") == "sigmoid")
    config.moe_router_score_function = RouterScoreFunction::sigmoid;
  if (fields.contains("moe_router_topk_scaling_factor"))
    config.moe_router_topk_scaling_factor = fields["moe_router_topk_scaling_factor"];
  if (fields.contains("moe_router_num_groups")) {
    config.moe_router_num_groups = fields["moe_router_num_groups"];
    config.moe_router_group_topk = fields["moe_router_group_topk"];
  }
  const std::string kind = fields.value("moe_router_load_balancing_type", "aux_loss");
  if (kind == "seq_aux_loss")
    config.moe_router_load_balancing_type = RouterLoadBalancing::seq_aux_loss;
  if (kind == "global_aux_loss")
    config.moe_router_load_balancing_type = RouterLoadBalancing::global_aux_loss;
  return config;
}

/// Compares with Megatron Core's router in fp32; see scripts/golden/router.py.
TEST(Routing, WeightsAndTheBalancingLossAreThoseOfMegatron) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/models/router_golden.json");
  for (const auto& golden : nlohmann::json::parse(file)) {
    SCOPED_TRACE(golden["fields"].dump());
    const auto matrix = [&](const char* key) {
      std::vector<double> numbers;
      for (const auto& row : golden[key])
        for (const double number : row) numbers.push_back(number);
      return at::tensor(numbers, at::kDouble).view({6, 8});
    };
    const TransformerConfig config = golden_router(golden["fields"]);
    at::Tensor bias;
    if (config.moe_router_enable_expert_bias)
      bias = at::tensor(golden["bias"].get<std::vector<double>>(), at::kDouble);
    const at::Tensor logits = matrix("logits").requires_grad_(true);
    const Routing routing = route_tokens(logits, config, bias);
    EXPECT_TRUE(at::allclose(routing.probs, matrix("weights"), 1e-5, 1e-7)) << routing.probs;
    RouterLosses losses(config, ParallelState::single_process(), at::kCPU);
    losses.per_token(logits, routing, 3, 2).mean().backward();
    EXPECT_TRUE(at::allclose(logits.grad(), matrix("gradient"), 1e-4, 1e-7)) << logits.grad();
  }
}

TEST(Routing, CapacityAsInMegatron) {
  EXPECT_EQ(expert_capacity(64, 2, 8, 1), 16);
  EXPECT_EQ(expert_capacity(64, 2, 8, 1.25), 20);
  EXPECT_EQ(expert_capacity(10, 1, 4, 1), 3);
  EXPECT_EQ(expert_capacity(10, 2, 3, 1.5), 10);
  EXPECT_GE(expert_capacity(10, 2, 3, 1e300), 10);  // no overflow: practically no limit
}

TEST(Routing, ExpertsKeepTheirHeaviestTokens) {
  const Routing routing = route_tokens(random_logits(64, 8, 3), router_config(8, 2));
  const at::Tensor kept = limit_to_capacity(routing, 10, /*pad=*/false);
  EXPECT_TRUE(kept.logical_and(~routing.map).sum().item<int64_t>() == 0);
  for (int64_t e = 0; e < 8; ++e) {
    const at::Tensor chosen = routing.map.select(1, e), left = kept.select(1, e);
    const int64_t wanted = chosen.sum().item<int64_t>();
    EXPECT_EQ(left.sum().item<int64_t>(), std::min<int64_t>(wanted, 10));
    const at::Tensor weights = routing.probs.select(1, e);
    const at::Tensor dropped = weights.masked_select(chosen.logical_and(~left));
    if (dropped.numel() > 0) {
      EXPECT_LE(dropped.max().item<double>(), weights.masked_select(left).min().item<double>());
    }
  }
  for (const double factor : {1.0, 1.25}) {
    const int64_t capacity = expert_capacity(64, 2, 8, factor);
    const at::Tensor padded = limit_to_capacity(routing, capacity, /*pad=*/true);
    EXPECT_TRUE(at::equal(padded.sum(0), at::full({8}, capacity, at::kLong)));
    EXPECT_EQ(padded.sum().item<int64_t>(), static_cast<int64_t>(64 * 2 * factor));
  }
}

/// Logits with which token t chooses the experts t, t + 1, ... t + topk - 1.
at::Tensor balanced_logits(int64_t experts, int64_t topk) {
  at::Tensor logits = at::zeros({4 * experts, experts}, at::kDouble);
  for (int64_t token = 0; token < logits.size(0); ++token)
    for (int64_t k = 0; k < topk; ++k) logits[token][(token + k) % experts] = 60;
  return logits;
}

double mean_loss(const at::Tensor& logits, const TransformerConfig& config) {
  RouterLosses losses(config, ParallelState::single_process(), at::kCPU);
  return losses.per_token(logits, route_tokens(logits, config), logits.size(0) / 2, 2)
      .mean()
      .item<double>();
}

TEST(RouterLosses, TheCoefficientAtPerfectBalanceAndExpertsTimesThatForOneHotExpert) {
  for (const auto kind : {RouterLoadBalancing::aux_loss, RouterLoadBalancing::seq_aux_loss,
                          RouterLoadBalancing::global_aux_loss})
    for (const auto function : {RouterScoreFunction::softmax, RouterScoreFunction::sigmoid})
      for (const int64_t experts : {2, 4, 7}) {
        TransformerConfig config = router_config(experts, 2);
        config.moe_router_score_function = function;
        config.moe_router_load_balancing_type = kind;
        config.moe_aux_loss_coeff = 0.3;
        // Each of the two sequences has every second token, so two choices keep it balanced.
        if (function == RouterScoreFunction::softmax && experts % 2 == 0) {
          EXPECT_NEAR(mean_loss(balanced_logits(experts, 2), config), 0.3, 1e-9) << experts;
        }
        config.moe_router_topk = 1;
        config.moe_router_pre_softmax = true;
        at::Tensor hot = at::zeros({4 * experts, experts}, at::kDouble);
        hot.select(1, 1).fill_(60);
        if (function == RouterScoreFunction::sigmoid) hot.sub_(30).mul_(4);
        EXPECT_NEAR(mean_loss(hot, config), 0.3 * static_cast<double>(experts), 1e-9) << experts;
      }
}

TEST(RouterLosses, CountWhatScoresChooseNotWhatTheBiasDoesAndLeavePaddingOut) {
  TransformerConfig config = router_config(4, 1);
  config.moe_router_score_function = RouterScoreFunction::sigmoid;
  config.moe_router_enable_expert_bias = true;
  config.moe_aux_loss_coeff = 1;
  at::Tensor logits = at::full({6, 4}, -60, at::kDouble);
  logits.narrow(0, 0, 4).select(1, 2).fill_(60);
  logits.narrow(0, 4, 2).select(1, 3).fill_(60);
  const at::Tensor bias = at::tensor({0, 10, 0, 0}, at::kDouble);
  const auto losses_of = [&](const Routing& routing) {
    RouterLosses losses(config, ParallelState::single_process(), at::kCPU);
    return losses.per_token(logits, routing, 3, 2).flatten();
  };
  Routing routing = route_tokens(logits, config, bias);
  EXPECT_EQ(routing.map.sum(0)[1].item<int64_t>(), 6);
  const double most = 4. * 4 / 6, least = 4. * 2 / 6;
  const at::Tensor expected = at::tensor({most, most, most, most, least, least}, at::kDouble);
  EXPECT_TRUE(at::allclose(losses_of(routing), expected, 1e-12));
  routing.map.narrow(0, 4, 2).fill_(false);  // the last two tokens are padding
  EXPECT_TRUE(at::allclose(losses_of(routing).narrow(0, 0, 4), at::full({4}, 4., at::kDouble)));
}

TEST(RouterLosses, SequencesAreBalancedEachForItself) {
  // Sequence 0 sends all its tokens to expert 0, sequence 1 to expert 1: only together they are
  // balanced.
  at::Tensor logits = at::zeros({8, 2, 2}, at::kDouble);
  logits.select(1, 0).select(1, 0).fill_(60);
  logits.select(1, 1).select(1, 1).fill_(60);
  TransformerConfig config = router_config(2, 1);
  config.moe_router_pre_softmax = true;
  config.moe_aux_loss_coeff = 1;
  EXPECT_NEAR(mean_loss(logits.flatten(0, 1), config), 1, 1e-9);
  config.moe_router_load_balancing_type = RouterLoadBalancing::seq_aux_loss;
  EXPECT_NEAR(mean_loss(logits.flatten(0, 1), config), 2, 1e-9);
}

TEST(RouterLosses, GlobalLossRemembersTheMicrobatchesOfTheStep) {
  TransformerConfig config = router_config(2, 1);
  config.moe_router_pre_softmax = true;
  config.moe_aux_loss_coeff = 1;
  config.moe_router_load_balancing_type = RouterLoadBalancing::global_aux_loss;
  RouterLosses losses(config, ParallelState::single_process(), at::kCPU);
  const auto loss_of = [&](int64_t expert) {
    at::Tensor logits = at::zeros({6, 2}, at::kDouble);
    logits.select(1, expert).fill_(60);
    return losses.per_token(logits, route_tokens(logits, config), 3, 2).mean().item<double>();
  };
  EXPECT_NEAR(loss_of(0), 2, 1e-9);
  EXPECT_NEAR(loss_of(1), 1, 1e-9);  // half of all choices so far
  losses.reset();
  EXPECT_NEAR(loss_of(1), 2, 1e-9);
}

TEST(RouterLosses, AttachedLossesHaveTheGradientOfAddedOnes) {
  TransformerConfig config = router_config(4, 2);
  config.moe_aux_loss_coeff = 0.01;
  config.moe_z_loss_coeff = 0.1;
  const at::Tensor weight = random_logits(12, 4, 5);
  auto scale = std::make_shared<TokenLossScale>();
  std::vector<at::Tensor> gradients;
  for (const bool attached : {true, false}) {
    const at::Tensor logits = random_logits(12, 4, 3).requires_grad_(true);
    RouterLosses losses(config, ParallelState::single_process(), at::kCPU);
    const Routing routing = route_tokens(logits, config);
    const at::Tensor loss = losses.per_token(logits, routing, 6, 2);
    if (attached) {
      const at::Tensor sum = (attach_loss(routing.probs, loss, scale) * weight).sum();
      scale->value = 0.25;
      sum.backward();
    } else {
      ((routing.probs * weight).sum() + 0.25 * loss.sum()).backward();
      const at::Tensor z = logits.detach().logsumexp(-1).square() * 0.1;
      EXPECT_GT(loss.sum().item<double>(), z.sum().item<double>());
    }
    gradients.push_back(logits.grad());
  }
  EXPECT_TRUE(at::allclose(gradients[0], gradients[1], 1e-13, 1e-14));
}

TEST(GroupedLinear, EqualsOneProductAnExpert) {
  const std::vector<int64_t> rows = {3, 0, 5, 1};
  const at::Tensor input = random_logits(9, 6, 1).requires_grad_(true);
  const at::Tensor weight = random_logits(4, 5 * 6, 2).view({4, 5, 6}).clone().requires_grad_(true);
  const at::Tensor factor = random_logits(9, 5, 3);
  const auto groups =
      c10::make_intrusive<kernels::RowGroups>(at::tensor(rows).cumsum(0).to(at::kInt));
  (grouped_linear(input, weight, groups) * factor).sum().backward();
  const at::Tensor input_grad = input.grad().clone(), weight_grad = weight.grad().clone();
  input.mutable_grad().reset();
  weight.mutable_grad().reset();
  std::vector<at::Tensor> parts;
  const auto inputs = input.split_with_sizes(rows);
  for (int64_t e = 0; e < 4; ++e)
    parts.push_back(at::linear(inputs[static_cast<size_t>(e)], weight[e]));
  (at::cat(parts) * factor).sum().backward();
  EXPECT_TRUE(at::allclose(input_grad, input.grad(), 1e-13, 1e-14));
  EXPECT_TRUE(at::allclose(weight_grad, weight.grad(), 1e-13, 1e-14));
}

}  // namespace
}  // namespace lockstep
