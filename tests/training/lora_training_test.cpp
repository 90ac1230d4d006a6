// What a run with low-rank adapters allocates, sends, saves and loads.

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;
using testing::TemporaryFolder;
using testing::throws_with;
using Fields = std::vector<std::string>;

const Fields kTuned = {"lora.rank=3", "optimizer.lr=0.03"};
const Fields kTwoTensorRanks = {"parallel.tensor_model_parallel_size=2"};
const Fields kZero1 = {"ddp.use_distributed_optimizer=true"};

Fields joined(const std::vector<Fields>& lists) {
  Fields all;
  for (const Fields& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

class LoraTrainingTest : public ::testing::Test {
 protected:
  LoraTrainingTest() { path_ = folder_.write("text", testing::synthetic_text()); }

  Config config(const std::vector<Fields>& overrides) const {
    Fields all = {"data.path=" + path_, "train.precision=fp64"};
    const Fields more = joined(overrides);
    all.insert(all.end(), more.begin(), more.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 num_query_groups: 2 "
        "ffn_hidden_size: 24 seq_length: 16 vocab_size: 256 } "
        "train { global_batch_size: 4 micro_batch_size: 1 train_iters: 6 eval_iters: 0 } "
        "optimizer { lr: 0.01 lr_decay_style: \"constant\" weight_decay: 0.1 }",
        "test", all);
  }

  std::string at(const std::string& name) const { return folder_.path() / name; }

  /// Trains as `lockstep train` does, with checkpoints. Returns the losses of rank 0.
  static std::vector<double> train(const Config& config, int64_t world, const std::string& folder) {
    testing::RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    std::vector<double> losses;
    run_ranks(
        world,
        [&](const ParallelState& state) {
          RunCheckpoints checkpoints(config.checkpoint, folder, state);
          Trainer trainer(config, state, !checkpoints.will_load());
          checkpoints.load(trainer);
          TrainCallbacks callbacks;
          callbacks.iteration = [&](const IterationMetrics& metrics) {
            if (state.rank() == 0) losses.push_back(metrics.lm_loss);
          };
          callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
          trainer.run(callbacks);
          checkpoints.finish();
        },
        options);
    return losses;
  }

  TemporaryFolder folder_;
  std::string path_;
};

std::map<std::string, at::Tensor> weights_of(const std::string& folder) {
  std::map<std::string, at::Tensor> weights;
  const SavedModel saved = load_model(folder, c10::kCPU);
  for (const auto& param : saved.model->named_parameters())
    weights[param.key()] = param.value().detach();
  return weights;
}

TEST_F(LoraTrainingTest, FrozenWeightsHaveNoGradientsNoStateAndSendNothing) {
  for (const Fields& more : std::vector<Fields>{{}, kZero1}) {
    const Config with = config({kTuned, more});
    testing::RankThreadOptions options;
    CollectiveLog log;
    options.log = &log;
    options.sizes = parallel_options(with, c10::kCPU).sizes;
    size_t before = 0;
    int64_t gradients = 0;
    const int64_t trained = num_trained_parameters(with);
    // A and B of linear_qkv [32, 16] and linear_proj [16, 16] in two layers.
    EXPECT_EQ(trained, 2 * 3 * ((16 + 32) + (16 + 16)));
    run_ranks(
        2,
        [&](const ParallelState& state) {
          Trainer trainer(with, state);
          int64_t elements = 0;
          for (const DistributedDataParallel* model : trainer.training_model().wrappers())
            for (const auto& buffer : model->buffers()) elements += buffer->grad_data().numel();
          const StageMemory plan = plan_memory(with, 2).stages.front();
          EXPECT_EQ(plan.gradient_bytes, elements * 8);
          EXPECT_EQ(plan.parameters, num_parameters(with));
          EXPECT_EQ(plan.parameter_bytes, 8 * (num_parameters(with) - trained + elements));
          EXPECT_GE(elements, trained);
          EXPECT_LE(elements, trained + 2 * 128);  // padding of shards
          if (state.rank() == 0) gradients = elements;
          int64_t state_bytes = 0;
          for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/true))
            if (!tensor.state.empty()) state_bytes += static_cast<int64_t>(tensor.values.nbytes());
          EXPECT_EQ(state_bytes, 16 * (more.empty() ? trained : trained / 2));
          EXPECT_EQ(plan.optimizer_bytes, 16 * (more.empty() ? elements : elements / 2));
          if (state.rank() == 0) before = log.of_rank(0).size();
          trainer.train_step();
        },
        options);
    int64_t reduced = 0;
    const auto calls = log.of_rank(0);
    for (size_t i = before; i < calls.size(); ++i)
      if (calls[i].label.find("bucket") != std::string::npos) reduced += calls[i].bytes;
    EXPECT_EQ(reduced, 8 * gradients);
  }
}

