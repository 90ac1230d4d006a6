#include "lockstep/training/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/text_dataset.h"
#include "lockstep/datasets/token_batch.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::TemporaryFolder;
using testing::throws_with;

constexpr int64_t kIterations = 20;
constexpr int64_t kGlobalBatch = 12;

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() { path_ = folder_.write("text", testing::synthetic_text()); }

  Config config(const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> all = {"data.path=" + path_,       "train.global_batch_size=12",
                                    "train.micro_batch_size=1", "train.train_iters=20",
                                    "train.eval_iters=2",       "train.precision=fp64"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 num_query_groups: 2 "
        "ffn_hidden_size: 24 seq_length: 16 } "
        "optimizer { lr: 0.01 lr_warmup_iters: 5 weight_decay: 0.1 clip_grad: 0.5 "
        "lr_decay_style: \"cosine\" }",
        "test", all);
  }

  /// The fewest micro-batches per rank that divide the batch: two or three.
  static std::string few_microbatches(int64_t ranks) {
    return "train.micro_batch_size=" + std::to_string(ranks == 4 ? 1 : kGlobalBatch / ranks / 2);
  }

  /// Losses and gradient norms of all iterations, then the validation loss, as rank 0 sees them.
  static std::vector<double> curve(int64_t ranks, const Config& config) {
    std::vector<double> values;
    run_ranks(ranks, [&](const ParallelState& state) {
      Trainer trainer(config, state);
      std::vector<double> mine;
      TrainCallbacks callbacks;
      callbacks.iteration = [&](const IterationMetrics& metrics) {
        mine.push_back(metrics.lm_loss);
        mine.push_back(metrics.grad_norm);
      };
      callbacks.validation = [&](const ValidationMetrics& metrics) {
        mine.push_back(metrics.validation_loss);
      };
      trainer.run(callbacks);
      if (state.rank() == 0) values = mine;
    });
    return values;
  }

  static void expect_close(const std::vector<double>& found, const std::vector<double>& expected,
                           double tolerance, const std::string& what) {
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (size_t i = 0; i < found.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], tolerance * std::abs(expected[i])) << what << ", " << i;
  }

  TemporaryFolder folder_;
  std::string path_;
};

/// The same training with libtorch alone: no buffers, no hooks, no buckets, PyTorch's AdamW and
/// clipping, one micro-batch.
std::vector<double> train_with_libtorch(const Config& config) {
  const TextSplit text = read_text(config.data);
  const int64_t length = config.model.seq_length;
  const SampleOrder order(static_cast<int64_t>(text.training.size()), length, 1234);
  GPTModel model(config.model, {.dtype = at::kDouble});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const bool matrices : {true, false}) {
    std::vector<at::Tensor> params;
    for (const at::Tensor& p : model.parameters())
      if ((p.dim() > 1) == matrices) params.push_back(p);
    groups.emplace_back(params, std::make_unique<torch::optim::AdamWOptions>(
                                    torch::optim::AdamWOptions().weight_decay(matrices ? 0.1 : 0)));
  }
  torch::optim::AdamW optimizer(groups);
  std::vector<double> values;
  for (int64_t i = 0; i < kIterations; ++i) {
    const double lr = i <= 5 ? 0.01 * static_cast<double>(i) / 5
                             : 0.005 * (std::cos(M_PI * static_cast<double>(i - 5) / 15) + 1);
    for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
    std::vector<int64_t> starts;
    for (int64_t k = 0; k < kGlobalBatch; ++k)
      starts.push_back(order.start_of(i * kGlobalBatch + k));
    const TokenBatch batch = make_token_batch(text.training, starts, length, c10::kCPU);
    optimizer.zero_grad();
    const at::Tensor loss = model.forward(batch.tokens, batch.labels).mean();
    loss.backward();
    values.push_back(loss.item<double>());
    values.push_back(torch::nn::utils::clip_grad_norm_(model.parameters(), 0.5));
    optimizer.step();
  }
  std::vector<int64_t> starts;
  for (int64_t w = 0; w < 24; ++w) starts.push_back(w * length);
  const TokenBatch batch = make_token_batch(text.validation, starts, length, c10::kCPU);
  values.push_back(model.forward(batch.tokens, batch.labels).mean().item<double>());
  return values;
}

/// The curve of TrainerTest::config(), computed once.
const std::vector<double>& oracle_curve(const Config& config) {
  static const std::vector<double> curve = train_with_libtorch(config);
  return curve;
}

TEST_F(TrainerTest, EveryNumberOfRanksFollowsPlainLibtorchInDouble) {
  const std::vector<double>& expected = oracle_curve(config());
  EXPECT_LT(expected[2 * kIterations], expected[0] - 0.5);  // it learns
  expect_close(curve(2, config()), expected, 1e-12, "2 ranks, 6 micro-batches");
  for (const int64_t ranks : {1, 2, 3, 4})
    expect_close(curve(ranks, config({few_microbatches(ranks)})), expected, 1e-12,
                 std::to_string(ranks) + " ranks");
}

