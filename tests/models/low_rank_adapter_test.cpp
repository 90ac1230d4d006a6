// Low-rank adapters on linear layers: values and gradients compared with plain libtorch in one
// process, on ranks of tp with and without sequence parallelism; what they send; what they state.

#include "lockstep/models/low_rank_adapter.h"

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/adapter_params.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/models/layer_params.h"
#include "lockstep/models/linear.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::difference;
using testing::join_parts;
using testing::Layout;
using testing::NamedTensors;
using testing::run_ranks;
using testing::small_gpt;
using testing::throws_with;

constexpr int64_t kSequence = 12, kBatch = 2, kIn = 24, kWidth = 12, kRank = 5;
constexpr double kScale = 7.0 / kRank;

LoraConfig lora_of(const std::vector<std::string>& targets, double dropout = 0) {
  LoraConfig lora;
  lora.rank = kRank;
  lora.alpha = 7;
  lora.dropout = dropout;
  lora.target_modules = targets;
  return lora;
}

/// The layer's specification, plus an adapter whose B is not zero.
ModuleSpec with_adapter(ModuleSpec spec, GradientState replicated) {
  spec.name = "linear";
  add_params(spec, adapter_params(spec, lora_of({"linear"}), replicated));
  spec.params.back().values = NormalValues{0.5};
  return spec;
}

ModuleSpec column_spec(GradientState replicated) {
  return with_adapter(column_parallel_linear_params(kIn, {2, kWidth}, /*bias=*/true, 0.3),
                      replicated);
}
ModuleSpec row_spec(GradientState replicated) {
  return with_adapter(row_parallel_linear_params(replicated, kIn, kWidth, /*bias=*/true, 0.3),
                      replicated);
}

ParallelContext context_of(const Layout& layout, const ParallelState& state, double dropout = 0) {
  return {.state = state,
          .options = at::TensorOptions(at::kDouble),
          .sequence_parallel = layout.sequence,
          .name = "linear.",
          .lora = lora_of({"linear"}, dropout)};
}

at::Tensor numbers(at::IntArrayRef shape, double step) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return at::arange(count, at::kDouble).mul(step).sin().view(shape);
}

at::Tensor own_part(const at::Tensor& whole, int64_t dim, const ProcessGroup& tp) {
  const int64_t part = whole.size(dim) / tp.size();
  return whole.narrow(dim, tp.rank() * part, part).contiguous();
}

struct Outcome {
  at::Tensor output, input_gradient;
  NamedTensors gradients;
};

/// y = x W^T + b + scale (x A^T) B^T, with the initial weights of a layer in one process.
Outcome plain(const DescribedModule& layer, const at::Tensor& x, const at::Tensor& factors) {
  NamedTensors leaves;
  for (const auto& param : layer.named_parameters())
    leaves[param.key()] = param.value().detach().clone().requires_grad_(true);
  const at::Tensor input = x.clone().requires_grad_(true);
  const at::Tensor low = at::linear(input, leaves.at("lora_A"));
  const at::Tensor output =
      at::linear(input, leaves.at("weight").flatten(0, -2), leaves.at("bias").flatten()) +
      at::linear(low, leaves.at("lora_B").flatten(0, -2)) * kScale;
  (output * factors).sum().backward();
  Outcome outcome{output.detach(), input.grad(), {}};
  for (const char* const name : {"lora_A", "lora_B"})
    outcome.gradients[name] = leaves.at(name).grad();
  return outcome;
}

/// Compares the adapter's gradients, joined over tp and summed where the description says so.
void expect_gradients(const DescribedModule& layer, const Outcome& expected,
                      const ProcessGroup& tp) {
  for (const NamedParameter& param : collect_parameters(layer)) {
    if (!param.tensor.requires_grad()) {
      EXPECT_FALSE(param.tensor.grad().defined()) << param.name;
      continue;
    }
    at::Tensor gradient = join_parts(param.description, param.tensor.grad(), tp).clone();
    if (param.description.gradient_state(MeshAxis::tp) == GradientState::partial_sum)
      all_reduce(tp, gradient, ReduceOp::sum, "gradient").wait();
    EXPECT_LT(difference(gradient, expected.gradients.at(param.name)), 1e-12) << param.name;
    EXPECT_GT(gradient.abs().max().item<double>(), 1e-3) << param.name;
  }
}

