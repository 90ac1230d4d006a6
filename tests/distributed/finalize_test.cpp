#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::SmallNet;

struct OneWeight : torch::nn::Module {
  OneWeight() { weight = register_parameter("weight", at::zeros({1}, at::kDouble)); }
  at::Tensor weight;
};

TEST(FinalizeModelGrads, GX5TokensCountNotRanks) {
  // Rank 0 has the per-token losses w*1 ... w*4, rank 1 has w*10. The mean over tokens is 4; the
  // mean of the ranks' means is 6.25.
  run_ranks(2, [](const ParallelState& state) {
    OneWeight net;
    DistributedDataParallel ddp(net, state);
    const at::Tensor tokens =
        state.rank() == 0 ? at::arange(1, 5, at::kDouble) : at::full({1}, 10, at::kDouble);
    (net.weight * tokens).sum().backward();
    const FinalizeReport report =
        finalize_model_grads({&ddp}, at::full({1}, tokens.numel(), at::kInt));
    EXPECT_DOUBLE_EQ(net.weight.grad().item<double>(), 4.0);
    EXPECT_DOUBLE_EQ(report.num_tokens.item<double>(), 5.0);
  });
}

TEST(FinalizeModelGrads, ModelsOfDifferentScalingAreRefused) {
  const ParallelState state = ParallelState::single_process();
  DistributedDataParallelConfig average;
  average.calculate_per_token_loss = false;
  for (const bool swapped : {false, true}) {
    OneWeight first, second;
    DistributedDataParallel sums(first, state), averages(second, state, average);
    (first.weight + second.weight).sum().backward();
    std::vector<DistributedDataParallel*> models = {&sums, &averages};
    std::optional<at::Tensor> tokens = at::ones({});
    if (swapped) {
      std::swap(models[0], models[1]);
      tokens.reset();
    }
    EXPECT_TRUE(testing::throws_with<UsageError>([&] { finalize_model_grads(models, tokens); },
                                                 "scaling and another"));
  }
}

TEST(FinalizeModelGrads, G70CountsAreSummedAndZeroTokensDivideByOne) {
  for (const bool none : {false, true}) {
    run_ranks(2, [none](const ParallelState& state) {
      OneWeight net;
      DistributedDataParallel ddp(net, state);
      (net.weight * 400).sum().backward();
      const double tokens = none ? 0 : state.rank() == 0 ? 300 : 100;
      finalize_model_grads({&ddp}, at::full({}, tokens, at::kDouble));
      EXPECT_DOUBLE_EQ(net.weight.grad().item<double>(), none ? 800.0 : 2.0);
    });
  }
}

TEST(FinalizeModelGrads, TokenCountsBeyond32BitsAreExact) {
  run_ranks(2, [](const ParallelState& state) {
    OneWeight net;
    DistributedDataParallel ddp(net, state);
    net.weight.sum().backward();
    const int64_t tokens = (int64_t{1} << 33) + 1;
    const auto report = finalize_model_grads({&ddp}, at::full({}, tokens, at::kLong));
    EXPECT_DOUBLE_EQ(report.num_tokens.item<double>(), 2.0 * static_cast<double>(tokens));
  });
}

TEST(FinalizeModelGrads, NarrowGradientsAreDividedByCountsThatTheirDtypeCannotHold) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    torch::nn::Linear net(torch::nn::LinearOptions(40, 40).bias(false));
    net->to(dtype);
    DistributedDataParallelConfig config;
    config.grad_reduce_in_fp32 = false;
    DistributedDataParallel ddp(*net, ParallelState::single_process(), config);
    const at::Tensor sums = at::linspace(-6e4, 6e4, 1600, at::kDouble).view({40, 40}).to(dtype);
    (net->weight * sums).sum().backward();
    ASSERT_EQ(net->weight.grad().scalar_type(), dtype);
    finalize_model_grads({&ddp}, at::full({}, 70001, at::kLong));
    EXPECT_TRUE(at::equal(net->weight.grad(), (sums.to(at::kDouble) / 70001).to(dtype)));
  }
}