TEST_F(LoraTrainingTest, WhatIsPlannedIsWhatEachRankRegisters) {
  for (const Fields& layout : std::vector<Fields>{
           {"parallel.tensor_model_parallel_size=4"},
           {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
            "parallel.pipeline_model_parallel_size=2"}}) {
    const Config with = config(
        {kTuned,
         layout,
         {R"(lora.target_modules=["linear_fc2", "linear_qkv", "linear_fc1", "linear_proj"])"}});
    const auto line = [](const std::string& name, at::IntArrayRef shape,
                         const ParamDescription& description, bool trained) {
      return fmt::format("{} [{}] {}{}", name, fmt::join(shape, ", "), description.to_string(),
                         trained ? "" : ", frozen");
    };
    ParallelSizes sizes = parallel_options(with, c10::kCPU).sizes;
    sizes.world_size = 4;
    for (int64_t rank = 0; rank < 4; ++rank) {
      const auto state = ParallelState::planning_rank(sizes, rank);
      const auto chunks = chunks_of_stage(with, state.group(GroupKind::pp).rank());
      const GPTModel model(with.model, with.parallel, state, chunks.front().stage(),
                           {.lora = with.lora});
      std::vector<std::string> planned, found;
      for (const ShapedParameter& param : chunk_parameters(with, chunks.front()))
        planned.push_back(line(param.name, param.shape, param.description, param.trained));
      for (const NamedParameter& param : collect_parameters(model))
        found.push_back(line(param.name, param.tensor.sizes(), param.description,
                             param.tensor.requires_grad()));
      EXPECT_EQ(planned, found) << rank;
    }
  }
}

TEST_F(LoraTrainingTest, StartsFromACheckpointWithoutAdapters) {
  const std::vector<double> base = train(config(std::vector<Fields>{}), 1, at("base"));
  const Config with = config({kTuned, {"checkpoint.load=" + at("base")}});
  const std::vector<double> tuned = train(with, 1, at("tuned"));
  ASSERT_EQ(tuned.size(), 6U) << "iterations are counted from 0 again";
  EXPECT_LT(tuned[0], base[0] - 0.1);
  const auto before = weights_of(at("base")), after = weights_of(at("tuned"));
  EXPECT_EQ(after.size(), before.size() + 8);
  for (const auto& [name, weight] : before) EXPECT_TRUE(at::equal(after.at(name), weight)) << name;
  for (const auto& [name, weight] : after)
    if (!before.contains(name)) {
      EXPECT_GT(weight.abs().max().item<double>(), 0) << name;
    }
  // Two tensor-parallel ranks load the same base weights.
  const Config cut = config({kTuned, kTwoTensorRanks, {"checkpoint.load=" + at("base")}});
  const std::vector<double> on_two = train(cut, 2, at("on_two"));
  for (size_t i = 0; i < tuned.size(); ++i) EXPECT_NEAR(on_two[i], tuned[i], 1e-12 * tuned[i]);
}

TEST_F(LoraTrainingTest, ResumesBitForBit) {
  for (const Fields& layout : std::vector<Fields>{{}, kTwoTensorRanks, kZero1}) {
    const int64_t world = layout.empty() ? 1 : 2;
    const std::string name = layout.empty() ? "one" : layout.front();
    const Fields dropout = {"lora.dropout=0.2"};
    const std::vector<double> whole =
        train(config({kTuned, layout, dropout}), world, at("w" + name));
    const Config first = config({kTuned, layout, dropout, {"train.train_iters=2"}});
    std::vector<double> pieces = train(first, world, at("p" + name));
    const Config rest = config({kTuned, layout, dropout, {"checkpoint.load=" + at("p" + name)}});
    const std::vector<double> second = train(rest, world, at("p" + name));
    pieces.insert(pieces.end(), second.begin(), second.end());
    EXPECT_EQ(pieces, whole) << name;
    const auto expected = weights_of(at("w" + name)), found = weights_of(at("p" + name));
    for (const auto& [weight, tensor] : expected)
      EXPECT_TRUE(at::equal(found.at(weight), tensor)) << weight;
  }
}