void freeze_base(const torch::nn::Module& layer) {
  for (const auto& param : layer.named_parameters())
    if (param.key() == "weight" || param.key() == "bias") param.value().set_requires_grad(false);
}

const std::vector<Layout> kLayouts = {{1}, {2}, {3}, {4}, {2, true}, {3, true}, {4, true}};

TEST(LowRankAdapter, BesideAColumnParallelLayer) {
  const at::Tensor x = numbers({kSequence, kBatch, kIn}, 0.7);
  const at::Tensor factors = numbers({kSequence, kBatch, 2 * kWidth}, 1.3);
  const auto alone = context_of({1}, ParallelState::single_process());
  const Outcome expected =
      plain(ColumnParallelLinear(alone, column_spec(GradientState::complete)), x, factors);
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.text());
    run_ranks(
        layout.tensor,
        [&](const ParallelState& state) {
          const ProcessGroup tp = state.group(GroupKind::tp);
          const ParallelContext context = context_of(layout, state);
          const ColumnParallelLinear layer(context,
                                           column_spec(context.replicated_gradient_state()));
          freeze_base(layer);
          const auto rows_of = [&](const at::Tensor& whole) {
            return own_part(whole.view({kSequence, kBatch, 2, kWidth}), 3, tp).flatten(2);
          };
          const auto tokens_of = [&](const at::Tensor& whole) {
            return layout.sequence ? own_part(whole, 0, tp) : whole;
          };
          const at::Tensor input = tokens_of(x).clone().requires_grad_(true);
          const at::Tensor output = layer.forward(input);
          (output * rows_of(factors)).sum().backward();
          EXPECT_LT(difference(output.detach(), rows_of(expected.output)), 1e-12);
          EXPECT_LT(difference(input.grad(), tokens_of(expected.input_gradient)), 1e-12);
          expect_gradients(layer, expected, tp);
        },
        layout.threads());
  }
}

TEST(LowRankAdapter, BesideARowParallelLayer) {
  const at::Tensor x = numbers({kSequence, kBatch, kIn}, 0.7);
  const at::Tensor factors = numbers({kSequence, kBatch, kWidth}, 1.3);
  const auto alone = context_of({1}, ParallelState::single_process());
  const Outcome expected =
      plain(RowParallelLinear(alone, row_spec(GradientState::complete)), x, factors);
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.text());
    run_ranks(
        layout.tensor,
        [&](const ParallelState& state) {
          const ProcessGroup tp = state.group(GroupKind::tp);
          const ParallelContext context = context_of(layout, state);
          const RowParallelLinear layer(context, row_spec(context.replicated_gradient_state()));
          freeze_base(layer);
          const auto tokens_of = [&](const at::Tensor& whole) {
            return layout.sequence ? own_part(whole, 0, tp) : whole;
          };
          const at::Tensor input = own_part(x, 2, tp).clone().requires_grad_(true);
          const at::Tensor output = layer.forward(input);
          (output * tokens_of(factors)).sum().backward();
          EXPECT_LT(difference(output.detach(), tokens_of(expected.output)), 1e-12);
          EXPECT_LT(difference(input.grad(), own_part(expected.input_gradient, 2, tp)), 1e-12);
          expect_gradients(layer, expected, tp);
        },
        layout.threads());
  }
}

/// "all_reduce (sum) of lora_A output: 480", for each call of the adapter on rank 0.
template <class Layer>
std::vector<std::string> sent(const Layout& layout, ModuleSpec (*spec)(GradientState)) {
  CollectiveLog log;
  run_ranks(
      layout.tensor,
      [&](const ParallelState& state) {
        const ParallelContext context = context_of(layout, state);
        const Layer layer(context, spec(context.replicated_gradient_state()));
        freeze_base(layer);
        const bool columns = std::is_same_v<Layer, ColumnParallelLinear>;
        const int64_t parts = layout.tensor;
        const at::Tensor x = at::ones({columns && layout.sequence ? kSequence / parts : kSequence,
                                       kBatch, columns ? kIn : kIn / parts},
                                      at::kDouble);
        layer.forward(x.requires_grad_(true)).sum().backward();
      },
      layout.threads(&log));
  std::vector<std::string> result;
  for (const auto& call : log.of_rank(0))
    if (const size_t at = call.label.find("linear.lora"); at != std::string::npos)
      result.push_back(fmt::format("{} of {}: {}", call.operation,
                                   std::string(call.label).erase(at, 7), call.bytes));
  return result;
}

