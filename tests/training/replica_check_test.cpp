// Copies that ranks hold: no alarm if nothing has happened, and each flipped bit is named with its
// tensor and its rank.

#include "lockstep/checkpoint/replica_check.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/tests/training/checked_runs.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::Fields;
using testing::run_ranks;
using testing::with;

const Fields kEach = {"train.replica_check_interval=1"};
const Fields kShards = {"ddp.use_distributed_optimizer=true"};
const Fields kParams = with(kShards, {"ddp.data_parallel_sharding_strategy=optim_grads_params"});
const Fields kExperts = {
    "model.num_experts=4", "model.moe_router_topk=2", "model.moe_router_enable_expert_bias=true",
    "model.moe_router_score_function=\"sigmoid\"", "model.moe_router_load_balancing_type=\"none\""};

void flip(const at::Tensor& values, int64_t bit) {
  auto* const bytes = static_cast<uint8_t*>(values.mutable_data_ptr());
  bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
}

int64_t bits(const at::Tensor& values) { return 8 * static_cast<int64_t>(values.nbytes()); }

std::string name_of(const StateTensor& tensor) {
  return tensor.state.empty() ? "'" + tensor.name + "'"
                              : tensor.state + " of '" + tensor.name + "'";
}

class ReplicaCheckTest : public testing::CheckedRunsTest {
 protected:
  /// The error of each rank in a training in which `disturb` is called before each iteration.
  static std::vector<std::string> errors(
      const Config& config, int64_t world,
      const std::function<void(Trainer&, const ParallelState&, int64_t)>& disturb) {
    return errors_of_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          for (int64_t iteration = 1; iteration <= 4; ++iteration) {
            disturb(trainer, state, iteration);
            trainer.train_step();
          }
        },
        options_of(config));
  }

  static const StateTensor& find(const std::vector<StateTensor>& tensors, const std::string& name,
                                 const std::string& state) {
    for (const StateTensor& tensor : tensors)
      if (tensor.name == name && tensor.state == state) return tensor;
    throw std::runtime_error("no " + state + " of " + name);
  }

  /// Flips a bit on `rank` before iteration 3.
  static std::function<void(Trainer&, const ParallelState&, int64_t)> flip_on(
      int64_t rank, const std::string& name, const std::string& state_name) {
    return [=](Trainer& trainer, const ParallelState& state, int64_t iteration) {
      const auto tensors = trainer.state(true);
      if (iteration == 3 && state.rank() == rank) flip(find(tensors, name, state_name).values, 5);
    };
  }
};

TEST_F(ReplicaCheckTest, SaysNothingWhereNothingHasHappened) {
  const Fields tensor = {"tensor_model_parallel_size=2"},
               pipeline = {"pipeline_model_parallel_size=2"};
  const std::vector<testing::CheckedRun> runs = {
      {1, {}, {}},
      {3, {"train.global_batch_size=6"}, {}},
      {2, kShards, {}},
      {2, with(kShards, {"ddp.data_parallel_sharding_strategy=optim_grads"}), {}},
      {2, kParams, {}},
      {2, {"train.precision=bf16"}, {}},
      {2, with(kShards, {"train.precision=bf16", "ddp.overlap_param_gather=true"}), {}},
      {4, kShards, {"num_distributed_optimizer_instances=2"}},
      {4, {}, tensor},
      {4, {}, with(tensor, {"sequence_parallel=true"})},
      {4, {}, pipeline},
      {4, kShards, {"context_parallel_size=2"}},
      {4, kExperts, {"expert_model_parallel_size=2"}},
      {4, with(kShards, kExperts), {"expert_model_parallel_size=2"}},
      {4, with(kParams, kExperts), {"expert_model_parallel_size=2"}},
      {4, {"optimizer.optimizer=muon"}, tensor},
      {2, {"lora.rank=2"}, {}},
      {2, with(kParams, {"lora.rank=2"}), {}}};
  expect_same_curves(runs, kEach);
}