TEST_F(LoraTrainingTest, InHalfPrecisionTheBaseStaysAsItIs) {
  const Fields half = {"train.precision=bf16"};
  train(config(std::vector<Fields>{half}), 1, at("base"));
  train(config({kTuned, half, kZero1, {"checkpoint.load=" + at("base")}}), 2, at("tuned"));
  CheckpointReader base(at("base")), tuned(at("tuned"));
  int64_t adapters = 0;
  for (const ManifestTensor& tensor : tuned.manifest().tensors) {
    if (!tensor.state.empty()) continue;
    if (base.find(tensor.name) != nullptr) {
      EXPECT_EQ(tuned.find(tensor.name, "master"), nullptr) << tensor.name;
      EXPECT_EQ(tensor.dtype, "BF16");
    } else {
      EXPECT_NE(tuned.find(tensor.name, "master"), nullptr) << tensor.name;
      EXPECT_EQ(tuned.find(tensor.name, "exp_avg")->dtype, "F32");
      ++adapters;
    }
  }
  EXPECT_EQ(adapters, 8);
}

TEST_F(LoraTrainingTest, TheOrderOfTheAdaptedLayersMayChange) {
  const auto with = [&](const std::string& layers, const Fields& more) {
    return config({kTuned, {"lora.target_modules=" + layers}, more});
  };
  const std::string one = R"(["linear_qkv", "linear_fc1"])";
  const std::string other = R"(["linear_fc1", "linear_qkv"])";
  const std::vector<double> whole = train(with(one, {}), 1, at("whole"));
  std::vector<double> pieces = train(with(one, {"train.train_iters=2"}), 1, at("pieces"));
  const std::vector<double> rest =
      train(with(other, {"checkpoint.load=" + at("pieces")}), 1, at("pieces"));
  pieces.insert(pieces.end(), rest.begin(), rest.end());
  EXPECT_EQ(pieces, whole);
}

TEST_F(LoraTrainingTest, OtherAdaptersAreRefusedByName) {
  train(config({kTuned, {"train.train_iters=1"}}), 1, at("saved"));
  const auto refuses = [&](const Fields& fields, const std::string& message) {
    const Config other = config({fields, {"checkpoint.load=" + at("saved")}});
    EXPECT_TRUE(throws_with<Error>([&] { train(other, 1, ""); }, message)) << message;
  };
  refuses({"lora.rank=4"}, "lora.rank: found 4, allowed: 3, as in the run that saved");
  refuses({"lora.rank=3", "lora.alpha=2"}, "lora.alpha: found 2, allowed: 16, as in the run");
  refuses({"lora.rank=3", "lora.target_modules=linear_fc1"}, "lora.target_modules: found ");
  refuses({}, "lora.rank: found unset, allowed: 3, as in the run that saved");
  refuses({"checkpoint.finetune=true"}, "lora_A' belongs to no parameter of the model");
  const auto refused = [&](const Fields& fields, const std::string& message) {
    EXPECT_TRUE(throws_with<ConfigError>([&] { config(std::vector<Fields>{fields}); }, message))
        << message;
  };
  refused({"lora.alpha=2"}, "lora.alpha: found 2, but lora.rank is not set");
  refused({"lora.target_modules=linear_qkv"},
          "lora.target_modules: found linear_qkv, but lora.rank is not set");
  refused({"lora.rank=2", R"(lora.target_modules=["linear_fc1", "linear_qkv", "linear_fc1"])"},
          "lora.target_modules: found linear_fc1 twice, allowed: each name once");
  refused({"lora.rank=0"}, "lora.rank: found 0, allowed: >= 1");
  refused({"lora.rank=2", "model.multi_latent_attention=true", "model.num_query_groups=4"},
          "lora.rank: found 2, allowed with model.multi_latent_attention: unset");
}

}  // namespace
}  // namespace lockstep
