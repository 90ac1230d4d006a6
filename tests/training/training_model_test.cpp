// How the losses of micro-batches enter the gradient. Losses of tokens are summed or averaged;
// experts' routers add theirs at the same scale.

#include "lockstep/training/training_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::run_ranks;

constexpr int64_t kTokens = 8, kMicrobatches = 2;  // tokens of a micro-batch on all ranks of cp

/// Gradients are reduced when they are finalized, so that a test can look at a rank's own first.
Config one_layer(int64_t context, bool per_token, std::vector<std::string> overrides) {
  overrides.emplace_back("ddp.overlap_grad_reduce=false");
  overrides.push_back("parallel.context_parallel_size=" + std::to_string(context));
  overrides.emplace_back(per_token ? "ddp.calculate_per_token_loss=true"
                                   : "ddp.calculate_per_token_loss=false");
  return parse_config(
      "model { num_layers: 1 hidden_size: 8 num_attention_heads: 2 ffn_hidden_size: 8 "
      "seq_length: 8 vocab_size: 2 } "
      "train { global_batch_size: 2 micro_batch_size: 1 precision: \"fp64\" }",
      "test", overrides);
}

void run_context_ranks(int64_t context, const testing::RankBody& body) {
  testing::RankThreadOptions options;
  options.sizes.context = context;
  run_ranks(context, body, options);
}

at::Tensor parameter(const torch::nn::Module& module, const std::string& name) {
  for (const NamedParameter& param : collect_parameters(module))
    if (param.name == name) return param.tensor;
  throw std::out_of_range(name);
}

/// Gives every token the loss 2, which is also its derivative with respect to the returned weight:
/// the logits of the vocabulary are 0 and log(exp(2) - 1), and the label is the first.
at::Tensor make_each_loss_two(const GPTModel& model) {
  const at::NoGradGuard no_grad;
  const double slope = 1 - std::exp(-2);  // of the loss, in the second logit
  at::Tensor scale = parameter(model, "decoder.final_layernorm.weight"),
             shift = parameter(model, "decoder.final_layernorm.bias"),
             table = parameter(model, "output_layer.weight");
  scale.zero_();
  shift.zero_();
  shift[0].fill_(2 / slope);
  table.zero_();
  table[1][0].fill_(std::log(std::exp(2) - 1) * slope / 2);
  return table;
}

// The losses of a micro-batch's 8 tokens sum to 16, their mean is 2. With cp 2 those of a rank's
// tokens sum to 8. What a rank averages is Megatron Core's loss of two numbers: its share 8 / 8,
// times 2 ranks, divided by 2 micro-batches.
TEST(TrainingModel, G93LossesAreDividedByTokensAndMicrobatchesOrSummed) {
  for (const int64_t context : {1, 2})
    for (const bool per_token : {false, true}) {
      const Config config = one_layer(
          context, per_token,
          {"model.normalization=LayerNorm", "model.untie_embeddings_and_output_weights=true"});
      run_context_ranks(context, [&](const ParallelState& state) {
        TrainingModel model(config, state);
        const at::Tensor table = make_each_loss_two(*model.chunks()[0]);
        const at::Tensor ids = at::zeros({1, kTokens / context}, at::kLong);
        model.zero_grad_buffer();
        const LossSums sums = model.forward_backward(
            kMicrobatches, 1, [&](int64_t) { return GPTInput{.tokens = ids, .labels = ids}; });
        const auto ranks = static_cast<double>(context);
        EXPECT_NEAR(sums.loss.item<double>(), kMicrobatches * 16 / ranks, 1e-13);
        EXPECT_EQ(sums.tokens, kMicrobatches * 8 / ranks);
        const auto of_all = [&] { return table.grad()[1][0].item<double>(); };
        EXPECT_NEAR(of_all() / kMicrobatches, per_token ? 16 / ranks : 1.0, 1e-14);
        model.finalize_gradients(sums.tokens);
        EXPECT_NEAR(of_all(), 2, 1e-14);  // the mean over the batch
      });
    }
}

TEST(TrainingModel, TokensWithoutALabelCountForNothing) {
  // The micro-batches have different numbers of labels: the mean of their means is not the mean
  // over all labels.
  const auto number = [](int64_t microbatch) { return microbatch == 0 ? 3 : 5; };
  const auto input = [&](int64_t microbatch) {
    const at::Tensor tokens = ((at::arange(kTokens) + microbatch) % 3 % 2).unsqueeze(0);
    const at::Tensor labels = 1 - tokens;
    labels.slice(1, number(microbatch)).fill_(-100);
    return GPTInput{.tokens = tokens, .labels = labels};
  };
  for (const bool per_token : {false, true}) {
    const Config config = one_layer(1, per_token, {"model.init_method_std=0.5"});
    GPTModel alone(config.model, {.dtype = at::kDouble, .seed = 1234});
    double expected = 0;
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      const at::Tensor sum = alone.forward(input(m)).sum();
      expected += sum.item<double>();
      (sum / (per_token ? 3 + 5 : kMicrobatches * number(m))).backward();
    }
    TrainingModel model(config, ParallelState::single_process());
    model.zero_grad_buffer();
    const LossSums sums = model.forward_backward(kMicrobatches, 1, input);
    EXPECT_EQ(sums.tokens, 3 + 5);
    EXPECT_NEAR(sums.loss.item<double>(), expected, 1e-12);
    model.finalize_gradients(sums.tokens);
    for (const NamedParameter& param : collect_parameters(*model.chunks()[0]))
      EXPECT_TRUE(
          at::allclose(param.tensor.grad(), parameter(alone, param.name).grad(), 1e-12, 1e-14))
          << param.name;
  }
}