TEST_F(ReplicaCheckTest, NamesTheRankThatDiffersFromTheMajority) {
  const std::string name = "decoder.layers.1.mlp.linear_fc1.weight";
  for (const std::string state : {"", "exp_avg", "exp_avg_sq"}) {
    const Config of_run = three_ranks({"train.replica_check_interval=3"});
    for (const std::string& error : errors(of_run, 3, flip_on(1, name, state))) {
      EXPECT_NE(error.find("iteration 3, before its update: copies of "), std::string::npos)
          << error;
      EXPECT_NE(error.find("rank 1 differs from ranks 0, 2"), std::string::npos) << error;
      EXPECT_NE(error.find(name + "'"), std::string::npos) << error;
    }
  }
}

TEST_F(ReplicaCheckTest, OfTwoCopiesTellsWhatEachHolds) {
  const std::string name = "decoder.final_layernorm.weight";
  const Config of_run =
      config({"train.replica_check_interval=3"}, {"tensor_model_parallel_size=2"});
  for (const std::string& error : errors(of_run, 2, flip_on(1, name, "exp_avg"))) {
    EXPECT_NE(error.find("copies of "), std::string::npos) << error;
    EXPECT_NE(error.find("rank 0 has "), std::string::npos) << error;
    EXPECT_NE(error.find("rank 1 has "), std::string::npos) << error;
    EXPECT_NE(error.find("and there is no majority"), std::string::npos) << error;
  }
}

TEST_F(ReplicaCheckTest, ValuesWithoutACopyAreComparedWithThemselves) {
  const Config of_run = config(with(kShards, kEach), {});
  std::atomic<int> named = 0;
  const auto disturb = [&](Trainer& trainer, const ParallelState& state, int64_t iteration) {
    if (iteration != 3) return;
    trainer.before_next_update([&trainer, &state] {
      if (state.rank() != 1) return;
      for (const StateTensor& tensor : trainer.state(true))
        if (tensor.state == "exp_avg_sq") return flip(tensor.values, 3);
    });
  };
  for (const std::string& error : errors(of_run, 2, disturb)) {
    EXPECT_NE(error.find("iteration 3, before its update: values in memory changed without a "
                         "write: rank 1: exp_avg_sq of '"),
              std::string::npos)
        << error;
    ++named;
  }
  EXPECT_EQ(named, 2);
}

/// Applies to shards of parameters too, of which no rank has a copy.
TEST_F(ReplicaCheckTest, ShardsOfParametersAreComparedWithThemselves) {
  const Config of_run = config(with(kParams, kEach), {});
  std::atomic<int> named = 0;
  const auto disturb = [&](Trainer& trainer, const ParallelState& state, int64_t iteration) {
    if (iteration != 3 || state.rank() != 1) return;
    trainer.before_next_update([&trainer] {
      for (const ParamAndGradBuffer* buffer : trainer.training_model().wrappers()[0]->buffers())
        if (buffer->lends_params()) flip(buffer->owned_params(buffer->owned().front()), 3);
    });
  };
  for (const std::string& error : errors(of_run, 2, disturb)) {
    EXPECT_NE(error.find("iteration 3, before its update: values in memory changed without a "
                         "write: rank 1: shard of '"),
              std::string::npos)
        << error;
    ++named;
  }
  EXPECT_EQ(named, 2);
}

/// Beside sharded parameters each rank has a copy of frozen weights and of registered buffers.
TEST_F(ReplicaCheckTest, WhatIsNotTrainedIsComparedBesideShards) {
  const auto expect_found = [&](const Fields& model, const std::string& name) {
    const auto disturb = [&](Trainer& trainer, const ParallelState& state, int64_t iteration) {
      if (iteration != 3 || state.rank() != 1) return;
      const at::NoGradGuard no_grad;
      auto values = trainer.model().named_parameters();
      for (const auto& buffer : trainer.model().named_buffers())
        values.insert(buffer.key(), buffer.value());
      values[name].view({-1})[0].add_(0.5);
    };
    const Config of_run = three_ranks(with(with(kParams, kEach), model));
    for (const std::string& error : errors(of_run, 3, disturb))
      EXPECT_NE(error.find("iteration 3, before its update: copies of '" + name +
                           "' differ: rank 1 differs from ranks 0, 2"),
                std::string::npos)
          << error;
  };
  expect_found({"lora.rank=2"}, "decoder.layers.1.mlp.linear_fc1.weight");
  expect_found(kExperts, "decoder.layers.1.mlp.router.expert_bias");
}

