#include "lockstep/training/run_setup.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/cuda_libraries.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

LaunchEnvironment local_rank(int rank, int ranks_of_host) {
  LaunchEnvironment environment;
  environment.local_rank = rank;
  environment.local_world_size = ranks_of_host;
  return environment;
}

c10::Device cuda(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

TEST(ChooseDevice, RankIOfAHostTakesDeviceI) {
  for (const auto choice : {DeviceChoice::auto_, DeviceChoice::cuda})
    for (const int64_t visible : {4, 8})
      for (int rank = 0; rank < 4; ++rank)
        EXPECT_EQ(choose_device(choice, local_rank(rank, 4), visible), cuda(rank));
}

TEST(ChooseDevice, ARankThatSeesOneDeviceTakesIt) {
  for (const auto choice : {DeviceChoice::auto_, DeviceChoice::cuda})
    for (int rank = 0; rank < 8; ++rank)
      EXPECT_EQ(choose_device(choice, local_rank(rank, 8), 1), cuda(0));
}

TEST(ChooseDevice, TheCpuIsTakenWhereItIsAskedForOrNothingElseIsThere) {
  EXPECT_EQ(choose_device(DeviceChoice::cpu, local_rank(0, 2), 8), c10::kCPU);
  EXPECT_EQ(choose_device(DeviceChoice::cpu, local_rank(0, 2), 0), c10::kCPU);
  EXPECT_EQ(choose_device(DeviceChoice::auto_, local_rank(1, 2), 0), c10::kCPU);
}

TEST(ChooseDevice, TooFewDevicesAreAnErrorAndNotTheCpu) {
  for (const auto choice : {DeviceChoice::auto_, DeviceChoice::cuda})
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        [&] { choose_device(choice, local_rank(0, 4), 2); },
        "found visible CUDA devices: 2, ranks of this host: 4; allowed: a device for each rank"));
  const std::string why = why_no_cuda().empty() ? "" : " (" + why_no_cuda() + ")";
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      [] { choose_device(DeviceChoice::cuda, local_rank(0, 1), 0); },
      "train.device = cuda: found visible CUDA devices: 0" + why + ", ranks of this host: 1"));
}

TEST(ParallelOptions, RanksOnADeviceWaitTenMinutesForEachOther) {
  const Config config;
  EXPECT_EQ(parallel_options(config, c10::kCPU).timeout, std::chrono::seconds(60));
  for (const c10::Device device : {cuda(1), c10::Device(c10::kPrivateUse1, 0)})
    EXPECT_EQ(parallel_options(config, device).timeout, std::chrono::seconds(600));
  const Config set = parse_config("parallel { distributed_timeout_seconds: 7.5 }", "test");
  for (const c10::Device device : {cuda(0), c10::Device(c10::kCPU)})
    EXPECT_EQ(parallel_options(set, device).timeout, std::chrono::milliseconds(7500));
}

TEST(ParallelOptions, TheRanksCompareWhatTheDeviceMeans) {
  const auto told = [](c10::Device device) {
    std::map<std::string, std::string> values;
    for (const AnnouncedField& field : parallel_options(Config(), device).announcement)
      values[field.name] = field.value;
    return std::pair(values["model.make_vocab_size_divisible_by"],
                     values["parallel.distributed_timeout_seconds"]);
  };
  EXPECT_EQ(told(c10::kCPU), std::pair(std::string("1"), std::string("60")));
  EXPECT_EQ(told(cuda(0)), std::pair(std::string("128"), std::string("600")));
}

TEST(ParallelOptions, StagesOfAPipelineOnADeviceSendThroughFewBlocks) {
  const auto stages = [](const std::string& more) {
    return parse_config("parallel { pipeline_model_parallel_size: 2 " + more + " }", "test");
  };
  const auto of_pp = [](const Config& config, c10::Device device) {
    return parallel_options(config, device).group_options[GroupKind::pp];
  };
  EXPECT_EQ(of_pp(stages(""), cuda(0)).max_ctas, 4);
  EXPECT_EQ(of_pp(stages(""), c10::kCPU), GroupOptions());
  EXPECT_EQ(of_pp(Config(), cuda(0)), GroupOptions());
  EXPECT_EQ(of_pp(stages("group_options: \"pp: max_ctas=16\""), cuda(0)).max_ctas, 16);
  const GroupOptions set = of_pp(stages("group_options: \"pp: min_ctas=8\""), cuda(0));
  EXPECT_EQ(set.min_ctas, 8);
  EXPECT_EQ(set.max_ctas, std::nullopt);
  for (const auto& [kind, options] : parallel_options(stages(""), cuda(0)).group_options)
    EXPECT_EQ(kind, GroupKind::pp) << "others keep NCCL's choice";
}