TEST_F(TrainerTest, OverlapAndBucketSizeDoNotMatter) {
  const std::vector<double>& expected = oracle_curve(config());
  for (const int64_t ranks : {2, 3})
    for (const char* overlap : {"true", "false"})
      for (const char* buckets : {"1", "500", "1000000000"})
        expect_close(
            curve(ranks, config({few_microbatches(ranks),
                                 std::string("ddp.overlap_grad_reduce=") + overlap,
                                 std::string("ddp.bucket_size=") + buckets})),
            expected, 1e-12,
            std::to_string(ranks) + " ranks, overlap " + overlap + ", buckets of " + buckets);
}

TEST_F(TrainerTest, TheDistributedOptimizerFollowsPlainLibtorchInDouble) {
  const std::vector<double>& expected = oracle_curve(config());
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
             {"ddp.overlap_param_gather=true", "ddp.bucket_size=500"},
             {"ddp.overlap_param_gather=true", "ddp.overlap_grad_reduce=false",
              "model.recompute_granularity=full"},
             {"ddp.bucket_size=500", "train.eval_interval=7", "ddp.check_for_nan_in_grad=true"},
             {"ddp.pad_buckets_for_high_nccl_busbw=true", "ddp.average_in_collective=true"}}) {
      std::vector<std::string> all = overrides;
      all.emplace_back("ddp.use_distributed_optimizer=true");
      all.push_back(few_microbatches(ranks));
      std::vector<double> found = curve(ranks, config(all));
      if (found.size() == expected.size() + 2) {  // two validations on the way
        found.erase(found.begin() + 29);
        found.erase(found.begin() + 14);
      }
      expect_close(found, expected, 1e-12, std::to_string(ranks) + " ranks, " + overrides.front());
    }
}

TEST_F(TrainerTest, TheDistributedOptimizerLearnsInBf16) {
  const std::vector<double> whole = curve(2, config({"train.precision=bf16"}));
  const std::vector<double> sharded =
      curve(2, config({"train.precision=bf16", "ddp.use_distributed_optimizer=true",
                       "ddp.overlap_param_gather=true"}));
  expect_close(sharded, whole, 1e-6, "bf16");
}

TEST_F(TrainerTest, SinglePrecisionAgreesToTwoInAHundredThousand) {
  const std::vector<double> expected = curve(1, config({"train.precision=fp32"}));
  for (const int64_t ranks : {2, 3, 4})
    for (const char* overlap : {"true", "false"})
      expect_close(curve(ranks, config({"train.precision=fp32", few_microbatches(ranks),
                                        "ddp.bucket_size=300",
                                        std::string("ddp.overlap_grad_reduce=") + overlap})),
                   expected, 2e-5, std::to_string(ranks) + " ranks");
}

TEST_F(TrainerTest, AveragingOverRanksAndOtherMicroBatchesGiveTheSame) {
  const std::vector<double>& expected = oracle_curve(config());
  for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
           {"ddp.calculate_per_token_loss=false"},
           {"ddp.average_in_collective=true"},
           {"train.micro_batch_size=6"},
           {"train.micro_batch_size=3", "model.recompute_granularity=full"},
           {"train.micro_batch_size=2", "train.deterministic=true"}})
    expect_close(curve(2, config(overrides)), expected, 1e-12, overrides.front());
}

TEST_F(TrainerTest, Bf16LearnsLikeFp32) {
  const std::vector<double> wide = curve(1, config({"train.precision=fp32"}));
  const std::vector<double> narrow = curve(2, config({"train.precision=bf16"}));
  EXPECT_NEAR(narrow.back(), wide.back(), 0.03);
  EXPECT_LT(narrow.back(), narrow.front() - 0.5);
}

TEST_F(TrainerTest, ARankThatWantsToStopStopsAllAfterTheIteration) {
  run_ranks(3, [&](const ParallelState& state) {
    Trainer trainer(config(), state);
    TrainCallbacks callbacks;
    int validations = 0;
    callbacks.should_stop = [&] {
      return state.rank() == 2 && trainer.iteration() == 3 ? RunEnd::sigterm : RunEnd::none;
    };
    callbacks.validation = [&](const ValidationMetrics& metrics) {
      ++validations;
      EXPECT_EQ(metrics.iteration, 4);
    };
    EXPECT_EQ(trainer.run(callbacks), RunEnd::sigterm);
    EXPECT_EQ(trainer.iteration(), 4);
    EXPECT_EQ(validations, 1);
  });
}

TEST_F(TrainerTest, ValidationComesAtItsIntervalAndAtTheEnd) {
  std::vector<int64_t> at;
  Trainer trainer(config({"train.eval_interval=8", "train.eval_iters=1000"}),
                  ParallelState::single_process());
  TrainCallbacks callbacks;
  callbacks.validation = [&](const ValidationMetrics& metrics) {
    at.push_back(metrics.iteration);
    EXPECT_DOUBLE_EQ(metrics.perplexity, std::exp(metrics.validation_loss));
  };
  trainer.run(callbacks);
  EXPECT_EQ(at, (std::vector<int64_t>{8, 16, 20}));
}

