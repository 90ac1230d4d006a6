#include "lockstep/models/moe_layer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/router.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

// Experts on several ranks, compared with the same experts in one process.

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;

constexpr int64_t kHidden = 6;

at::Tensor numbers(std::vector<int64_t> shape, double seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + seed).view(shape) * 2;
}

struct Layout {
  int64_t world = 1;
  ParallelSizes sizes = {};
  bool sequence_parallel = false;
};

TransformerConfig layer_config() {
  TransformerConfig config;
  config.hidden_size = kHidden;
  config.ffn_hidden_size = 12;
  config.moe_ffn_hidden_size = 12;
  config.num_experts = 4;
  config.num_layers = 2;
  config.init_method_std = 0.5;
  return config;
}

LayerContext layer_context(const TransformerConfig& config, const Layout& layout,
                           const ParallelState& state) {
  LayerContext context{.config = config, .options = at::TensorOptions(at::kDouble), .name = "mlp."};
  context.parallel.sequence_parallel = layout.sequence_parallel;
  context.parallel.tensor_model_parallel_size = layout.sizes.tensor;
  context.state = state;
  return context;
}

constexpr int64_t kLength = 8, kRows = 2;

/// Output and gradients of one process for `replicas` micro-batches; they are one micro-batch if
/// the loss is a global one, which counts the tokens of all.
struct Whole {
  std::vector<at::Tensor> outputs, input_grads;
  std::map<std::string, at::Tensor> grads, biases;

  Whole(const TransformerConfig& config, int64_t replicas) {
    const MoELayer layer(layer_context(config, {}, ParallelState::single_process()));
    for (const NamedParameter& param : collect_parameters(layer))
      if (param.name.ends_with("bias"))
        at::Tensor(param.tensor.detach())
            .copy_(biases[param.name] = numbers(param.tensor.sizes().vec(), 0.4));
    const bool global =
        config.moe_router_load_balancing_type == RouterLoadBalancing::global_aux_loss;
    const int64_t at_once = global ? replicas : 1;
    for (int64_t first = 0; first < replicas; first += at_once) {
      std::vector<at::Tensor> inputs, weights;
      for (int64_t replica = first; replica < first + at_once; ++replica) {
        inputs.push_back(batch(replica));
        weights.push_back(weight(replica));
      }
      const at::Tensor input = at::cat(inputs, 1).requires_grad_(true);
      const at::Tensor output = layer.forward(input);
      (output * at::cat(weights, 1)).sum().backward();
      for (const at::Tensor& own : output.detach().chunk(at_once, 1)) outputs.push_back(own);
      for (const at::Tensor& own : input.grad().chunk(at_once, 1)) input_grads.push_back(own);
    }
    for (const NamedParameter& param : collect_parameters(layer))
      grads[param.name] = param.tensor.grad();
  }

  /// The replicas have different means, and so choose other experts.
  static at::Tensor batch(int64_t replica) {
    const auto number = static_cast<double>(replica);
    return numbers({kLength, kRows, kHidden}, number) + number;
  }
  static at::Tensor weight(int64_t replica) {
    return numbers({kLength, kRows, kHidden}, 10 + static_cast<double>(replica));
  }
};

/// Sums the partial gradients of `param`, as finalize_model_grads does.
at::Tensor summed_gradient(const NamedParameter& param, const ParallelState& state) {
  at::Tensor grad = param.tensor.grad().clone();
  const auto sum = [&](GroupKind kind) {
    all_reduce(state.group(kind), grad, ReduceOp::sum, param.name).wait();
  };
  sum(param.description.is_expert ? GroupKind::expert_dp : GroupKind::dp_cp);
  for (const auto& [axis, kind] :
       {std::pair{MeshAxis::tp, GroupKind::tp}, std::pair{MeshAxis::etp, GroupKind::expert_tp}})
    if (param.description.gradient_state(axis) == GradientState::partial_sum) sum(kind);
  return grad;
}