/// Unsets variables of this process, and restores them at the end.
class WithoutVariables {
 public:
  explicit WithoutVariables(std::vector<std::string> names) : names_(std::move(names)) {
    for (const std::string& name : names_) {
      const char* const value = std::getenv(name.c_str());
      values_.push_back(value ? std::optional<std::string>(value) : std::nullopt);
      ::unsetenv(name.c_str());
    }
  }
  ~WithoutVariables() {
    for (size_t i = 0; i < names_.size(); ++i)
      if (values_[i])
        ::setenv(names_[i].c_str(), values_[i]->c_str(), /*overwrite=*/1);
      else
        ::unsetenv(names_[i].c_str());
  }

 private:
  std::vector<std::string> names_;
  std::vector<std::optional<std::string>> values_;
};

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

TEST(PrepareCuda, GivesEachStreamOfAPipelineAQueue) {
  const char* const queues = "CUDA_DEVICE_MAX_CONNECTIONS";
  const WithoutVariables restore({queues});
  prepare_cuda(Config());
  prepare_cuda(parse_config(
      "parallel { pipeline_model_parallel_size: 2 } train { device: \"cpu\" }", "test"));
  EXPECT_EQ(variable(queues), std::nullopt);
  const Config stages = parse_config("parallel { pipeline_model_parallel_size: 2 }", "test");
  prepare_cuda(stages);
  EXPECT_EQ(variable(queues), "32");
  ::setenv(queues, "1", /*overwrite=*/1);
  prepare_cuda(stages);
  EXPECT_EQ(variable(queues), "1") << "what the user sets stays";
}

/// c10d asks whether operations are deterministic when a group is made, before there is a trainer.
TEST(PrepareCuda, KeepsDeterministicRunsFromNvls) {
  const char* const algorithms = "NCCL_ALGO";
  const WithoutVariables restore({algorithms});
  prepare_cuda(Config());
  prepare_cuda(parse_config("train { deterministic: true device: \"cpu\" }", "test"));
  EXPECT_EQ(variable(algorithms), std::nullopt);
  const Config deterministic = parse_config("train { deterministic: true }", "test");
  prepare_cuda(deterministic);
  EXPECT_EQ(variable(algorithms), "^NVLS");
  ::setenv(algorithms, "Ring", /*overwrite=*/1);
  prepare_cuda(deterministic);
  EXPECT_EQ(variable(algorithms), "Ring") << "what the user sets stays";
}

/// A call of check_supported() with `fields`, which parse_config() takes.
auto checked(const std::vector<std::string>& fields) {
  return [config = parse_config("", "test", fields)] { check_supported(config); };
}

TEST(CheckSupported, SettingsOfExpertsNeedExperts) {
  const std::vector<std::pair<std::string, std::string>> values = {
      {"moe_router_topk", "4"},
      {"moe_ffn_hidden_size", "48"},
      {"moe_layer_freq", "2"},
      {"moe_shared_expert_intermediate_size", "512"},
      {"moe_router_score_function", "sigmoid"},
      {"moe_router_pre_softmax", "true"},
      {"moe_router_load_balancing_type", "none"},
      {"moe_aux_loss_coeff", "0.01"},
      {"moe_z_loss_coeff", "0.001"},
      {"moe_expert_capacity_factor", "1.5"},
      {"moe_pad_expert_input_to_capacity", "true"},
      {"moe_token_dispatcher_type", "allgather"},
      {"moe_router_enable_expert_bias", "true"},
      {"moe_router_bias_update_rate", "0.5"},
      {"moe_router_num_groups", "2"},
      {"moe_router_group_topk", "1"},
      {"moe_router_topk_scaling_factor", "2.5"}};
  for (const auto& [name, value] : values)
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        checked({"model." + name + "=" + value}),
        "model." + name + ": found " + value + ", but model.num_experts is not set"));
  size_t of_experts = 0;
  for (const ConfigField& field : config_fields())
    of_experts += field.path.starts_with("model.moe_") ? 1 : 0;
  EXPECT_EQ(values.size(), of_experts) << "every field is tried";

  const Config dense = parse_config("", "test");
  EXPECT_NO_THROW(check_supported(parse_config(print_config(dense), "as earlier versions wrote")));
  EXPECT_NO_THROW(checked({"model.num_experts=4", "model.moe_router_topk=4"})());
}

TEST(CheckSupported, WhatTheGivenDeviceCannotDo) {
  for (const std::string graph : {"microbatch", "step"}) {
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        checked({"train.device=cpu", "train.cuda_graph=" + graph}),
        "train.cuda_graph = " + graph + ": found train.device = cpu, allowed: auto, cuda"));
    for (const std::string device : {"auto", "cuda"})
      EXPECT_NO_THROW(checked({"train.device=" + device, "train.cuda_graph=" + graph})());
  }
  const std::string replay = "train.replay_interval=5";
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      checked({"train.device=cuda", replay}),
      "train.deterministic: found false, allowed with train.replay_interval on a GPU: true"));
  EXPECT_NO_THROW(checked({"train.device=cuda", replay, "train.deterministic=true"})());
  for (const std::string device : {"auto", "cpu"})
    EXPECT_NO_THROW(checked({"train.device=" + device, replay})());
}

