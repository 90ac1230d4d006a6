#include "lockstep/checkpoint/checkpoint_saver.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

class CheckpointSaverTest : public ::testing::Test {
 protected:
  std::string folder(const std::string& name) const { return folder_.path() / name; }

  TemporaryFolder folder_;
};

std::vector<StateTensor> some_state(const at::Tensor& values) {
  return {{"w", "", {whole_box({values.numel()}), {0, values.numel()}}, values}};
}

float saved_value(const std::string& folder) {
  CheckpointReader reader(folder);
  float value = 0;
  reader.read(*reader.find("w"), {whole_box({1000}), {999, 1000}}, reinterpret_cast<char*>(&value));
  return value;
}

TEST_F(CheckpointSaverTest, AnAsynchronousSaveHoldsWhatWasThereWhenItWasCalled) {
  for (const bool in_background : {false, true}) {
    const std::string into = folder("async" + std::to_string(in_background));
    testing::run_ranks(2, [&](const ParallelState& state) {
      CheckpointSaver saver(
          state, {.folder = into, .keep = 2, .async = true, .copy_in_background = in_background});
      const at::Tensor values = at::full({1000}, 0.0F);
      for (int64_t i = 1; i <= 20; ++i) {
        values.fill_(static_cast<float>(i));
        TrainingProgress progress;
        progress.iteration = i;
        EXPECT_EQ(saver.save(some_state(values), progress, Config{}).last_error, "");
        if (in_background) saver.finish_copy();
        values.fill_(-1);
      }
      saver.finish();
    });
    EXPECT_EQ(complete_checkpoints(into).size(), 2u);
    EXPECT_EQ(saved_value(into), 20);
    EXPECT_EQ(saved_value(into + "/step_19"), 19);
  }
}

/// Rank 0 waits for rank 1's report, which goes to another folder, until the test gives it one.
TEST_F(CheckpointSaverTest, ABusySaveIsSkippedAndItsFailureReachesTheLoop) {
  const std::string into = folder("busy"), elsewhere = folder("elsewhere");
  const std::string report = into + "/step_1.partial/rank_00001.report";
  std::filesystem::create_directories(elsewhere + "/step_1.partial");
  std::filesystem::create_directory_symlink(into + "/step_2.partial",
                                            elsewhere + "/step_2.partial");
  testing::run_ranks(2, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = state.rank() == 0 ? into : elsewhere,
                                  .async = true,
                                  .when_busy = AsyncWhenBusy::skip});
    const at::Tensor values = at::full({1000}, 3.0F);
    TrainingProgress progress;
    progress.iteration = 1;
    EXPECT_TRUE(saver.save(some_state(values), progress, Config{}, true).path.ends_with("step_1"));
    progress.iteration = 2;
    EXPECT_EQ(saver.save(some_state(values), progress, Config{}, true).path, "");
    if (state.rank() == 0) {
      folder_.write("damaged", "no report");
      std::filesystem::rename(folder("damaged"), report);
    }
    const SaveResult result = saver.save(some_state(values), progress, Config{}, false);
    EXPECT_TRUE(result.last_error.starts_with("rank 0: '" + report + "': ")) << result.last_error;
    saver.finish();
  });
  EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_2"}));
  EXPECT_TRUE(verify_checkpoint(into).empty());
}

/// Both ranks hold a copy; one of them writes it.
TEST_F(CheckpointSaverTest, ADtypeThatCannotBeSavedIsNamedOnAllRanks) {
  const std::string into = folder("complex");
  const auto refused = [&](bool from_the_start, const std::string& part) {
    testing::run_ranks(2,
                       [&](const ParallelState& state) {
                         CheckpointSaver saver(state, {.folder = into});
                         const at::Tensor good = at::full({1000}, 3.0F);
                         const at::Tensor bad = good.to(at::kComplexFloat);
                         TrainingProgress progress;
                         if (!from_the_start) saver.save(some_state(good), progress, Config{});
                         progress.iteration = 1;
                         const auto save = [&] { saver.save(some_state(bad), progress, Config{}); };
                         EXPECT_TRUE(from_the_start ? throws_with<UsageError>(save, part)
                                                    : throws_with<FileError>(save, part));
                       },
                       {.timeout = std::chrono::seconds(5)});
    EXPECT_FALSE(std::filesystem::exists(into + "/step_1.partial"));
  };
  refused(
      true,
      "rank 0: tensor 'w': safetensors: found a tensor of ComplexFloat, allowed: Double, Float");
  refused(false, "rank 0: safetensors: found a tensor of ComplexFloat, allowed: Double");
}

