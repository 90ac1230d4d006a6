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

TEST(CheckSupported, ChecksOfGradientsNeedALossScaleThatDoesNotAdapt) {
  const auto checked = [](const std::vector<std::string>& fields) {
    return [fields] { check_supported(parse_config("", "test", fields)); };
  };
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

/// Earlier versions trained with such a configuration.
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
