// Saves that fail, on some of the ranks or at an unlucky moment.

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

/// Called by each fsync() of this program, below, with the path of the file; fsync() fails with the
/// errno that it returns.
std::function<int(const std::string& path)> before_fsync;

class FsyncRule {
 public:
  explicit FsyncRule(std::function<int(const std::string& path)> rule) {
    before_fsync = std::move(rule);
  }
  ~FsyncRule() { before_fsync = nullptr; }
  FsyncRule(const FsyncRule&) = delete;
  FsyncRule& operator=(const FsyncRule&) = delete;
};

template <class Condition>
bool reached_within(std::chrono::milliseconds patience, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

std::vector<StateTensor> one_tensor(const at::Tensor& values, const std::string& name = "w") {
  return {{name, "", {whole_box({values.numel()}), {0, values.numel()}}, values}};
}

class FailedSaves : public ::testing::Test {
 protected:
  std::string folder(const std::string& name) const { return folder_.path() / name; }

  TemporaryFolder folder_;
};

/// Rank 0 waits for rank 1's report, which rank 1 cannot write.
TEST_F(FailedSaves, ASaveThatAnotherRankFailedToWriteKeepsNobodyBusy) {
  const std::string into = folder("failed"), elsewhere = folder("elsewhere");
  std::filesystem::create_directories(elsewhere);
  std::filesystem::create_directory_symlink(into + "/step_2.partial",
                                            elsewhere + "/step_2.partial");
  testing::run_ranks(2, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = state.rank() == 0 ? into : elsewhere,
                                  .async = true,
                                  .when_busy = AsyncWhenBusy::skip});
    const at::Tensor values = at::full({1000}, 3.0F);
    TrainingProgress progress;
    progress.iteration = 1;
    EXPECT_TRUE(saver.save(one_tensor(values), progress, Config{}, true).path.ends_with("step_1"));
    progress.iteration = 2;
    SaveResult result;
    for (int tries = 0; result.path.empty() && tries < 500; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      result = saver.save(one_tensor(values), progress, Config{}, true);
    }
    EXPECT_TRUE(result.path.ends_with("step_2")) << result.path;
    EXPECT_TRUE(result.last_error.starts_with("rank 1: '" + elsewhere + "/step_1.partial/"))
        << result.last_error;
    if (result.path.empty()) return;
    saver.finish();
  });
  EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_2"}));
}

/// While it lives, no thread of this process can be started: none has room for such a stack.
class NoNewThread {
 public:
  NoNewThread() {
    ::pthread_attr_init(&usual_);
    ::pthread_getattr_default_np(&usual_);
    pthread_attr_t boundless = {};
    ::pthread_attr_init(&boundless);
    ::pthread_attr_setstacksize(&boundless, size_t{1} << 60);
    EXPECT_EQ(::pthread_setattr_default_np(&boundless), 0);
    ::pthread_attr_destroy(&boundless);
  }
  ~NoNewThread() {
    ::pthread_setattr_default_np(&usual_);
    ::pthread_attr_destroy(&usual_);
  }
  NoNewThread(const NoNewThread&) = delete;
  NoNewThread& operator=(const NoNewThread&) = delete;

 private:
  pthread_attr_t usual_ = {};
};

TEST_F(FailedSaves, ASaveWhoseThreadCannotBeStartedFailsOnAllRanks) {
  for (const bool async : {false, true}) {
    const std::string into = folder(async ? "async" : "sync");
    testing::run_ranks(2, [&](const ParallelState& state) {
      CheckpointSaver saver(state, {.folder = into, .async = async, .copy_in_background = true});
      const std::vector<StateTensor> tensors = one_tensor(at::full({1000}, 3.0F));
      TrainingProgress progress;
      const auto save = [&](int64_t iteration) {
        progress.iteration = iteration;
        saver.save(tensors, progress, Config{});
        saver.finish_copy();
        saver.finish();
      };
      save(1);
      {
        std::optional<NoNewThread> none;  // for all ranks
        if (state.rank() == 1) none.emplace();
        EXPECT_TRUE(throws_with<FileError>([&] { save(2); },
                                           "rank 0: the thread that writes cannot be started: "
                                           "Resource temporarily unavailable"));
      }
      save(2);
    });
    EXPECT_EQ(complete_checkpoints(into),
              (std::vector<std::string>{into + "/step_2", into + "/step_1"}));
  }
}

