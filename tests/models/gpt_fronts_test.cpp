// The layers of a GPT under the fronts that take a described module, in fp64. Norms are compared
// with plain autograd in one process, gradients with DistributedDataParallel and
// finalize_model_grads().

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

constexpr int64_t kShares = 4, kRows = 2, kLength = 16;
constexpr double kAllTokens = kShares * kRows * kLength;

using Overrides = std::vector<std::string>;

Config front_config(const Overrides& model, const Overrides& layout = {}) {
  Overrides all = {"model.num_layers=2",          "model.hidden_size=16",
                   "model.num_attention_heads=4", "model.num_query_groups=2",
                   "model.ffn_hidden_size=16",    "model.seq_length=16",
                   "model.vocab_size=11",         "model.init_method_std=0.2"};
  all.insert(all.end(), model.begin(), model.end());
  for (const std::string& field : layout) all.push_back("parallel." + field);
  return parse_config("", "test", all);
}

GPTModel make_model(const Config& config, const ParallelState& state) {
  return {
      config.model, config.parallel, state, GPTStage::whole(config.model), {.dtype = at::kDouble}};
}

/// Runs this rank's share of kShares micro-batches. Returns the number of tokens.
at::Tensor backwards(GPTModel& model, const ParallelState& state) {
  const ProcessGroup dp = state.group(GroupKind::dp), cp = state.group(GroupKind::cp);
  at::Tensor tokens = at::zeros({}, at::kDouble);
  for (int64_t m = 0; m < kShares / dp.size(); ++m) {
    const at::Tensor i = at::arange(kRows * 17).view({kRows, 17}) + 7 * (m * dp.size() + dp.rank());
    const at::Tensor batch = (i * i + 3 * i).remainder(11);
    const at::Tensor losses =
        model.forward({.tokens = cut_for_context(batch.narrow(1, 0, kLength), 1, cp),
                       .labels = cut_for_context(batch.narrow(1, 1, kLength), 1, cp)});
    tokens += losses.numel();
    losses.sum().backward();
  }
  return tokens;
}

double norm_in_one_process(const Overrides& overrides) {
  const ParallelState alone = ParallelState::single_process();
  GPTModel model = make_model(front_config(overrides), alone);
  backwards(model, alone);
  std::vector<at::Tensor> grads;
  for (const NamedParameter& param : collect_parameters(model))
    grads.push_back(param.tensor.grad().flatten() / kAllTokens);
  return at::cat(grads).norm().item<double>();
}

void expect_same_grads(const GPTModel& found, const GPTModel& expected, double factor) {
  const auto ours = collect_parameters(found), theirs = collect_parameters(expected);
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(at::allclose(ours[i].tensor.grad() * factor, theirs[i].tensor.grad(), 1e-10, 1e-14))
        << ours[i].name;
}

void expect_equal_fronts(const Overrides& overrides, const Overrides& layout) {
  SCOPED_TRACE(fmt::format("{} {}", fmt::join(overrides, " "), fmt::join(layout, " ")));
  const double norm = norm_in_one_process(overrides);
  const Config config = front_config(overrides, layout);
  const ParallelConfig& parallel = config.parallel;
  testing::run_ranks(
      4,
      [&](const ParallelState& state) {
        GPTModel wrapped = make_model(config, state);
        DistributedDataParallel ddp(wrapped, state, config.ddp);
        ddp.set_num_microbatches(kShares / state.group(GroupKind::dp).size());
        finalize_model_grads({&ddp}, backwards(wrapped, state));

        GPTModel synchronized = make_model(config, state);
        GradientSynchronizer sync(synchronized, state, /*bucket_size_mb=*/0.01,
                                  kShares / state.group(GroupKind::dp).size(),
                                  {.reduction = GradientReduction::per_token,
                                   .token_group = state.group(GroupKind::dp_cp)});
        sync.bind();
        sync.wait(backwards(synchronized, state));
        expect_same_grads(synchronized, wrapped, 1);
        EXPECT_NEAR(clip_grad_norm_(synchronized, state, std::nullopt).item<double>(), norm,
                    1e-11 * norm);

        GPTModel averaged = make_model(config, state);
        backwards(averaged, state);
        all_reduce_grads(averaged, state);
        expect_same_grads(averaged, wrapped,
                          static_cast<double>(state.group(GroupKind::dp_cp).size()) / kAllTokens);
      },
      {.sizes = {.tensor = parallel.tensor_model_parallel_size,
                 .context = parallel.context_parallel_size,
                 .expert = parallel.expert_model_parallel_size,
                 .expert_tensor = parallel.expert_tensor_parallel_size}});
}

TEST(GPTFronts, SequenceParallelLayersAreReducedAsTheyAreDescribed) {
  expect_equal_fronts({}, {"tensor_model_parallel_size=2"});
  expect_equal_fronts({}, {"tensor_model_parallel_size=2", "sequence_parallel=true"});
  expect_equal_fronts(
      {}, {"tensor_model_parallel_size=2", "sequence_parallel=true", "context_parallel_size=2"});
}

TEST(GPTFronts, ExpertsAreReducedAsTheyAreDescribed) {
  const Overrides experts = {"model.num_experts=4", "model.add_bias_linear=true"};
  expect_equal_fronts(experts, {"expert_model_parallel_size=2"});
  expect_equal_fronts(experts, {"expert_model_parallel_size=4"});
  expect_equal_fronts(experts, {"expert_model_parallel_size=2", "expert_tensor_parallel_size=2"});
  expect_equal_fronts(experts, {"tensor_model_parallel_size=2", "sequence_parallel=true",
                                "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"});
}

}  // namespace
}  // namespace lockstep