/// A layer of a stage, and a weight that the stages share.
class StageOfOwnModel : public DescribedModule {
 public:
  StageOfOwnModel(const std::string& layer, const ParamDescription& of_shared) {
    register_described_parameter(layer, at::ones({2, 2}), {});
    register_described_parameter("shared", at::ones({3}), of_shared);
    register_buffer("scale", at::ones({2}));
  }
};

TEST_F(CheckpointSaverTest, StagesThatNameDifferentWeightsAlikeAreRefused) {
  const auto save = [&](const ParallelState& state, const std::string& name,
                        const torch::nn::Module& stage) {
    CheckpointSaver saver(state, {.folder = folder(name)});
    saver.save(model_state(stage, state), TrainingProgress(), Config{});
  };
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        const torch::nn::Sequential alike(torch::nn::Linear(3, 3));
        EXPECT_TRUE(throws_with<UsageError>(
            [&] { save(state, "alike", *alike); },
            "'0.weight': found on rank 0 of pipeline stage 0 and on rank 1 of pipeline stage 1"));
        const std::string layer = "layer_" + std::to_string(state.rank());
        const ParamDescription on_all = {.stages = StageCopies::all};
        const ParamDescription tied = {.tie = Tie{.name = "shared"}};
        save(state, "on all", StageOfOwnModel(layer, on_all));
        save(state, "tied", StageOfOwnModel(layer, tied));
        EXPECT_TRUE(throws_with<UsageError>([&] { save(state, "one", StageOfOwnModel(layer, {})); },
                                            "'shared': found on rank 0 of pipeline stage 0"));
        std::vector<StateTensor> twice =
            model_state(StageOfOwnModel("layer_" + std::to_string(state.rank()), on_all), state);
        twice.push_back(twice.front());
        CheckpointSaver saver(state, {.folder = folder("twice")});
        EXPECT_TRUE(
            throws_with<UsageError>([&] { saver.save(twice, TrainingProgress(), Config{}); },
                                    "tensor 'layer_0': found twice on rank 0"));
      },
      {.sizes = {.pipeline = 2}});
  for (const char* const name : {"on all", "tied"})
    EXPECT_EQ(CheckpointReader(folder(name)).manifest().tensors.size(), 4u) << name;
  for (const char* const name : {"alike", "one", "twice"})
    EXPECT_FALSE(has_checkpoint(folder(name))) << name;
}

TEST_F(CheckpointSaverTest, WeightsOfAnyRankThatAreNotFiniteAreNotSaved) {
  for (const bool async : {false, true}) {
    const std::string into = folder("infinite" + std::to_string(async));
    testing::run_ranks(3, [&](const ParallelState& state) {
      CheckpointSaver saver(state, {.folder = into, .keep = 1, .async = async});
      // Each rank holds its own tensor. The optimizer of rank 2 has an infinite square.
      const std::string name = "w" + std::to_string(state.rank());
      const at::Tensor values = at::full({1000}, 1.0F), squares = at::full({1000}, 1.0F);
      const TensorPart whole = {whole_box({1000}), {0, 1000}};
      const std::vector<StateTensor> tensors = {{name, "", whole, values},
                                                {name, "exp_avg_sq", whole, squares}};
      const auto save = [&](int64_t iteration) {
        TrainingProgress progress;
        progress.iteration = iteration;
        saver.save(tensors, progress, Config{});
        saver.finish();
      };
      if (state.rank() == 2) squares[7] = HUGE_VAL;
      save(1);
      if (state.rank() == 2) values[998] = -HUGE_VAL;
      EXPECT_TRUE(throws_with<DivergenceError>(
          [&] { save(2); }, "rank 2: tensor 'w2': found 1 of 1000 elements that are not finite"));
      if (state.rank() == 2) values[998] = 0;
      barrier(state.world(), "looked");
      if (state.rank() == 0) {
        EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_1"}));
      }
      barrier(state.world(), "looked at");
      save(3);
    });
    EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_3"}));
  }
}