/// This rank's part of the gradient of the whole parameter.
at::Tensor part_of(at::Tensor whole, const ParamDescription& description,
                   const ParallelState& state) {
  for (const auto& [axis, kind] :
       {std::pair{MeshAxis::tp, GroupKind::tp}, std::pair{MeshAxis::ep, GroupKind::ep},
        std::pair{MeshAxis::etp, GroupKind::expert_tp}}) {
    const Placement placement = description.placement(axis);
    const ProcessGroup group = state.group(kind);
    if (const auto* const shard = std::get_if<Shard>(&placement))
      whole = whole.chunk(group.size(), shard->dim)[static_cast<size_t>(group.rank())];
  }
  return whole;
}

void expect_equal_to_one_process(const TransformerConfig& config, Layout layout,
                                 CollectiveLog* log = nullptr) {
  const ParallelSizes& sizes = layout.sizes;
  SCOPED_TRACE(fmt::format("tp {} cp {} ep {} etp {} of {}", sizes.tensor, sizes.context,
                           sizes.expert, sizes.expert_tensor.value_or(-1), layout.world));
  const Whole whole(config, layout.world / sizes.tensor / sizes.context);
  run_ranks(
      layout.world,
      [&](const ParallelState& state) {
        const MoELayer layer(layer_context(config, layout, state));
        for (const NamedParameter& param : collect_parameters(layer))
          if (const auto bias = whole.biases.find(param.name); bias != whole.biases.end())
            at::Tensor(param.tensor.detach())
                .copy_(part_of(bias->second, param.description, state));
        const ProcessGroup tp = state.group(GroupKind::tp), cp = state.group(GroupKind::cp);
        const auto replica = static_cast<size_t>(state.group(GroupKind::dp).rank());
        const auto own = [&](const at::Tensor& x) {
          const at::Tensor part = x.chunk(cp.size(), 0)[static_cast<size_t>(cp.rank())];
          return layout.sequence_parallel ? part.chunk(tp.size(), 0)[static_cast<size_t>(tp.rank())]
                                          : part;
        };
        const auto number = static_cast<int64_t>(replica);
        const at::Tensor input = own(Whole::batch(number)).clone().requires_grad_(true);
        const at::Tensor output = layer.forward(input);
        EXPECT_TRUE(at::allclose(output, own(whole.outputs[replica]), 1e-12, 1e-12));
        (output * own(Whole::weight(number))).sum().backward();
        EXPECT_TRUE(at::allclose(input.grad(), own(whole.input_grads[replica]), 1e-12, 1e-12));
        for (const NamedParameter& param : collect_parameters(layer))
          EXPECT_TRUE(at::allclose(summed_gradient(param, state),
                                   part_of(whole.grads.at(param.name), param.description, state),
                                   1e-11, 1e-12))
              << param.name;
      },
      {.sizes = sizes, .log = log});
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {2, {.expert = 2}},
      {4, {.expert = 4}},
      {4, {.tensor = 2, .expert = 2, .expert_tensor = 1}},
      {4, {.tensor = 2, .expert = 4, .expert_tensor = 1}, true},
      {4, {.tensor = 2, .expert = 2}, true},
      {4, {.context = 2, .expert = 2}},
      {3, {.expert = 1, .expert_tensor = 3}},
      {8, {.tensor = 2, .context = 2, .expert = 2, .expert_tensor = 2}, true}};
  return all;
}

TEST(MoELayer, EqualsOneProcessOnEveryLayout) {
  for (const auto type : {TokenDispatcher::alltoall, TokenDispatcher::allgather})
    for (const Layout& layout : layouts()) {
      TransformerConfig config = layer_config();
      config.moe_token_dispatcher_type = type;
      expect_equal_to_one_process(config, layout);
    }
}

TEST(MoELayer, LossesOfTheRouterDoNotDependOnTheLayout) {
  for (const auto kind : {RouterLoadBalancing::aux_loss, RouterLoadBalancing::seq_aux_loss})
    for (const Layout& layout : layouts()) {
      TransformerConfig config = layer_config();
      config.moe_router_load_balancing_type = kind;
      config.moe_aux_loss_coeff = 0.7;
      config.moe_z_loss_coeff = 0.3;
      expect_equal_to_one_process(config, layout);
    }
}