/// Loading weights into a run does not count as flipped bits.
TEST_F(ReplicaCheckTest, LoadingIsNoChangeThatNothingWrote) {
  const Config of_run = three_ranks(kEach);
  const testing::TemporaryFolder folder;
  run_ranks(
      3,
      [&](const ParallelState& state) {
        Trainer trainer(of_run, state);
        trainer.train_step();
        CheckpointSaver saver(state, {.folder = (folder.path() / "saved").string()});
        const std::string path =
            saver.save(trainer.state(true), trainer.progress(), trainer.config()).path;
        trainer.train_step();
        for (const bool weights_only : {true, false}) {
          CheckpointReader checkpoint(path);
          trainer.load(checkpoint, weights_only);
          trainer.train_step();
        }
      },
      options_of(of_run));
}

TEST_F(ReplicaCheckTest, WithoutItAFlippedBitIsNotFound) {
  const Config of_run = three_ranks();
  const auto found = errors(of_run, 3, flip_on(1, "decoder.final_layernorm.weight", "exp_avg"));
  for (const std::string& error : found) EXPECT_EQ(error, "");
}

TEST_F(ReplicaCheckTest, NothingIsSavedOfARunWhoseCopiesDiffer) {
  const Config of_run = config(
      {"train.replica_check_interval=100", "train.global_batch_size=6", "train.train_iters=4"}, {});
  std::atomic<int> good = 0, bad = 0;  // saves after iterations 2 and 4
  const auto found = errors_of_ranks(
      3,
      [&](const ParallelState& state) {
        Trainer trainer(of_run, state);
        TrainCallbacks callbacks;
        callbacks.checkpoint_is_due = [](int64_t iteration) { return iteration % 2 == 0; };
        callbacks.checkpoint = [&](bool) {
          good += trainer.iteration() == 2;
          bad += trainer.iteration() == 4;
        };
        callbacks.iteration = [&](const IterationMetrics& metrics) {
          if (metrics.iteration != 3 || state.rank() != 2) return;
          const auto tensors = trainer.state(true);
          flip(find(tensors, "decoder.final_layernorm.weight", "").values, 60);
        };
        trainer.run(callbacks);
      },
      options_of(of_run));
  for (const std::string& error : found)
    EXPECT_NE(error.find("rank 2 differs from ranks 0, 1"), std::string::npos) << error;
  EXPECT_EQ(good, 3);
  EXPECT_EQ(bad, 0);
}

/// Each iteration compares twice: the state before its gradients are reduced, and then the reduced
/// gradients. Parts that only one rank holds are not communicated.
TEST_F(ReplicaCheckTest, ComparesWithOneAllReduceEach) {
  for (const bool shards : {false, true}) {
    const Config of_run = config(with(kEach, shards ? kShards : Fields{}), {});
    testing::CollectiveLog log;
    RankThreadOptions options = options_of(of_run);
    options.log = &log;
    std::atomic<int64_t> weights = 0, state_parts = 0;
    run_ranks(
        2,
        [&](const ParallelState& state) {
          Trainer trainer(of_run, state);
          weights = static_cast<int64_t>(trainer.state(false).size());
          state_parts = static_cast<int64_t>(trainer.state(true).size());
          for (int i = 0; i < 3; ++i) trainer.train_step();
        },
        options);
    const int64_t of_state = shards ? weights : state_parts, of_gradients = weights;
    for (int64_t rank = 0; rank < 2; ++rank) {
      std::vector<int64_t> bytes;
      for (const CollectiveRecord& call : log.of_rank(rank))
        if (call.label == "fingerprints of copies") bytes.push_back(call.bytes);
      std::vector<int64_t> expected;
      for (int i = 0; i < 3; ++i) {
        expected.push_back(16 * of_state + 8);
        if (!shards) expected.push_back(16 * of_gradients + 8);
      }
      EXPECT_EQ(bytes, expected) << shards;
    }
  }
}

