// Padding after the documents of a sample takes no part in the routing of experts: padded samples
// give the same loss, gradients and expert biases as the same tokens in shorter samples without
// padding, in one process, in fp64.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <map>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/router.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/local_part.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/batch_input.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/training_model.h"

namespace lockstep {
namespace {

using Fields = std::vector<std::string>;

constexpr int64_t kTokens = 8, kSamples = 4;

/// Two documents of 5 and 3 tokens, padded to `length`. All of their tokens count, or some.
SampleMarks marks_of(int64_t length, bool all_count) {
  SampleMarks marks = {.documents = {5, 3},
                       .positions = {0, 1, 2, 3, 4, 0, 1, 2},
                       .loss = {1, 1, 0, 1, 0, 1, 1, 0},
                       .padding = length - kTokens};
  if (marks.padding > 0) marks.documents.push_back(marks.padding);
  for (int64_t i = 0; i < marks.padding; ++i) marks.positions.push_back(i);
  if (all_count) marks.loss.assign(kTokens, 1);
  marks.loss.resize(static_cast<size_t>(length), 0);
  return marks;
}

std::vector<int64_t> ids_of(int64_t sample, int64_t length) {
  std::vector<int64_t> ids(static_cast<size_t>(length + 1), 0);
  for (int64_t i = 0; i < kTokens; ++i)
    ids[static_cast<size_t>(i)] = 1 + (3 * i * i + 5 * i + 11 * sample) % 31;
  return ids;
}

Config config_of(const Fields& model, const Fields& layout, int64_t length, bool averages) {
  Fields all = {"train.precision=fp64", "ddp.overlap_grad_reduce=false",
                fmt::format("ddp.calculate_per_token_loss={}", !averages),
                fmt::format("model.seq_length={}", length)};
  for (const std::string& field : model) all.push_back("model." + field);
  for (const std::string& field : layout) all.push_back("parallel." + field);
  return parse_config(
      "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
      "vocab_size: 32 init_method_std: 0.3 num_experts: 4 moe_router_topk: 2 } "
      "train { global_batch_size: 4 micro_batch_size: 2 }",
      "test", all);
}

struct Step {
  double loss = 0;
  std::map<std::string, at::Tensor> grads, biases;
};

/// A training step of samples of `length` tokens on this rank. With means all tokens have loss:
/// ranks of cp are averaged, and each must have as many tokens with loss as the others.
Step step_of(const Config& config, int64_t length, const ParallelState& state) {
  const bool averages = !config.ddp.calculate_per_token_loss.value();
  TrainingModel model(config, state);
  const int64_t ranks = state.grids().data_parallel_size();
  const int64_t rank = *state.grids().groups(GroupKind::dp).position_of(state.rank());
  model.zero_grad_buffer();
  const LossSums local = model.forward_backward(kSamples / 2 / ranks, 1, [&](int64_t microbatch) {
    const int64_t first = 2 * (microbatch * ranks + rank);
    std::vector<int64_t> ids = ids_of(first, length), more = ids_of(first + 1, length);
    ids.insert(ids.end(), more.begin(), more.end());
    return make_batch_input(ids, std::vector(2, marks_of(length, averages)), length, 2, state);
  });
  model.finalize_gradients(local.tokens);
  at::Tensor loss = local.loss.to(at::kDouble).clone();
  if (state.group(GroupKind::tp).rank() != 0) loss.zero_();
  all_reduce(state.world(), loss, ReduceOp::sum, "loss").wait();
  Step step = {.loss = loss.item<double>(), .grads = {}, .biases = {}};
  for (const auto& chunk : model.chunks()) {
    for (const NamedParameter& param : collect_parameters(*chunk))
      step.grads[param.name] = param.tensor.grad().clone();
    for (const auto& buffer : chunk->named_buffers())
      if (buffer.key().ends_with("expert_bias")) step.biases[buffer.key()] = buffer.value().clone();
  }
  return step;
}

void expect_as_without_padding(const Fields& model, const Fields& layout, int64_t world,
                               int64_t length, bool averages = false) {
  SCOPED_TRACE(fmt::format("{} tokens, {} ranks, {}, {}{}", length, world, fmt::join(model, " "),
                           fmt::join(layout, " "), averages ? ", averages" : ""));
  const Step alone =
      step_of(config_of(model, {}, kTokens, averages), kTokens, ParallelState::single_process());
  const Config config = config_of(model, layout, length, averages);
  testing::RankThreadOptions options;
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  testing::run_ranks(
      world,
      [&](const ParallelState& state) {
        TrainingModel described(config, state);
        const Step step = step_of(config, length, state);
        EXPECT_NEAR(step.loss, alone.loss, 1e-12 * alone.loss);
        for (const auto& chunk : described.chunks())
          for (const NamedParameter& param : collect_parameters(*chunk)) {
            const at::Tensor expected = testing::part_on(alone.grads.at(param.name), param, state);
            const at::Tensor found = step.grads.at(param.name);
            EXPECT_LT((found - expected).abs().max().item<double>(), 1e-12) << param.name;
          }
        for (const auto& [name, bias] : step.biases)
          EXPECT_TRUE(at::equal(bias, alone.biases.at(name))) << name;
      },
      options);
}

const Fields kAuxLoss = {"moe_aux_loss_coeff=0.5", "moe_z_loss_coeff=0.1"};
const Fields kOfSequences = {"moe_aux_loss_coeff=0.5",
                             "moe_router_load_balancing_type=seq_aux_loss"};
const Fields kOfAll = {"moe_aux_loss_coeff=0.5", "moe_router_load_balancing_type=global_aux_loss"};
const Fields kBias = {"moe_aux_loss_coeff=0", "moe_router_score_function=sigmoid",
                      "moe_router_enable_expert_bias=true", "moe_router_bias_update_rate=0.02"};
const Fields kCapacity = {"moe_aux_loss_coeff=0", "moe_expert_capacity_factor=0.8"};
const Fields kPadded = {"moe_aux_loss_coeff=0", "moe_expert_capacity_factor=1",
                        "moe_pad_expert_input_to_capacity=true"};

TEST(PaddedSamples, TrainAsWithoutPaddingInOneProcess) {
  for (const Fields& model : {kAuxLoss, kOfSequences, kOfAll, kBias, kCapacity, kPadded})
    for (const int64_t length : {9, 16, 40}) expect_as_without_padding(model, {}, 1, length);
}

TEST(PaddedSamples, TrainAsWithoutPaddingOnEveryLayout) {
  const char* const tensor = "tensor_model_parallel_size=2";
  for (const Fields& model : {kAuxLoss, kOfSequences, kBias, kCapacity, kPadded}) {
    expect_as_without_padding(model, {"expert_model_parallel_size=2"}, 2, 16);
    expect_as_without_padding(model, {tensor, "sequence_parallel=true"}, 2, 16);
    expect_as_without_padding(model, {tensor}, 2, 16);
    expect_as_without_padding(model, {"context_parallel_size=2"}, 2, 16);
    expect_as_without_padding(model, {"pipeline_model_parallel_size=2"}, 2, 16);
  }
}

TEST(PaddedSamples, MeansOfTokensLeavePaddingOut) {
  const char* const tensor = "tensor_model_parallel_size=2";
  for (const Fields& model : {kAuxLoss, kOfSequences, kOfAll, kCapacity})
    for (const int64_t length : {9, 40}) expect_as_without_padding(model, {}, 1, length, true);
  for (const Fields& model : {kAuxLoss, kOfSequences})
    for (const Fields& layout : std::vector<Fields>{{"expert_model_parallel_size=2"},
                                                    {tensor, "sequence_parallel=true"},
                                                    {tensor},
                                                    {"context_parallel_size=2"},
                                                    {"pipeline_model_parallel_size=2"}})
      expect_as_without_padding(model, layout, 2, 16, true);
}

/// What router losses add to each gradient: with means of tokens, or with sums that are divided by
/// the number of labels, which 5 of 8 tokens have.
std::map<std::string, at::Tensor> grads_of_router_losses(const Fields& losses, bool averages) {
  const ParallelState state = ParallelState::single_process();
  const Step with = step_of(config_of(losses, {}, kTokens, averages), kTokens, state);
  const Step without = step_of(config_of({}, {}, kTokens, averages), kTokens, state);
  std::map<std::string, at::Tensor> grads;
  for (const auto& [name, grad] : with.grads) grads[name] = grad - without.grads.at(name);
  return grads;
}

TEST(PaddedSamples, RouterLossesOfAllTokensAreDividedByTheLabels) {
  for (const Fields& losses : {kAuxLoss, kOfSequences, kOfAll}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(losses, " ")));
    const auto means = grads_of_router_losses(losses, true);
    const auto found = grads_of_router_losses(losses, false);
    EXPECT_GT(means.at("decoder.layers.0.mlp.router.weight").abs().max().item<double>(), 1e-4);
    for (const auto& [name, mean] : means)
      EXPECT_LT((found.at(name) - mean * (8.0 / 5.0)).abs().max().item<double>(), 1e-12) << name;
  }
}