TEST_F(TrainerTest, AValidationDropsNothingAndTheTrainingAfterItDoes) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"train.train_iters=3", "optimizer.lr_warmup_iters=1"});
    return config(more);
  };
  const auto validation_loss = [](const Config& config) {
    return Trainer(config, ParallelState::single_process()).validate().validation_loss;
  };
  const std::string drops = "model.hidden_dropout=0.5";
  EXPECT_EQ(validation_loss(with({drops})), validation_loss(with({})));
  const std::vector<double> expected = curve(1, with({drops}));
  EXPECT_GT(std::abs(expected[0] - curve(1, with({}))[0]), 1e-6);
  std::vector<double> found = curve(1, with({drops, "train.eval_interval=1"}));
  ASSERT_EQ(found.size(), expected.size() + 2);  // two validations on the way
  found.erase(found.begin() + 5);
  found.erase(found.begin() + 2);
  EXPECT_EQ(found, expected);
}

TEST_F(TrainerTest, MetricsOfAnIteration) {
  Trainer trainer(config(), ParallelState::single_process());
  const IterationMetrics first = trainer.train_step(), second = trainer.train_step();
  EXPECT_NEAR(first.lm_loss, std::log(256), 0.1);
  EXPECT_EQ(first.iteration, 1);
  EXPECT_EQ(first.learning_rate, 0);
  EXPECT_EQ(second.learning_rate, 0.002);
  EXPECT_EQ(second.consumed_samples, 24);
  EXPECT_EQ(second.num_tokens, 12 * 16);
  EXPECT_NEAR(second.tokens_per_second, 192e3 / second.iteration_ms, 1e-6 * 192e3);
}

TEST_F(TrainerTest, MetricsTellARateOfTheEmbeddingsOwn) {
  const auto rates = [](const Config& config) {
    Trainer trainer(config, ParallelState::single_process());
    std::vector<std::optional<double>> found;
    TrainCallbacks callbacks;
    callbacks.iteration = [&](const IterationMetrics& metrics) {
      found.push_back(metrics.decoupled_learning_rate);
    };
    trainer.run(callbacks);
    return found;
  };
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"optimizer.lr_warmup_iters=1", "optimizer.lr_decay_style=linear",
                             "optimizer.min_lr=0.002", "train.train_iters=3"});
    return config(more);
  };
  using Rates = std::vector<std::optional<double>>;
  EXPECT_EQ(rates(with({})), Rates(3));
  EXPECT_EQ(rates(with({"optimizer.decoupled_lr=0.25"})), (Rates{0, 0.25, 0.126}));
  EXPECT_EQ(rates(with({"optimizer.decoupled_lr=0.25", "optimizer.decoupled_min_lr=0.125"})),
            (Rates{0, 0.25, 0.1875}));
}

TEST_F(TrainerTest, RefusesByName) {
  const auto refuses = [&](const std::vector<std::string>& overrides, const std::string& part) {
    return throws_with<ConfigError>(
        [&] { Trainer(config(overrides), ParallelState::single_process()); }, part);
  };
  EXPECT_TRUE(refuses({"train.micro_batch_size=5"}, "train.global_batch_size: found 12"));
  EXPECT_TRUE(refuses({"model.vocab_size=100"}, "model.vocab_size: found 100"));
  EXPECT_TRUE(refuses({"data.split=1,0"}, "data.split: the validation text has no sample"));
  EXPECT_TRUE(refuses({"model.seq_length=5000"}, "allowed: more than model.seq_length (5000)"));
  EXPECT_TRUE(
      refuses({"ddp.overlap_param_gather=true"},
              "ddp.overlap_param_gather: found true, which needs ddp.use_distributed_optimizer"));
  EXPECT_TRUE(refuses({"parallel.context_parallel_size=3"},
                      "model.seq_length: found 16, allowed: a multiple of 2 *"));
}

TEST_F(TrainerTest, ConfigurationsThatDifferEndEveryRankByName) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(3);
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < errors.size(); ++rank)
    ranks.emplace_back([&, rank] {
      ParallelStateOptions options = parallel_options(
          config({rank == 2 ? "optimizer.lr=0.5" : "optimizer.lr=0.25"}), c10::kCPU);
      options.sizes.world_size = 3;
      try {
        const ParallelState state(store, static_cast<int64_t>(rank), options);
      } catch (const ConfigError& error) {
        errors[rank] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& error : errors)
    EXPECT_EQ(error,
              "optimizer.lr: rank 0 has 0.25, rank 2 has 0.5; allowed: the same on all ranks");
}

}  // namespace
}  // namespace lockstep