TEST(LowRankAdapter, SendsWhatTheTableSays) {
  using Sent = std::vector<std::string>;
  constexpr int64_t kBytes = kSequence * kBatch * kRank * 8;
  for (const int64_t n : {2, 3}) {
    const auto line = [](const std::string& call, int64_t bytes) {
      return fmt::format("{}: {}", call, bytes);
    };
    EXPECT_EQ(sent<ColumnParallelLinear>({n}, column_spec),
              (Sent{line("all_reduce (sum) of gradient of lora_B input", kBytes)}));
    EXPECT_EQ(sent<ColumnParallelLinear>({n, true}, column_spec),
              (Sent{line("all_gather of lora_B input", kBytes / n),
                    line("all_gather of lora_B input again", kBytes / n),
                    line("reduce_scatter (sum) of gradient of lora_B input", kBytes)}));
    EXPECT_EQ(sent<RowParallelLinear>({n}, row_spec),
              (Sent{line("all_reduce (sum) of lora_A output", kBytes)}));
    EXPECT_EQ(sent<RowParallelLinear>({n, true}, row_spec),
              (Sent{line("reduce_scatter (sum) of lora_A output", kBytes),
                    line("all_gather of gradient of lora_A output", kBytes / n)}));
  }
}

TEST(LowRankAdapter, DropsTheSameElementsOnEveryLayout) {
  constexpr double kDropout = 0.3;
  const at::Tensor x = numbers({kSequence, kBatch, kIn}, 0.7).abs() + 1;
  const auto alone = context_of({1}, ParallelState::single_process(), kDropout);
  const TokenPositions tokens = {.first_sample = 6};
  const at::Tensor of_columns =
      ColumnParallelLinear(alone, column_spec(GradientState::complete)).forward(x, tokens);
  const at::Tensor of_rows =
      RowParallelLinear(alone, row_spec(GradientState::complete)).forward(x, tokens);
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.text());
    run_ranks(
        layout.tensor,
        [&](const ParallelState& state) {
          const ProcessGroup tp = state.group(GroupKind::tp);
          const ParallelContext context = context_of(layout, state, kDropout);
          const GradientState replicated = context.replicated_gradient_state();
          const ColumnParallelLinear columns(context, column_spec(replicated));
          const RowParallelLinear rows(context, row_spec(replicated));
          const at::Tensor chunk = layout.sequence ? own_part(x, 0, tp) : x;
          const at::Tensor wide = of_columns.view({kSequence, kBatch, 2, kWidth});
          EXPECT_LT(difference(columns.forward(chunk, tokens), own_part(wide, 3, tp).flatten(2)),
                    1e-12);
          EXPECT_LT(difference(rows.forward(own_part(x, 2, tp), tokens),
                               layout.sequence ? own_part(of_rows, 0, tp) : of_rows),
                    1e-12);
        },
        layout.threads());
  }
  ColumnParallelLinear layer(alone, column_spec(GradientState::complete));
  EXPECT_GT(difference(layer.forward(x, {.first_sample = 7}), of_columns), 1e-3);
  const double dropped = difference(layer.forward(x, tokens), of_columns);
  EXPECT_EQ(dropped, 0);
  layer.eval();
  EXPECT_GT(difference(layer.forward(x, tokens), of_columns), 1e-3);
}

GPTModelOptions options_with(const std::vector<std::string>& targets) {
  return {.dtype = at::kDouble, .lora = lora_of(targets)};
}

const std::vector<std::string> kAllTargets = {"linear_qkv", "linear_proj", "linear_fc1",
                                              "linear_fc2"};