/// The sum of the losses of sample 2 in a micro-batch of `samples`, of which the others, copies of
/// sample 0, do not count; on a rank of which `counted` is 0, no sample counts.
double evaluated_loss(const Config& config, int64_t samples, int64_t counted, bool marked,
                      const ParallelState& state) {
  std::vector<int64_t> ids = ids_of(counted > 0 ? 2 : 0, kTokens);
  for (int64_t i = 1; i < samples; ++i)
    for (const int64_t id : ids_of(0, kTokens)) ids.push_back(id);
  const auto marks =
      std::vector(static_cast<size_t>(samples), marked ? marks_of(kTokens, false) : SampleMarks());
  TrainingModel model(config, state);
  const LossSums local = model.evaluate(
      1, [&](int64_t) { return make_batch_input(ids, marks, kTokens, counted, state); });
  return local.loss.item<double>();
}

TEST(PaddedSamples, SamplesThatDoNotCountTakeNoCapacity) {
  const ParallelState alone = ParallelState::single_process();
  for (const Fields& model : {kCapacity, kPadded})
    for (const bool marked : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", fmt::join(model, " "), marked));
      const double expected =
          evaluated_loss(config_of(model, {}, kTokens, false), 1, 1, marked, alone);
      const double found =
          evaluated_loss(config_of(model, {}, kTokens, false), 4, 1, marked, alone);
      EXPECT_NEAR(found, expected, 1e-12 * expected);
      for (const Fields& layout :
           {Fields{"expert_model_parallel_size=2"}, Fields{"expert_tensor_parallel_size=2"}}) {
        const Config config = config_of(model, layout, kTokens, false);
        testing::RankThreadOptions options;
        options.sizes = parallel_options(config, c10::kCPU).sizes;
        testing::run_ranks(
            2,
            [&](const ParallelState& state) {
              const bool first = state.rank() == 0;
              const double loss = evaluated_loss(config, 4, first ? 1 : 0, marked, state);
              EXPECT_NEAR(loss, first ? expected : 0, 1e-12 * expected) << state.rank();
            },
            options);
      }
    }
}

TEST(PaddedSamples, APaddingOfAnotherShapeIsRefused) {
  const Config config = config_of(kAuxLoss, {}, kTokens, false);
  GPTModel model(config.model, {.dtype = at::kDouble});
  GPTInput input = {.tokens = at::ones({2, kTokens}, at::kLong)};
  input.positions.padding.map = at::zeros({2, kTokens}, at::kBool);
  EXPECT_TRUE(testing::throws_with<UsageError>([&] { model.forward(input); },
                                               "padding: found 2 x 8 of Bool, allowed: 8 x 2"));
}

}  // namespace
}  // namespace lockstep
