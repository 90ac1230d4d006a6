#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

constexpr int64_t kSavedAt = 3;
constexpr int64_t kAfter = 10;

struct Layout {
  std::string name;
  int64_t ranks;
  std::vector<std::string> overrides;
};

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() { text_ = folder_.write("text", testing::synthetic_text()); }

  Config config(std::vector<std::string> overrides) const {
    overrides.insert(overrides.begin(), {"data.path=" + text_, "train.precision=fp64"});
    return parse_config(
        "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 num_query_groups: 2 "
        "ffn_hidden_size: 24 seq_length: 16 vocab_size: 257 make_vocab_size_divisible_by: 4 } "
        "optimizer { lr: 0.01 lr_warmup_iters: 2 weight_decay: 0.1 clip_grad: 0.5 "
        "lr_decay_style: \"cosine\" } train { global_batch_size: 4 micro_batch_size: 1 "
        "train_iters: 20 eval_iters: 0 }",
        "test", overrides);
  }

  std::string folder(const std::string& name) const { return folder_.path() / name; }

  /// Loss and gradient norm of the next `count` iterations, as rank 0 sees them.
  static std::vector<double> steps(Trainer& trainer, int64_t count) {
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) {
      const IterationMetrics metrics = trainer.train_step();
      const double norm = std::isfinite(metrics.grad_norm) ? metrics.grad_norm : -1;  // an overflow
      values.insert(values.end(), {metrics.lm_loss, norm});
    }
    return values;
  }

  /// Trains and saves in `into`. Returns the curve of the iterations after the save.
  std::vector<double> save(const Layout& layout, const std::string& into,
                           const std::vector<std::string>& more = {}) const {
    std::vector<double> curve;
    run_ranks(layout, more, [&](Trainer& trainer, const ParallelState& state) {
      steps(trainer, kSavedAt);
      RunCheckpoints(trainer.config().checkpoint, into, state).after_iteration(trainer, true);
      const std::vector<double> mine = steps(trainer, kAfter);
      if (state.rank() == 0) curve = mine;
    });
    return curve;
  }

  std::vector<double> load(const Layout& layout, const std::string& from,
                           const std::vector<std::string>& more = {}) const {
    return load_each(layout, {from}, more).front();
  }

  /// Resumes from each checkpoint in turn, each time with a new trainer. Returns the curves.
  std::vector<std::vector<double>> load_each(const Layout& layout,
                                             const std::vector<std::string>& folders,
                                             const std::vector<std::string>& more) const {
    std::vector<std::vector<double>> curves(folders.size());
    run_ranks(layout, more, [&](Trainer& first, const ParallelState& state) {
      for (size_t i = 0; i < folders.size(); ++i) {
        std::optional<Trainer> other;
        if (i > 0) other.emplace(first.config(), state);
        Trainer& trainer = other ? *other : first;
        CheckpointConfig checkpoint;
        checkpoint.load = folders[i];
        EXPECT_TRUE(RunCheckpoints(checkpoint, "", state).load(trainer));
        EXPECT_EQ(trainer.iteration(), kSavedAt);
        const std::vector<double> mine = steps(trainer, kAfter);
        if (state.rank() == 0) curves[i] = mine;
      }
    });
    return curves;
  }

  void run_ranks(const Layout& layout, const std::vector<std::string>& more,
                 const std::function<void(Trainer&, const ParallelState&)>& body) const {
    std::vector<std::string> overrides = layout.overrides;
    overrides.insert(overrides.end(), more.begin(), more.end());
    const Config config = this->config(overrides);
    testing::RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    testing::run_ranks(
        layout.ranks,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          body(trainer, state);
        },
        options);
  }

  /// Saves on each layout and resumes on each. Compares the next kAfter losses and gradient norms.
  void check_pairs(const std::vector<Layout>& layouts, const std::vector<std::string>& more) const {
    std::vector<std::string> folders;
    std::vector<std::vector<double>> expected;
    for (const Layout& saved : layouts) {
      folders.push_back(folder(saved.name));
      expected.push_back(save(saved, folders.back(), more));
      EXPECT_TRUE(verify_checkpoint(folders.back()).empty());
    }
    for (size_t to = 0; to < layouts.size(); ++to) {
      const auto found = load_each(layouts[to], folders, more);
      for (size_t from = 0; from < layouts.size(); ++from) {
        ASSERT_EQ(found[from].size(), 2 * kAfter);
        const double tolerance = from == to ? 0 : 1e-9;
        for (size_t i = 0; i < found[from].size(); ++i)
          ASSERT_NEAR(found[from][i], expected[from][i], tolerance * expected[from][i])
              << layouts[from].name << " to " << layouts[to].name << ", " << i;
      }
    }
  }

  TemporaryFolder folder_;
  std::string text_;
};

