// Ranks recompute their neighbors' gradients: no alarm if all compute the same, and otherwise the
// two ranks and the parameter are named.

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/tests/training/checked_runs.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::RankThreadOptions;
using testing::run_ranks;
using testing::throws_with;
using testing::with;
using ReplayTest = testing::CheckedRunsTest;

TEST_F(ReplayTest, SaysNothingAndChangesNothingWhereAllComputeTheSame) {
  const std::vector<testing::CheckedRun> runs = {
      {1, {}, {}},
      {3, {"train.global_batch_size=6"}, {}},
      {2, {"train.precision=bf16", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"}, {}},
      {2, {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"}, {}},
      {2, {"ddp.calculate_per_token_loss=false"}, {}},
      {4, {}, {"tensor_model_parallel_size=2", "sequence_parallel=true"}},
      {4, {}, {"pipeline_model_parallel_size=2"}},
      {4, {"ddp.overlap_grad_reduce=true"}, {"context_parallel_size=2"}},
      {2, {"lora.rank=2"}, {}}};
  expect_same_curves(runs, {"train.replay_interval=1", "train.replay_interval=3"});
}

TEST_F(ReplayTest, NamesTheRanksThatDisagree) {
  const Config of_run = three_ranks({"train.replay_interval=3"});
  const auto errors = errors_of_ranks(
      3,
      [&](const ParallelState& state) {
        Trainer trainer(of_run, state);
        trainer.train_step();
        trainer.train_step();
        // A changed weight on one rank acts like a unit that computes wrong.
        if (state.rank() == 1) {
          const at::NoGradGuard no_grad;
          trainer.model().named_parameters()["decoder.final_layernorm.weight"][3] += 1e-9;
        }
        trainer.train_step();
      },
      options_of(of_run));
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("before iteration 3: two ranks have computed different gradients from the "
                         "same samples: rank 0 of '"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("than rank 1, whose micro-batch it is; rank 1 of '"), std::string::npos)
        << error;
    EXPECT_NE(error.find("than rank 2, whose micro-batch it is"), std::string::npos) << error;
    EXPECT_EQ(error.find("than rank 0"), std::string::npos) << error;
  }
}

/// An error in only one of the two passes is found, on a single rank too.
TEST_F(ReplayTest, OneRankComparesWithItself) {
  const Config of_run = config({}, {});
  run_ranks(1, [&](const ParallelState& state) {
    Trainer trainer(of_run, state);
    trainer.train_step();
    trainer.replay();
    int calls = 0;
    auto weight = trainer.model().named_parameters()["decoder.final_layernorm.weight"];
    weight.register_hook(
        [&](const at::Tensor& grad) { return ++calls == 2 ? grad * (1 + 1e-15) : grad; });
    EXPECT_TRUE(throws_with<CommunicationError>(
        [&] { trainer.replay(); },
        "before iteration 2: a second pass has computed different gradients from the same samples: "
        "rank 0 of 'decoder.final_layernorm.weight' than in its first pass"));
    EXPECT_EQ(calls, 2);
  });
}

TEST_F(ReplayTest, ReducesNoGradient) {
  testing::CollectiveLog log;
  const Config of_run = three_ranks();
  RankThreadOptions options = options_of(of_run);
  options.log = &log;
  run_ranks(
      3,
      [&](const ParallelState& state) {
        Trainer trainer(of_run, state);
        trainer.train_step();
        const size_t before = log.of_rank(state.rank()).size();
        trainer.replay();
        const auto calls = log.of_rank(state.rank());
        ASSERT_GT(calls.size(), before);
        EXPECT_EQ(calls[before].label, "fingerprints of gradients");
        for (size_t i = before; i < calls.size(); ++i)
          EXPECT_EQ(calls[i].operation, "all_gather") << calls[i].label;
      },
      options);
}

TEST_F(ReplayTest, RefusesWhatRanksComputeTogether) {
  const auto refused = [&](const testing::Fields& fields, const std::string& message) {
    EXPECT_TRUE(throws_with<ConfigError>(
        [&] { config(with({"train.replay_interval=2"}, fields), {}); }, message));
  };
  refused({"model.num_experts=4"}, "train.replay_interval = 2: found model.num_experts");
  refused({"ddp.use_distributed_optimizer=true", "ddp.data_parallel_sharding_strategy=optim_grads"},
          "train.replay_interval = 2: found ddp.data_parallel_sharding_strategy = optim_grads, "
          "allowed: no_shard, optim");
  refused({"parallel.pipeline_model_parallel_size=2", "model.num_layers=4",
           "parallel.virtual_pipeline_model_parallel_size=2"},
          "found parallel.virtual_pipeline_model_parallel_size");
  EXPECT_TRUE(throws_with<ConfigError>([&] { config({"train.replay_interval=0"}, {}); },
                                       "train.replay_interval: found 0, allowed: >= 1"));
}

}  // namespace
}  // namespace lockstep