/// The losses are added in order, with the bits of micro-batches that run alone.
TEST(TrainingModel, AValidationHoldsTheTokensOfFewMicrobatches) {
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  constexpr int64_t kTogether = TrainingModel::kEvaluatedTogether;
  const std::vector<std::string> deep = {"model.num_layers=2", "model.init_method_std=0.5"};
  const auto ids = [](int64_t microbatch) {
    return (at::arange(kTokens) * microbatch % 7 % 2).unsqueeze(0);
  };
  TrainingModel alone(one_layer(1, true, deep), ParallelState::single_process());
  for (const int64_t stages : {1, 2}) {
    const int64_t count = stages * (3 * kTogether + 3);
    double expected = 0;
    for (int64_t m = 0; m < count; ++m) {
      const auto of_one = [&](int64_t) { return GPTInput{.tokens = ids(m), .labels = ids(m)}; };
      expected += alone.evaluate(1, of_one).loss.item<double>();
    }
    std::vector<std::string> cut = deep;
    cut.push_back("parallel.pipeline_model_parallel_size=" + std::to_string(stages));
    const Config config = one_layer(1, true, cut);
    testing::RankThreadOptions options;
    options.sizes.pipeline = stages;
    run_ranks(
        stages,
        [&](const ParallelState& state) {
          TrainingModel model(config, state);
          std::vector<Weak> made;
          int64_t most = 0;  // of those that are there at a time
          const LossSums sums = model.evaluate(count, [&](int64_t m) {
            EXPECT_EQ(m, static_cast<int64_t>(made.size()));
            const at::Tensor tokens = ids(m);
            made.emplace_back(tokens.getIntrusivePtr());
            const auto is_there = [](const Weak& one) { return !one.expired(); };
            most = std::max<int64_t>(most, std::count_if(made.begin(), made.end(), is_there));
            return GPTInput{.tokens = tokens, .labels = tokens};
          });
          EXPECT_EQ(static_cast<int64_t>(made.size()), count);
          EXPECT_LT(most, stages * 2 * kTogether);
          if (state.rank() + 1 < stages) return;
          EXPECT_EQ(sums.loss.item<double>(), expected);
          EXPECT_EQ(sums.tokens, static_cast<double>(count * kTokens));
        },
        options);
  }
}

// With loss scale 3, 4 ranks of cp and 2 micro-batches, Megatron Core multiplies the routers' mean
// loss by 3 * 4 / 2 = 6. Where losses are summed, the routers' loss is a sum too, and the factor is
// 3. Ours is a loss of each token. (There are no layers that predict further tokens.)
TEST(TrainingModel, G72ScaleOfTheLossesOfRouters) {
  for (const bool per_token : {false, true}) {
    const auto config = [&](int64_t context) {
      return one_layer(context, per_token,
                       {"model.num_experts=4", "model.moe_aux_loss_coeff=0.5",
                        "model.moe_z_loss_coeff=0.1", "model.init_method_std=0.5"});
    };
    // If the final norm outputs 0, the labels' losses have no gradient before it.
    const auto silence_labels = [](const GPTModel& model) {
      const at::NoGradGuard no_grad;
      parameter(model, "decoder.final_layernorm.weight").zero_();
    };
    const auto ids = [](int64_t microbatch) {
      return ((at::arange(kTokens) + microbatch) % 3 % 2).unsqueeze(0);
    };
    const char* const router = "decoder.layers.0.mlp.router.weight";

    const Config whole = config(1);
    GPTModel alone(whole.model, {.dtype = at::kDouble, .seed = 1234});
    silence_labels(alone);
    for (int64_t m = 0; m < kMicrobatches; ++m)
      alone.forward({.tokens = ids(m), .labels = ids(m)}).sum().backward();
    const at::Tensor of_sums = parameter(alone, router).grad();
    EXPECT_GT(of_sums.abs().max().item<double>(), 0.01);

    run_context_ranks(4, [&](const ParallelState& state) {
      TrainingModel model(config(4), state);
      silence_labels(*model.chunks()[0]);
      const ProcessGroup cp = state.group(GroupKind::cp);
      model.zero_grad_buffer();
      model.forward_backward(kMicrobatches, 3, [&](int64_t m) {
        const at::Tensor part = cut_for_context(ids(m), 1, cp);
        return GPTInput{.tokens = part, .labels = part};
      });
      at::Tensor found = parameter(*model.chunks()[0], router).grad().clone();
      all_reduce(cp, found, ReduceOp::sum, "gradient").wait();
      const at::Tensor of_means = of_sums / kTokens;
      EXPECT_TRUE(at::allclose(found, per_token ? 3.0 * of_sums : 6.0 * of_means, 1e-12, 1e-14));
    });
  }
}

}  // namespace
}  // namespace lockstep