/// Each uses as few micro-batches as it can.
const std::vector<Layout>& layouts() {
  static const std::vector<Layout> list = {
      {"one rank", 1, {"train.micro_batch_size=4"}},
      {"dp 2", 2, {"ddp.bucket_size=300"}},
      {"dp 2, distributed optimizer",
       2,
       {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
        "train.micro_batch_size=2"}},
      {"dp 4, distributed optimizer, 2 instances",
       4,
       {"ddp.use_distributed_optimizer=true", "ddp.bucket_size=500",
        "parallel.num_distributed_optimizer_instances=2"}},
      {"tp 2, sequence parallel",
       2,
       {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
        "train.micro_batch_size=4"}},
      {"tp 4, distributed optimizer",
       4,
       {"parallel.tensor_model_parallel_size=4", "ddp.use_distributed_optimizer=true",
        "train.micro_batch_size=4"}},
      {"pp 2, dp 2, distributed optimizer",
       4,
       {"parallel.pipeline_model_parallel_size=2", "ddp.use_distributed_optimizer=true",
        "train.micro_batch_size=2"}},
      {"cp 2, pp 2, vpp 2",
       4,
       {"parallel.pipeline_model_parallel_size=2", "parallel.context_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_size=2", "train.micro_batch_size=2"}},
  };
  return list;
}

TEST_F(CheckpointTest, EveryLayoutGoesOnFromEveryOther) { check_pairs(layouts(), {}); }

TEST_F(CheckpointTest, EverySharding) {
  const auto sharded = [](const char* strategy, std::vector<std::string> more) {
    more.insert(more.begin(), {"ddp.use_distributed_optimizer=true",
                               std::string("ddp.data_parallel_sharding_strategy=") + strategy});
    return more;
  };
  check_pairs({{"no_shard", 2, {}},
               {"optim", 2, sharded("optim", {})},
               {"optim_grads", 4, sharded("optim_grads", {"ddp.bucket_size=500"})},
               {"optim_grads_params", 2, sharded("optim_grads_params", {})},
               {"optim_grads_params, pp 2", 4,
                sharded("optim_grads_params", {"parallel.pipeline_model_parallel_size=2",
                                               "ddp.overlap_param_gather=true"})}},
              {});
}

TEST_F(CheckpointTest, ExpertsGoOnOnEveryLayout) {
  const std::vector<Layout> list = {
      {"one rank", 1, {"train.micro_batch_size=4"}},
      {"ep 2", 2, {"parallel.expert_model_parallel_size=2", "train.micro_batch_size=2"}},
      {"ep 2, dp 4, distributed optimizer",
       4,
       {"parallel.expert_model_parallel_size=2", "ddp.use_distributed_optimizer=true"}},
      {"ep 2, dp 4, optim_grads_params",
       4,
       {"parallel.expert_model_parallel_size=2", "ddp.use_distributed_optimizer=true",
        "ddp.data_parallel_sharding_strategy=optim_grads_params", "ddp.overlap_param_gather=true"}},
      {"tp 2, etp 1, ep 2, pp 2",
       4,
       {"parallel.tensor_model_parallel_size=2", "parallel.expert_tensor_parallel_size=1",
        "parallel.expert_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2",
        "parallel.sequence_parallel=true", "train.micro_batch_size=4"}}};
  check_pairs(list, {"model.num_experts=4", "model.moe_router_score_function=sigmoid",
                     "model.moe_router_enable_expert_bias=true",
                     "model.untie_embeddings_and_output_weights=true"});
}

TEST_F(CheckpointTest, InEveryPrecisionTheSameLayoutGoesOnBitForBit) {
  for (const char* const precision : {"fp32", "bf16", "fp16"})
    for (const size_t layout : {1, 2}) {
      const std::vector<std::string> more = {std::string("train.precision=") + precision,
                                             "optimizer.initial_loss_scale=65536"};
      const std::string into = folder(precision + layouts()[layout].name);
      const std::vector<double> expected = save(layouts()[layout], into, more);
      EXPECT_EQ(load(layouts()[layout], into, more), expected) << precision;
    }
}