TEST(MoELayer, CapacityDropsTheSameTokensOnEveryLayout) {
  for (const bool pad : {false, true})
    for (const Layout& layout : layouts()) {
      TransformerConfig config = layer_config();
      config.moe_expert_capacity_factor = 0.8;
      config.moe_pad_expert_input_to_capacity = pad;
      config.moe_aux_loss_coeff = 0.1;
      expect_equal_to_one_process(config, layout);
    }
}

TEST(MoELayer, SharedExpertBiasesGeluAndSigmoid) {
  for (const Layout& layout : layouts()) {
    TransformerConfig config = layer_config();
    config.activation = Activation::gelu;
    config.add_bias_linear = true;
    config.moe_shared_expert_intermediate_size = 8;
    config.moe_router_score_function = RouterScoreFunction::sigmoid;
    config.moe_router_topk_scaling_factor = 1.5;
    config.moe_router_num_groups = 2;
    config.moe_router_group_topk = 1;
    expect_equal_to_one_process(config, layout);
  }
}

TEST(MoELayer, GlobalLossCountsAllRanks) {
  TransformerConfig config = layer_config();
  config.moe_aux_loss_coeff = 0.7;
  config.moe_router_load_balancing_type = RouterLoadBalancing::aux_loss;
  const at::Tensor apart = Whole(config, /*replicas=*/2).grads.at("router.weight");
  config.moe_router_load_balancing_type = RouterLoadBalancing::global_aux_loss;
  const at::Tensor together = Whole(config, /*replicas=*/2).grads.at("router.weight");
  EXPECT_FALSE(at::allclose(together, apart, 1e-2)) << "each replica chooses as all do";
  for (const Layout& layout :
       {Layout{2, {.context = 2, .expert = 2}},
        Layout{2, {.tensor = 2, .expert = 2, .expert_tensor = 1}}, Layout{2, {.expert = 2}},
        Layout{4, {.context = 2, .expert = 2}},
        Layout{4, {.tensor = 2, .expert = 2, .expert_tensor = 1}, true},
        Layout{8, {.tensor = 2, .context = 2, .expert = 2, .expert_tensor = 2}, true}})
    expect_equal_to_one_process(config, layout);
}

TEST(MoELayer, AllToAllSendsEachChosenTokenOnce) {
  CollectiveLog log;
  expect_equal_to_one_process(layer_config(), {2, {.expert = 2}}, &log);
  std::vector<std::string> calls;
  int64_t rows = 0;
  for (int64_t rank = 0; rank < 2; ++rank)
    for (const CollectiveRecord& call : log.of_rank(rank)) {
      if (call.group != "tp-ep") continue;
      if (rank == 0) calls.push_back(call.operation + " of " + call.label);
      if (call.label == "tokens of the experts") rows += call.bytes / (kHidden * 8);
    }
  EXPECT_EQ(calls, (std::vector<std::string>{"all_gather of numbers of tokens",
                                             "all_to_all of tokens of the experts",
                                             "all_to_all of outputs of the experts",
                                             "all_to_all of gradient of outputs of the experts",
                                             "all_to_all of gradient of tokens of the experts"}));
  EXPECT_EQ(rows, 2 * kLength * kRows * 2);  // two replicas, top 2
}

TEST(MoELayer, ExpertsStartAlikeAndDescribeThemselves) {
  const TransformerConfig config = layer_config();
  const MoELayer whole(layer_context(config, {}, ParallelState::single_process()));
  std::map<std::string, at::Tensor> weights;
  for (const NamedParameter& param : collect_parameters(whole)) weights[param.name] = param.tensor;
  EXPECT_EQ(weights.at("router.weight").sizes(), (std::vector<int64_t>{4, kHidden}));
  EXPECT_EQ(weights.at("experts.linear_fc1.weight").sizes(),
            (std::vector<int64_t>{4, 2, 12, kHidden}));
  EXPECT_EQ(weights.at("experts.linear_fc2.weight").sizes(),
            (std::vector<int64_t>{4, kHidden, 12}));
  const Layout layout{4, {.expert = 2, .expert_tensor = 2}};
  run_ranks(4,
            [&](const ParallelState& state) {
              const MoELayer layer(layer_context(config, layout, state));
              for (const NamedParameter& param : collect_parameters(layer)) {
                EXPECT_EQ(param.description.is_expert, param.name.starts_with("experts."));
                EXPECT_TRUE(at::equal(param.tensor,
                                      part_of(weights.at(param.name), param.description, state)))
                    << param.name;
              }
            },
            {.sizes = layout.sizes});
  TransformerConfig twelve = config;
  twelve.hidden_size = 12;
  const TopKRouter router(layer_context(twelve, {}, ParallelState::single_process()));
  EXPECT_EQ(router.parameters()[0].numel(), 48);
}