TEST(CheckSupported, SomeLayerHasExperts) {
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      checked({"model.num_experts=4", "model.moe_layer_freq=[0, 0]"}),
      "model.moe_layer_freq: found no layer with experts (0, 0), allowed with model.num_experts"));
  for (const char* const some : {"[0, 1]", "2", "3"})
    EXPECT_NO_THROW(
        checked({"model.num_experts=4", std::string("model.moe_layer_freq=") + some})());
}

TEST(CheckSupported, TheLearningRateOfFrozenLayersIsRefused) {
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      checked({"lora.rank=4", "optimizer.decoupled_lr=0.02", "optimizer.decoupled_min_lr=0.01"}),
      "optimizer.decoupled_lr: found 0.02, allowed with lora.rank: unset, because the embeddings "
      "and the output layer are frozen"));
  EXPECT_NO_THROW(checked({"optimizer.decoupled_lr=0.02"})());
}

TEST(CheckSupported, AGroupOfMicrobatchesNeedsSeveralChunks) {
  const std::string layers = "model.num_layers=4";
  const std::string group = "parallel.microbatch_group_size_per_vp_stage=4";
  const std::string two = "parallel.pipeline_model_parallel_size=2";
  const std::string chunks = "parallel.virtual_pipeline_model_parallel_size=";
  for (const auto& wrong : {checked({layers, group}), checked({layers, group, two})})
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        wrong,
        "parallel.microbatch_group_size_per_vp_stage: found 4, allowed without "
        "parallel.virtual_pipeline_model_parallel_size: unset, because each rank has one"));
  for (const char* const number : {"1", "2"})
    EXPECT_NO_THROW(checked({layers, group, two, chunks + number})());
}

TEST(CheckSupported, SomeLayerComputesInFp8) {
  const auto kept = [](const std::string& start, const std::string& end) {
    return checked({"model.num_layers=3", "train.precision=bf16", "train.fp8=hybrid",
                    "train.num_layers_at_start_in_bf16=" + start,
                    "train.num_layers_at_end_in_bf16=" + end});
  };
  const std::string allowed = "; allowed: together less than model.num_layers (3)";
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      kept("1", "2"), "train.num_layers_at_end_in_bf16: found 2, and 1 at the start" + allowed));
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      kept("3", "0"), "train.num_layers_at_start_in_bf16: found 3, and 0 at the end" + allowed));
  EXPECT_NO_THROW(kept("1", "1")());
  EXPECT_NO_THROW(kept("0", "2")());
}

TEST(StrongerRouterLosses, AreToldWhereLabelsAreIgnored) {
  const auto note = [](const std::vector<std::string>& fields) {
    std::vector<std::string> all = {"model.num_experts=4", "data.chat_template=plain"};
    all.insert(all.end(), fields.begin(), fields.end());
    return stronger_router_losses(parse_config("", "test", all));
  };
  const std::string aux = "model.moe_aux_loss_coeff=0.01", z = "model.moe_z_loss_coeff=0.001";
  const std::string sft = "train.task=sft", masked = "data.eod_mask_loss=true";
  for (const std::string& ignoring : {sft, masked}) {
    EXPECT_TRUE(note({aux, z, ignoring}).starts_with("model.moe_aux_loss_coeff: router losses "));
    EXPECT_TRUE(note({z, ignoring}).starts_with("model.moe_z_loss_coeff: router losses "));
    EXPECT_NE(note({z, ignoring}).find("; ddp.calculate_per_token_loss=false takes means"),
              std::string::npos);
    EXPECT_EQ(note({aux, z, ignoring, "ddp.calculate_per_token_loss=false"}), "");
    EXPECT_EQ(note({aux, z, ignoring, "ddp.average_in_collective=true"}), "");
    EXPECT_EQ(note({ignoring}), "");
  }
  EXPECT_EQ(note({aux, z}), "");
}

TEST(CheckSupported, ChecksOfGradientsNeedALossScaleThatDoesNotAdapt) {
  for (const std::string field : {"ddp.check_for_nan_in_grad", "ddp.check_for_large_grads"}) {
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        checked({"train.precision=fp16", field + "=true"}),
        field + ": found true, allowed with train.precision = fp16: false, or a fixed "
                "optimizer.loss_scale"));
    EXPECT_NO_THROW(
        checked({"train.precision=fp16", "optimizer.loss_scale=1024", field + "=true"})());
    EXPECT_NO_THROW(checked({"train.precision=bf16", field + "=true"})());
  }
}