TEST_F(CheckpointTest, MasterWeightsCarryAChangeOfThePrecision) {
  const Layout& layout = layouts()[2];
  const std::vector<double> bf16 = save(layout, folder("bf16"), {"train.precision=bf16"});
  const std::vector<double> wide = load(layouts()[0], folder("bf16"), {"train.precision=fp32"});
  for (size_t i = 0; i < wide.size(); ++i) EXPECT_NEAR(wide[i], bf16[i], 0.05 * bf16[i]);
  const std::vector<double> fp32 = save(layout, folder("fp32"), {"train.precision=fp32"});
  const std::vector<double> narrow = load(layout, folder("fp32"), {"train.precision=bf16"});
  for (size_t i = 0; i < narrow.size(); ++i) EXPECT_NEAR(narrow[i], fp32[i], 0.05 * fp32[i]);
  run_ranks(layout, {"train.precision=fp16", "optimizer.initial_loss_scale=64"},
            [&](Trainer& trainer, const ParallelState&) {
              CheckpointReader reader(folder("fp32"));
              EXPECT_FALSE(reader.manifest().scaler);
              trainer.load(reader, /*weights_only=*/false);
              EXPECT_EQ(trainer.progress().optimizer.scaler->scale, 64);
            });
  save(layouts()[0], folder("fp16"), {"train.precision=fp16", "optimizer.initial_loss_scale=64"});
  run_ranks(layouts()[0], {"train.precision=bf16"}, [&](Trainer& trainer, const ParallelState&) {
    CheckpointReader reader(folder("fp16"));
    trainer.load(reader, /*weights_only=*/false);
    std::map<std::string, at::Tensor> weights;
    for (const StateTensor& one : trainer.state(/*with_optimizer=*/true)) {
      if (one.state.empty()) weights[one.name] = one.values;
      EXPECT_TRUE(one.state != "master" || weights[one.name].equal(one.values.to(at::kBFloat16)));
    }
  });
}

TEST_F(CheckpointTest, EveryElementIsWrittenOnceAndTheWorkIsShared) {
  const std::string into = folder("shared");
  save(layouts()[1], into);
  CheckpointReader reader(into);
  const Manifest& manifest = reader.manifest();
  EXPECT_EQ(manifest.iteration, kSavedAt);
  EXPECT_EQ(manifest.consumed_samples, kSavedAt * 4);
  EXPECT_EQ(manifest.optimizer_steps, kSavedAt);
  EXPECT_EQ(manifest.layout.world_size, 2);
  int64_t elements = 0, largest = 0;
  for (const ManifestTensor& tensor : manifest.tensors) {
    EXPECT_EQ(tensor.pieces.size(), 1u);
    elements += tensor.numel();
    largest = std::max(largest, tensor.numel() * 8);
  }
  ASSERT_EQ(manifest.files.size(), 3u);
  const int64_t first = manifest.files[1].size, second = manifest.files[2].size;
  EXPECT_LE(std::abs(first - second), largest);
  EXPECT_LT(first + second, elements * 8 + 20000);
  EXPECT_EQ(reader.config().train.global_batch_size, 4);
}

TEST_F(CheckpointTest, TheDistributedOptimizersStateIsWrittenByItsOwners) {
  const std::string into = folder("owners");
  save(layouts()[2], into, {"model.ffn_hidden_size=28"});
  const CheckpointReader reader(into);
  int64_t cut = 0;
  for (const ManifestTensor& tensor : reader.manifest().tensors)
    cut += tensor.pieces.size() > 1 ? 1 : 0;
  EXPECT_GE(cut, 1);  // a parameter that crosses the border of two shards
}

TEST_F(CheckpointTest, WhatCannotBeLoadedIsNamed) {
  const std::string into = folder("weights"), none = folder("none");
  save(layouts()[0], into, {"checkpoint.save_optim=false"});
  run_ranks(layouts()[1], {}, [&](Trainer& trainer, const ParallelState& state) {
    CheckpointConfig checkpoint;
    checkpoint.load = into;
    EXPECT_TRUE(throws_with<FileError>([&] { RunCheckpoints(checkpoint, "", state).load(trainer); },
                                       "checkpoint.finetune = true loads"));
    checkpoint.finetune = true;
    EXPECT_TRUE(RunCheckpoints(checkpoint, "", state).load(trainer));
    EXPECT_EQ(trainer.iteration(), 0);
    checkpoint.load = none;
    EXPECT_TRUE(throws_with<FileError>([&] { RunCheckpoints(checkpoint, "", state).load(trainer); },
                                       "'" + none + "' holds no complete checkpoint"));
    checkpoint.load_if_present = true;
    EXPECT_FALSE(RunCheckpoints(checkpoint, "", state).load(trainer));
    checkpoint.save_interval = 5;
    EXPECT_TRUE(throws_with<ConfigError>([&] { RunCheckpoints(checkpoint, "", state); },
                                         "checkpoint.save_interval: found 5"));
  });
  run_ranks(layouts()[0], {"model.num_layers=5"}, [&](Trainer& trainer, const ParallelState&) {
    CheckpointReader reader(into);
    EXPECT_TRUE(throws_with<FileError>([&] { trainer.load(reader, true); },
                                       "tensor 'decoder.layers.4.input_layernorm.weight' is miss"));
  });
}

TEST_F(CheckpointTest, AnOptimizerWithoutStateResumes) {
  const std::string into = folder("sgd");
  const std::vector<std::string> sgd = {"optimizer.optimizer=sgd", "optimizer.sgd_momentum=0",
                                        "train.precision=fp32"};
  const std::vector<double> expected = save(layouts()[0], into, sgd);
  EXPECT_EQ(load(layouts()[0], into, sgd), expected);
}