TEST(FinalizeModelGrads, SeveralModelsShareOneTokenCount) {
  OneWeight first, second;
  const ParallelState state = ParallelState::single_process();
  DistributedDataParallel a(first, state), b(second, state);
  (first.weight * 6 + second.weight * 9).sum().backward();
  const auto report = finalize_model_grads({&a, &b}, at::full({}, 3, at::kLong));
  EXPECT_DOUBLE_EQ(first.weight.grad().item<double>(), 2);
  EXPECT_DOUBLE_EQ(second.weight.grad().item<double>(), 3);
  ASSERT_EQ(report.entries.size(), 3u);
  EXPECT_EQ(report.entries[2].pass, "num_tokens");
}

class FinalizeMisuse : public ::testing::Test {
 protected:
  std::string refusal(const std::optional<at::Tensor>& num_tokens) {
    try {
      finalize_model_grads({&ddp_}, num_tokens);
      return "";
    } catch (const UsageError& error) {
      return error.what();
    }
  }

  SmallNet net_;
  DistributedDataParallel ddp_{net_, ParallelState::single_process()};
};

TEST_F(FinalizeMisuse, ModelsThatAreMissingOrListedTwice) {
  const std::pair<std::vector<DistributedDataParallel*>, const char*> lists[] = {
      {{}, "finalize_model_grads: no model was given"},
      {{&ddp_, nullptr}, "finalize_model_grads: model 1 is a null pointer"},
      {{&ddp_, &ddp_}, "finalize_model_grads: model 1 is model 0 too; list each chunk once"}};
  for (const auto& [models, expected] : lists)
    EXPECT_TRUE(testing::throws_with<UsageError>(
        [&] { finalize_model_grads(models, at::ones({})); }, expected));
}

TEST_F(FinalizeMisuse, TwiceInAStep) {
  net_.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_EQ(refusal(at::ones({})), "");
  EXPECT_TRUE(
      refusal(at::ones({}))
          .starts_with("finalize_model_grads: the gradients of this step are final already"));
}

TEST_F(FinalizeMisuse, BeforeTheLastMicrobatch) {
  const auto guard = ddp_.no_sync();
  net_.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_TRUE(refusal(at::ones({}))
                  .starts_with("gradient sync: 6 of 6 parameters received no "
                               "gradient in the last micro-batch"));
}

TEST_F(FinalizeMisuse, TokensThatAreMissingOrNonsense) {
  net_.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_TRUE(refusal(std::nullopt).starts_with("finalize_model_grads: num_tokens is missing"));
  EXPECT_EQ(refusal(at::ones({2})), "finalize_model_grads: num_tokens must have one element");
  EXPECT_EQ(refusal(at::full({}, -1)),
            "finalize_model_grads: num_tokens: found -1, allowed: a count >= 0");
  EXPECT_EQ(refusal(at::full({}, std::nan(""))),
            "finalize_model_grads: num_tokens: found nan, allowed: a count >= 0");
  EXPECT_EQ(refusal(at::ones({})), "");  // the refusals consumed nothing
}

TEST_F(FinalizeMisuse, AfterAManualFinishItStillDivides) {
  net_.loss(SmallNet::samples(0, 2)).backward();
  ddp_.finish_grad_sync();
  EXPECT_THROW(detail::StepAccess::require_final_gradients(ddp_, "optimizer"), UsageError);
  EXPECT_EQ(refusal(at::ones({})), "");
  EXPECT_NO_THROW(detail::StepAccess::require_final_gradients(ddp_, "optimizer"));
}

TEST(FinalizeModelGrads, TokensAreRefusedWhereRanksAreAveraged) {
  SmallNet net;
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  DistributedDataParallel ddp(net, ParallelState::single_process(), config);
  net.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_THROW(finalize_model_grads({&ddp}, at::ones({})), UsageError);
  EXPECT_NO_THROW(finalize_model_grads({&ddp}));
  EXPECT_THROW(finalize_model_grads({}), UsageError);
}

}  // namespace
}  // namespace lockstep