/// Earlier versions trained with such configurations.
TEST(CheckSupported, SavedSettingsThatHadNoEffectAreRead) {
  for (const std::vector<std::string>& fields : std::vector<std::vector<std::string>>{
           {"model.moe_router_topk=4", "model.moe_shared_expert_intermediate_size=512"},
           {"model.num_experts=4", "model.moe_layer_freq=[0, 0]"},
           {"lora.rank=4", "optimizer.decoupled_lr=0.02"},
           {"train.precision=bf16", "train.fp8=e4m3", "train.num_layers_at_start_in_bf16=2"}}) {
    const Config config = parse_config("", "test", fields);
    EXPECT_EQ(print_config(parse_config(print_config(config), "saved")), print_config(config));
    EXPECT_THROW(check_supported(config), ConfigError);
  }
}

TEST(CheckSupported, ACheckpointOfARunThatWouldNowBeRefusedIsReadAndResumed) {
  const testing::TemporaryFolder folder;
  const std::string text = folder.write("text", testing::synthetic_text());
  const std::string into = folder.path() / "saved";
  const Config config = parse_config(
      "model { num_layers: 1 hidden_size: 16 num_attention_heads: 4 seq_length: 16 } "
      "optimizer { initial_loss_scale: 1024 } ddp { check_for_nan_in_grad: true } "
      "train { precision: \"fp16\" global_batch_size: 2 micro_batch_size: 1 train_iters: 2 "
      "eval_iters: 0 }",
      "test", {"data.path=" + text});
  const ParallelState state = ParallelState::single_process();
  EXPECT_TRUE(testing::throws_with<ConfigError>([&] { Trainer(config, state); },
                                                "ddp.check_for_nan_in_grad: found true"));

  const Config without =
      parse_config(print_config(config), "config", {"ddp.check_for_nan_in_grad=false"});
  Trainer trainer(without, state);
  trainer.train_step();
  CheckpointSaver(state, {.folder = into})
      .save(trainer.state(/*with_optimizer=*/true), trainer.progress(), config);
  EXPECT_TRUE(load_model(into, c10::kCPU).config.ddp.check_for_nan_in_grad);
  Trainer resumed(without, state);
  CheckpointReader checkpoint(into);
  resumed.load(checkpoint, /*weights_only=*/false);
  EXPECT_EQ(resumed.iteration(), 1);
  EXPECT_EQ(resumed.train_step().iteration, 2);
}

/// Nothing read them, so they need not be what they were.
TEST(CheckSupported, ADenseRunResumesWithoutTheSettingsOfExpertsThatItHad) {
  const testing::TemporaryFolder folder;
  const std::string into = folder.path() / "saved";
  const Config config = parse_config(
      "model { num_layers: 1 hidden_size: 16 num_attention_heads: 4 seq_length: 16 "
      "moe_router_topk: 4 } "
      "train { global_batch_size: 2 micro_batch_size: 1 train_iters: 2 eval_iters: 0 }",
      "test",
      {"data.path=" + folder.write("text", testing::synthetic_text()), "checkpoint.load=" + into});
  const Config without = parse_config(print_config(config), "config", {"model.moe_router_topk=2"});
  const ParallelState state = ParallelState::single_process();
  Trainer trainer(without, state);
  trainer.train_step();
  CheckpointSaver(state, {.folder = into})
      .save(trainer.state(/*with_optimizer=*/true), trainer.progress(), config);
  Trainer resumed(without, state);
  RunCheckpoints checkpoints(without.checkpoint, "", state);
  checkpoints.load(resumed);
  EXPECT_EQ(resumed.iteration(), 1);
}

TEST(UnusedGpus, AreToldWhereARunTakesTheCpuByItself) {
  const testing::TemporaryFolder folder;
  folder.write("0000:17:00.0", "");
  folder.write("0000:65:00.0", "");
  EXPECT_EQ(unused_gpus(DeviceChoice::auto_, c10::kCPU, folder.path()),
            "train.device = auto uses the CPU: the driver lists 2 GPUs, but this process sees no "
            "CUDA device (" +
                (why_no_cuda().empty() ? "CUDA_VISIBLE_DEVICES" : why_no_cuda()) + ")");
  EXPECT_EQ(unused_gpus(DeviceChoice::cpu, c10::kCPU, folder.path()), "");
  EXPECT_EQ(unused_gpus(DeviceChoice::auto_, cuda(0), folder.path()), "");
  EXPECT_EQ(unused_gpus(DeviceChoice::auto_, c10::kCPU, folder.path() / "none"), "");
}

}  // namespace
}  // namespace lockstep