void fill_b(const GPTModel& model) {
  const at::NoGradGuard no_grad;
  for (const auto& param : model.named_parameters())
    if (param.key().ends_with("lora_B"))
      param.value().copy_(numbers(param.value().sizes(), 0.9).mul(0.2));
}

TEST(LowRankAdapter, MergedEqualsUnmerged) {
  TransformerConfig config = small_gpt();
  config.num_query_groups = 2;
  const GPTModel adapted(config, options_with(kAllTargets));
  const GPTModel merged(config, {.dtype = at::kDouble});
  const at::Tensor ids = testing::sample_ids(config, 3).slice(1, 0, -1);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(difference(adapted.forward(ids), merged.forward(ids)), 0) << "B starts as zero";
  fill_b(adapted);
  const at::Tensor expected = adapted.forward(ids);
  EXPECT_GT(difference(merged.forward(ids), expected), 1e-2);
  const auto params = adapted.named_parameters();
  int64_t count = 0;
  for (const AdaptedLinear& linear : adapted_linears(gpt_params(
           {.config = adapted.config(), .lora = lora_of(kAllTargets)}, GPTStage::whole(config)))) {
    merged.named_parameters()[linear.weight].copy_(merged_weight(
        params[linear.weight], params[linear.a], params[linear.b], lora_of(kAllTargets)));
    ++count;
  }
  EXPECT_EQ(count, 8);
  EXPECT_LT(difference(merged.forward(ids), expected), 1e-12);
}

TEST(LowRankAdapter, AloneIsTrained) {
  const TransformerConfig config = small_gpt();
  const GPTModel model(config, options_with({"linear_qkv", "linear_fc2"}));
  fill_b(model);
  const at::Tensor ids = testing::sample_ids(config, 2);
  model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum().backward();
  std::vector<std::string> trained;
  for (const auto& param : model.named_parameters()) {
    EXPECT_EQ(param.value().grad().defined(), param.value().requires_grad()) << param.key();
    if (param.value().requires_grad()) trained.push_back(param.key());
  }
  std::vector<std::string> expected;
  for (const char* const layer : {"decoder.layers.0.", "decoder.layers.1."})
    for (const char* const module : {"self_attention.linear_qkv.", "mlp.linear_fc2."})
      for (const char* const param : {"lora_A", "lora_B"})
        expected.push_back(fmt::format("{}{}{}", layer, module, param));
  EXPECT_EQ(trained, expected);
}

TEST(LowRankAdapter, StatesItsParameters) {
  const ModuleSpec spec = column_spec(GradientState::partial_sum);
  const ParamSpec &a = spec.at("lora_A"), &b = spec.at("lora_B");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{kRank, kIn}));
  EXPECT_EQ(b.shape, (std::vector<int64_t>{2, kWidth, kRank}));
  EXPECT_EQ(a.description.to_string(),
            "dense, partial-sum over tp, partial-sum over cp, partial-sum over dp, updated as a "
            "matrix");
  EXPECT_EQ(b.description.to_string(),
            "dense, Shard(1) over tp, partial-sum over cp, partial-sum over dp, updated as a "
            "matrix");
  const ModuleSpec rows = row_spec(GradientState::complete);
  EXPECT_EQ(rows.at("lora_A").description.to_string(),
            "dense, Shard(1) over tp, partial-sum over cp, partial-sum over dp, updated as a "
            "matrix");
  EXPECT_EQ(rows.at("lora_B").description.to_string(),
            "dense, partial-sum over cp, partial-sum over dp, updated as a matrix");
  EXPECT_EQ(std::get<NormalValues>(a.values).standard_deviation, std::sqrt(1.0 / (3 * kIn)));
  TransformerConfig experts = small_gpt();
  experts.num_experts = 4;
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        GPTModel(experts, options_with({"linear_qkv", "linear_fc1"}));
      },
      "lora.target_modules: found linear_fc1, allowed with model.num_experts: linear_qkv, "
      "linear_proj"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { GPTModel(small_gpt(), options_with({"lm_head"})); },
                                       "lora.target_modules: found 'lm_head', allowed: "));
}

}  // namespace
}  // namespace lockstep