/// The master weight is above the middle of two numbers of bf16. Rounded to fp16 it is in the
/// middle, and would go down to 1. The two weights of "other" show which one is read.
TEST_F(CheckpointSaverTest, WeightsOfAnotherNarrowDtypeAreRoundedOnceFromTheMasterWeights) {
  const float master = 1 + 0x1p-8F + 0x1p-23F;
  const TensorPart whole = {whole_box({1}), {0, 1}};
  const auto value = [](float x, at::ScalarType dtype) { return at::full({1}, x).to(dtype); };
  testing::run_ranks(1, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = folder("narrow")});
    saver.save({{"w", "", whole, value(master, at::kHalf)},
                {"w", "master", whole, value(master, at::kFloat)},
                {"other", "", whole, value(3, at::kHalf)},
                {"other", "master", whole, value(5, at::kFloat)}},
               TrainingProgress(), Config{});
  });
  CheckpointReader reader(folder("narrow"));
  const auto loaded = [&](const std::string& name, at::ScalarType dtype) {
    const at::Tensor values = at::zeros({1}, dtype);
    load_state(reader, {{name, "", whole, values}});
    return values.item<double>();
  };
  EXPECT_EQ(loaded("w", at::kBFloat16), 1.0078125);
  EXPECT_EQ(loaded("w", at::kHalf), 1.00390625);
  EXPECT_EQ(loaded("w", at::kFloat), master);
  EXPECT_EQ(loaded("other", at::kBFloat16), 5);
  EXPECT_EQ(loaded("other", at::kHalf), 3);
}

TEST_F(CheckpointSaverTest, OneRunAtATimeHasAFolder) {
  const std::string into = folder("locked");
  testing::run_ranks(2, [&](const ParallelState& state) {
    const RunCheckpoints first(CheckpointConfig{}, into, state);
    EXPECT_TRUE(
        throws_with<FileError>([&] { RunCheckpoints(CheckpointConfig{}, into, state); },
                               "--output: folder '" + into + "' is taken by another run (host "));
    CheckpointConfig field;
    field.save = into;
    EXPECT_TRUE(throws_with<FileError>([&] { RunCheckpoints(field, into, state); },
                                       "checkpoint.save: folder '" + into + "' is taken"));
    EXPECT_TRUE(throws_with<FileError>([&] { FolderLock{into}; },
                                       ", process " + std::to_string(::getpid()) + ")"));
    barrier(state.world(), "end");  // the first rank holds the lock until here
  });
  EXPECT_FALSE(std::filesystem::exists(into));
  // A killed run leaves the file, but not its lock.
  std::filesystem::create_directory(into);
  std::ofstream(into + "/lock") << "host gone, process 1, and more of it";
  const FolderLock lock(into);
  EXPECT_TRUE(throws_with<FileError>([&] { FolderLock{into}; },
                                     "process " + std::to_string(::getpid()) + ")"));
}

// Checkpoints inside it would never be found: it counts as its own newest.
TEST_F(CheckpointSaverTest, ACheckpointsOwnFolderIsNoPlaceToSave) {
  const std::string into = folder("steps");
  testing::run_ranks(2, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = into});
    const std::string path =
        saver.save(some_state(at::ones({10})), TrainingProgress(), Config{}).path;
    CheckpointConfig field;
    field.save = path;
    EXPECT_TRUE(throws_with<FileError>(
        [&] { RunCheckpoints(field, path, state); },
        "checkpoint.save: folder '" + path + "' is a checkpoint itself, allowed: the folder"));
  });
}

}  // namespace
}  // namespace lockstep
