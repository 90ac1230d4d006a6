// Consecutive asynchronous saves from a device: the second is copied while the first is still being
// written, and is written after it.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/temporary_folder.h"

namespace lockstep::testing {
namespace {

/// Two ranks save three times. Rank 0 waits for rank 1's report on the first save, which goes to
/// another folder until the test moves it.
class DeviceSaves : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  DeviceSaves() {
    std::filesystem::create_directories(elsewhere_ + "/step_1.partial");
    for (const char* const later : {"/step_2.partial", "/step_3.partial"})
      std::filesystem::create_directory_symlink(into_ + later, elsewhere_ + later);
  }

  /// Returns what each save told rank 0 about the previous one. `report` moves the report of the
  /// first save to its place, once both ranks have returned from the second save or after a minute.
  std::vector<std::string> save_three_times(const std::function<void()>& report) {
    std::vector<std::string> told;
    std::jthread reporting([&] {
      for (int i = 0; i < 6000 && (returned_ < 2 || !std::filesystem::exists(elsewhere_ + report_));
           ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      returned_before_ = returned_;
      report();
    });
    run_device_ranks(2, [&](const ParallelState& state) {
      const bool first = state.rank() == 0;
      CheckpointSaver saver(state, {.folder = first ? into_ : elsewhere_, .async = true});
      const at::Tensor values = at::empty({kNumel}, state.device());
      for (int64_t iteration = 1; iteration <= 3; ++iteration) {
        values.fill_(static_cast<float>(iteration));
        TrainingProgress progress;
        progress.iteration = iteration;
        const std::vector<StateTensor> tensors = {
            {"w", "", {whole_box({kNumel}), {0, kNumel}}, values}};
        const SaveResult result = saver.save(tensors, progress, {}, /*may_skip=*/true);
        if (first) told.push_back(result.last_error);
        values.fill_(-1);
        if (iteration == 2) ++returned_;
      }
      saver.finish();
    });
    reporting.join();
    return told;
  }

  /// Moves the file `from` to where rank 0 waits for rank 1's report on the first save.
  void move_report(const std::string& from) const {
    std::error_code error;
    std::filesystem::rename(from, into_ + report_, error);
    EXPECT_FALSE(error) << from << ": " << error.message();
  }

  std::vector<std::string> complete_steps() const {
    std::vector<std::string> names;
    for (const std::string& path : complete_checkpoints(into_))
      names.push_back(std::filesystem::path(path).filename());
    return names;
  }

  float saved_value(int64_t step) const {
    CheckpointReader reader(into_ + "/" + step_name(step));
    float value = 0;
    reader.read(*reader.find("w"), {whole_box({kNumel}), {kNumel - 1, kNumel}},
                reinterpret_cast<char*>(&value));
    return value;
  }

  static constexpr int64_t kNumel = 1000;
  TemporaryFolder folder_;
  std::string into_ = folder_.path() / "saved", elsewhere_ = folder_.path() / "elsewhere";
  std::string report_ = "/step_1.partial/rank_00001.report";
  std::atomic<int> returned_ = 0;  ///< ranks that have returned from the second save
  int returned_before_ = -1;       ///< returned_ before the report
};

TEST_F(DeviceSaves, TheSecondIsCopiedWhileTheFirstIsBeingWritten) {
  const auto told = save_three_times([&] { move_report(elsewhere_ + report_); });
  EXPECT_EQ(returned_before_, 2);
  EXPECT_EQ(told, std::vector<std::string>(3, ""));
  const auto waits = device_counts(1).waits_by;
  EXPECT_TRUE(waits.contains("synchronize event"));
  EXPECT_FALSE(waits.contains("synchronize event elsewhere"));
  EXPECT_EQ(complete_steps(), (std::vector<std::string>{"step_3", "step_2", "step_1"}));
  for (const int64_t step : {2, 3}) EXPECT_EQ(saved_value(step), static_cast<float>(step));
}

TEST_F(DeviceSaves, TheFirstMayFailWhileTheSecondWaitsBehindIt) {
  const auto told = save_three_times([&] { move_report(folder_.write("damaged", "no report")); });
  EXPECT_EQ(returned_before_, 2);
  ASSERT_EQ(told.size(), 3U);
  EXPECT_EQ(told[1], "") << "not known yet";
  EXPECT_TRUE(told[2].starts_with("rank 0: '" + into_ + report_ + "': ")) << told[2];
  EXPECT_EQ(complete_steps(), (std::vector<std::string>{"step_3", "step_2"}));
  for (const int64_t step : {2, 3}) EXPECT_EQ(saved_value(step), static_cast<float>(step));
}

}  // namespace
}  // namespace lockstep::testing