/// Rank 1 cannot write step 1, and then rank 0 cannot make a folder for step 2.
TEST_F(FailedSaves, AFailureIsToldByASaveThatFailsToo) {
  const std::string into = folder("both"), elsewhere = folder("elsewhere");
  std::filesystem::create_directories(elsewhere);
  std::filesystem::create_directory_symlink(into + "/step_3.partial",
                                            elsewhere + "/step_3.partial");
  testing::run_ranks(2, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = state.rank() == 0 ? into : elsewhere, .async = true});
    const std::vector<StateTensor> tensors = one_tensor(at::full({1000}, 3.0F));
    TrainingProgress progress;
    progress.iteration = 1;
    saver.save(tensors, progress, Config{});
    if (state.rank() == 0) folder_.write("both/step_2", "a file");
    progress.iteration = 2;
    const auto save = [&] { saver.save(tensors, progress, Config{}); };
    EXPECT_TRUE(throws_with<FileError>(
        save, "; the save before this one failed: rank 1: '" + elsewhere + "/step_1.partial/"));
    EXPECT_TRUE(throws_with<FileError>(save, "rank 0: checkpoint '" + into + "/step_2': found"));
    progress.iteration = 3;
    EXPECT_EQ(saver.save(tensors, progress, Config{}).last_error, "");
    saver.finish();
  });
  EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_3"}));
}

TEST_F(FailedSaves, ASaveThatFailsFailsOnAllRanksAndLeavesTheLastOne) {
  const std::string into = folder("failing");
  testing::run_ranks(3, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = into});
    const at::Tensor values = at::full({1000}, 3.0F);
    TrainingProgress progress;
    progress.iteration = 1;
    saver.save(one_tensor(values), progress, Config{});
    if (state.rank() == 0) {
      std::filesystem::remove(into + "/latest");
      std::filesystem::create_directories(into + "/latest/in the way");
    }
    progress.iteration = 2;
    EXPECT_TRUE(throws_with<FileError>([&] { saver.save(one_tensor(values), progress, Config{}); },
                                       "rank 0: '" + into + "/latest': found no regular"));
    if (state.rank() == 0) std::filesystem::remove_all(into + "/latest");
    progress.iteration = 3;
    saver.save(one_tensor(values), progress, Config{});
  });
  EXPECT_EQ(complete_checkpoints(into),
            (std::vector<std::string>{into + "/step_3", into + "/step_1"}));
  EXPECT_FALSE(std::filesystem::exists(into + "/step_2.partial"));
}

/// As on a full disk, which the loop needs for its metrics before the next save is due.
TEST_F(FailedSaves, AnAsynchronousSaveThatFailsLeavesNoShard) {
  const std::string into = folder("half"), shard = into + "/step_1.partial/rank_00000.safetensors";
  std::atomic<bool> failed = false;
  const FsyncRule full([&](const std::string& path) {
    if (!path.ends_with("/step_1.partial/rank_00000.safetensors")) return 0;
    failed = true;
    return ENOSPC;
  });
  testing::run_ranks(1, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = into, .async = true});
    const at::Tensor values = at::full({1000}, 3.0F);
    TrainingProgress progress;
    progress.iteration = 1;
    saver.save(one_tensor(values), progress, Config{});
    EXPECT_TRUE(reached_within(std::chrono::seconds(30),
                               [&] { return failed && !std::filesystem::exists(shard); }));
    EXPECT_TRUE(std::filesystem::exists(into + "/step_1.partial"));
    progress.iteration = 2;
    EXPECT_EQ(saver.save(one_tensor(values), progress, Config{}).last_error,
              "rank 0: '" + shard + "' cannot be written: No space left on device");
    saver.finish();
  });
  EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_2"}));
}