/// No further iteration compares the result of the last update, and nothing is saved.
TEST_F(ReplicaCheckTest, TheLastUpdateIsComparedAtTheEnd) {
  const Config of_run = three_ranks(with(kEach, {"train.train_iters=3"}));
  const auto found = errors_of_ranks(
      3,
      [&](const ParallelState& state) {
        Trainer trainer(of_run, state);
        TrainCallbacks callbacks;
        callbacks.iteration = [&](const IterationMetrics& metrics) {
          if (metrics.iteration != 3 || state.rank() != 2) return;
          const auto tensors = trainer.state(true);
          flip(find(tensors, "decoder.final_layernorm.weight", "exp_avg").values, 9);
        };
        trainer.run(callbacks);
      },
      options_of(of_run));
  for (const std::string& error : found)
    EXPECT_NE(error.find("after iteration 3: copies of exp_avg of"), std::string::npos) << error;
}

TEST_F(ReplicaCheckTest, ReducedGradientsAreComparedBeforeTheyAreUsed) {
  run_ranks(3, [&](const ParallelState& state) {
    TrainingModel model(three_ranks(), state);
    model.zero_grad_buffer();
    for (const auto& chunk : model.chunks())
      for (const auto& param : chunk->parameters()) (param * (1 + state.rank())).sum().backward();
    model.finalize_gradients(3.0);
    const auto gradients = whole_gradients(model.wrappers(), state);
    ASSERT_GT(gradients.size(), 10U);
    ReplicaCheck check(gradients, state);
    EXPECT_EQ(check.num_shared(), gradients.size());
    check.compare("now");
    const StateTensor& one = gradients[4];
    if (state.rank() == 0) flip(one.values, 17);
    EXPECT_TRUE(testing::throws_with<CommunicationError>(
        [&] { check.compare("now"); },
        "now: copies of gradient of '" + one.name + "' differ: rank 0 differs from ranks 1, 2"));
  });
}

/// A thousand flips of random bits of random tensors on random ranks, one at a time.
TEST_F(ReplicaCheckTest, FindsAThousandFlippedBits) {
  for (const bool shards : {false, true}) {
    const Config of_run = config(
        with({"train.global_batch_size=6", "train.precision=bf16"}, shards ? kShards : Fields{}),
        {});
    run_ranks(
        3,
        [&](const ParallelState& state) {
          Trainer trainer(of_run, state);
          trainer.train_step();
          const std::vector<StateTensor> tensors = trainer.state(true);
          ReplicaCheck check(tensors, state);
          check.remember();
          check.compare("before");
          std::mt19937 random(7);  // the same on all ranks, so that they know what to expect
          int found = 0;
          for (int i = 0; i < 500; ++i) {
            const auto rank = static_cast<int64_t>(random() % 3);
            const uint64_t which = random(), where = random();
            if (state.rank() == rank) {
              const StateTensor& tensor = tensors[which % tensors.size()];
              const auto bit =
                  static_cast<int64_t>(where % static_cast<uint64_t>(bits(tensor.values)));
              flip(tensor.values, bit);
              const std::string name = name_of(tensor);
              const bool has_copies = !shards || tensor.state.empty();
              found += testing::throws_with<CommunicationError>(
                  [&] { check.compare("x"); },
                  has_copies ? fmt::format("copies of {} differ: rank {} differs", name, rank)
                             : fmt::format("without a write: rank {}: {}", rank, name));
              flip(tensor.values, bit);
            } else {
              found += testing::throws_with<CommunicationError>([&] { check.compare("x"); },
                                                                fmt::format("rank {}", rank));
            }
            check.compare("afterwards");
          }
          EXPECT_EQ(found, 500);
        },
        options_of(of_run));
  }
}

}  // namespace
}  // namespace lockstep