// Ranks that exchange tokens without waiting for a device rely on it: each may have other padding.
TEST(MoELayer, TheMostPairsDoNotDependOnPadding) {
  TransformerConfig config = layer_config();
  for (const bool pad : {false, true}) {
    config.moe_expert_capacity_factor = 0.5;
    config.moe_pad_expert_input_to_capacity = pad;
    const TopKRouter router(layer_context(config, {}, ParallelState::single_process()));
    const at::Tensor hidden = Whole::batch(0);
    PaddingTokens padding = {at::zeros({kLength, kRows}, at::kBool), 6};
    padding.map.flatten().slice(0, kLength * kRows - 6).fill_(true);
    const Routing all = router.forward(hidden), some = router.forward(hidden, padding);
    EXPECT_EQ(some.sizes().pairs, all.sizes().pairs) << pad;
    EXPECT_LT(some.map.sum().item<int64_t>(), all.map.sum().item<int64_t>()) << pad;
  }
}

TEST(MoELayer, CountsChoicesForTheExpertBiasWhileTraining) {
  TransformerConfig config = layer_config();
  config.moe_router_score_function = RouterScoreFunction::sigmoid;
  config.moe_router_enable_expert_bias = true;
  MoELayer layer(layer_context(config, {}, ParallelState::single_process()));
  const auto routers = find_routers(layer);
  ASSERT_EQ(routers.size(), 1);
  const auto counted = [&] { return routers[0]->tokens_per_expert().sum().item<int64_t>(); };
  layer.forward(Whole::batch(0));
  EXPECT_EQ(counted(), kLength * kRows * 2);
  {
    const at::NoGradGuard no_grad;
    layer.forward(Whole::batch(0));
  }
  layer.eval();
  layer.forward(Whole::batch(0));
  EXPECT_EQ(counted(), kLength * kRows * 2);
  EXPECT_EQ(routers[0]->expert_bias().numel(), 4);
}

TEST(MoELayer, TakesFewerTokensThanRanksOfTensorParallelismUnlessItTrains) {
  TransformerConfig config = layer_config();
  config.moe_expert_capacity_factor = 1;
  for (const auto& [tensor, context, length] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {3, 1, 1}, {3, 1, 2}, {3, 1, 5}, {3, 2, 4}, {4, 2, 4}, {4, 2, 12}}) {
    const at::Tensor input = numbers({length, kRows, kHidden}, 3);
    const Layout layout = {tensor * context, {.tensor = tensor, .context = context}};
    const auto body = [&](const ParallelState& state) {
      const auto own = [&](const at::Tensor& x) {
        return cut_for_context(x, 0, state.group(GroupKind::cp));
      };
      MoELayer alone(layer_context(config, {}, ParallelState::single_process()));
      alone.eval();
      MoELayer layer(layer_context(config, layout, state));
      layer.eval();
      const at::NoGradGuard no_grad;
      const at::Tensor expected = own(alone.forward(input));
      EXPECT_TRUE(at::allclose(layer.forward(own(input)), expected, 1e-12, 1e-12)) << input.sizes();
    };
    run_ranks(layout.world, body, {.sizes = layout.sizes});
  }
}

TEST(MoELayer, ASequenceThatTensorParallelismCannotCutIsRefusedBesidePaddingToo) {
  run_ranks(3,
            [](const ParallelState& state) {
              const MoELayer layer(layer_context(layer_config(), {3, {.tensor = 3}}, state));
              TokenPositions tokens;
              tokens.padding.map = at::zeros({4, kRows}, at::kBool);
              EXPECT_THROW(layer.forward(numbers({4, kRows, kHidden}, 3), tokens), UsageError);
            },
            {.sizes = {.tensor = 3}});
}

}  // namespace
}  // namespace lockstep