TEST_F(CheckpointTest, LayersThatTheModelDoesNotHaveAreNotDropped) {
  const std::string into = folder("four layers");
  save(layouts()[0], into);
  run_ranks(layouts()[1],
            {"model.num_layers=2", "checkpoint.load=" + into, "checkpoint.finetune=true"},
            [](Trainer& trainer, const ParallelState& state) {
              const at::Tensor before = trainer.state(false).front().values.clone();
              RunCheckpoints checkpoints(trainer.config().checkpoint, "", state);
              EXPECT_TRUE(throws_with<FileError>(
                  [&] { checkpoints.load(trainer); },
                  "tensor 'decoder.layers.2.input_layernorm.weight' belongs to no parameter"));
              EXPECT_TRUE(at::equal(trainer.state(false).front().values, before));
            });
}

TEST_F(CheckpointTest, AModelWhoseWeightsHaveOtherShapesIsRefusedByTheFieldThatWasSet) {
  const std::string into = folder("other shapes");
  save(layouts()[0], into);
  const std::string end = ", as in the run that saved '" + into + "/step_3'";
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"model.num_layers=2", "model.num_layers: found 2, allowed: 4" + end},
      {"model.hidden_size=32", "model.hidden_size: found 32, allowed: 16" + end},
      {"model.ffn_hidden_size=48", "model.ffn_hidden_size: found 48, allowed: 24" + end}};
  for (const auto& [override, expected] : changes)
    run_ranks(layouts()[1], {override, "checkpoint.load=" + into},
              [&](Trainer& trainer, const ParallelState& state) {
                RunCheckpoints checkpoints(trainer.config().checkpoint, "", state);
                EXPECT_TRUE(throws_with<ConfigError>([&] { checkpoints.load(trainer); }, expected));
              });
}

TEST_F(CheckpointTest, AModelThatWouldReadTheWeightsInAnotherWayIsRefusedByField) {
  const std::string into = folder("two heads more");
  save(layouts()[0], into);
  const std::vector<std::pair<std::vector<std::string>, std::string>> changes = {
      {{"model.rotary_base=500"}, "model.rotary_base: found 500, allowed: 10000, as in the run"},
      {{"model.layernorm_epsilon=0.001"}, "model.layernorm_epsilon: found 0.001, allowed: 1e-05"},
      {{"model.num_attention_heads=8", "model.num_query_groups=4", "model.kv_channels=2"},
       "model.num_attention_heads: found 8, allowed: 4, as in the run that saved '" + into}};
  for (const auto& [overrides, expected] : changes)
    run_ranks(layouts()[1], overrides, [&](Trainer& trainer, const ParallelState& state) {
      CheckpointConfig checkpoint;
      checkpoint.load = into;
      EXPECT_TRUE(throws_with<ConfigError>(
          [&] { RunCheckpoints(checkpoint, "", state).load(trainer); }, expected));
      EXPECT_EQ(trainer.iteration(), 0);
      checkpoint.finetune = true;
      EXPECT_TRUE(RunCheckpoints(checkpoint, "", state).load(trainer));
    });
}

TEST_F(CheckpointTest, WeightsAloneStartAnewWithTheirLoss) {
  const std::string into = folder("weights");
  const std::vector<double> expected = save(layouts()[0], into);
  run_ranks(layouts()[2], {"train.precision=bf16"}, [&](Trainer& trainer, const ParallelState&) {
    CheckpointReader reader(into);
    trainer.load(reader, /*weights_only=*/true);
    EXPECT_EQ(trainer.progress().optimizer.num_steps, 0);
    EXPECT_NEAR(trainer.train_step().lm_loss, expected[0], 0.2);
    EXPECT_NEAR(trainer.train_step().lm_loss, expected[0], 0.2);
  });
}

TEST_F(CheckpointTest, ARunThatGoesOnAtOnceSavesWhatItHadWhenItSaved) {
  const std::string into = folder("goes on");
  const Layout& layout = layouts()[2];
  std::vector<double> expected;
  run_ranks(layout, {"checkpoint.async_save=true", "checkpoint.save_interval=3"},
            [&](Trainer& trainer, const ParallelState& state) {
              RunCheckpoints checkpoints(trainer.config().checkpoint, into, state);
              steps(trainer, kSavedAt);
              checkpoints.after_iteration(trainer, false);
              const std::vector<double> mine = steps(trainer, kAfter);
              if (state.rank() == 0) expected = mine;
              checkpoints.after_iteration(trainer, true);
            });
  EXPECT_EQ(load(layout, into + "/step_3"), expected);
}

}  // namespace
}  // namespace lockstep