/// Rank 0 fails while rank 1 waits for its disk. If rank 0 could save the step again meanwhile,
/// rank 1's late report on the failed save would count for the new one.
TEST_F(FailedSaves, TheSameStepIsSavedAgainOnceNoRankWritesTheFailedSave) {
  const std::string into = folder("again"), partial = into + "/step_1.partial";
  std::atomic<int> configs = 0, shards = 0;
  std::atomic<bool> told = false;
  const FsyncRule slow([&](const std::string& path) {
    if (path.ends_with("/step_1.partial/config.textproto") && ++configs == 1) {
      reached_within(std::chrono::seconds(30), [&] { return shards > 0; });
      return ENOSPC;
    }
    if (path.ends_with("/step_1.partial/rank_00001.safetensors")) {
      if (++shards == 1)
        reached_within(std::chrono::seconds(2),
                       [&] { return told && std::filesystem::exists(partial); });
      else  // a late report would complete the checkpoint without this shard
        reached_within(std::chrono::milliseconds(500),
                       [&] { return std::filesystem::exists(into + "/step_1"); });
    }
    return 0;
  });
  testing::run_ranks(2, [&](const ParallelState& state) {
    CheckpointSaver saver(state, {.folder = into});
    const at::Tensor values = at::full({1000}, 1.0F);
    TrainingProgress progress;
    progress.iteration = 1;
    const auto save = [&] {  // each rank has its own tensor
      const std::string name = "w" + std::to_string(state.rank());
      saver.save(one_tensor(values, name), progress, Config{});
    };
    EXPECT_TRUE(throws_with<FileError>(
        save,
        "rank 0: '" + partial + "/config.textproto' cannot be written: No space left on device"));
    if (state.rank() == 0) told = true;
    values.fill_(2);
    save();
  });
  EXPECT_EQ(shards, 2);
  EXPECT_EQ(complete_checkpoints(into), (std::vector<std::string>{into + "/step_1"}));
  EXPECT_TRUE(verify_checkpoint(into).empty());
  CheckpointReader reader(into);
  float value = 0;
  reader.read(*reader.find("w1"), {whole_box({1000}), {999, 1000}},
              reinterpret_cast<char*>(&value));
  EXPECT_EQ(value, 2);
}

/// The disk of rank 1 answers only after rank 0 has learned of its own failure.
TEST_F(FailedSaves, ADiskThatHangsKeepsTheOtherRanksNoLongerThanTheTimeout) {
  const std::string into = folder("hangs");
  std::atomic<int> shards = 0;
  std::atomic<bool> told = false, told_in_time = false;
  const FsyncRule hangs([&](const std::string& path) {
    if (path.ends_with("/rank_00001.safetensors")) {
      ++shards;
      told_in_time = reached_within(std::chrono::seconds(60), [&] { return told.load(); });
    }
    if (!path.ends_with("/config.textproto")) return 0;
    reached_within(std::chrono::seconds(30), [&] { return shards > 0; });
    return ENOSPC;
  });
  testing::run_ranks(2,
                     [&](const ParallelState& state) {
                       CheckpointSaver saver(state, {.folder = into});
                       const std::vector<StateTensor> tensors =
                           one_tensor(at::full({1000}, 1.0F), "w" + std::to_string(state.rank()));
                       EXPECT_TRUE(throws_with<FileError>(
                           [&] { saver.save(tensors, TrainingProgress(), Config{}); },
                           "/config.textproto' cannot be written: No space left on device"));
                       if (state.rank() == 0) told = true;
                     },
                     {.timeout = std::chrono::seconds(4)});
  EXPECT_TRUE(told_in_time);
  EXPECT_FALSE(has_checkpoint(into));
}

}  // namespace
}  // namespace lockstep

/// In the place of libc's.
extern "C" int fsync(int file) {
  int error = 0;
  if (lockstep::before_fsync)
    error = lockstep::before_fsync(
        std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file)));
  if (error == 0) return static_cast<int>(::syscall(SYS_fsync, file));
  errno = error;
  return -1;
}
