// Runs that went back after a spike, and are then stopped and resumed, or killed and restarted:
// they report the same as an undisturbed run.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <utility>

#include "lockstep/tests/training/spike_runs.h"

namespace lockstep {
namespace {

using testing::SpikeOutcome;
using testing::SpikeRunEvents;
using testing::Told;
using Fields = testing::SpikeFields;

constexpr int64_t kInterval = 3;

struct Layout {
  int64_t world;
  Fields fields;
};

const std::vector<Layout> kLayouts = {
    {1, {}},
    {3, {"ddp.use_distributed_optimizer=true", "checkpoint.async_save=true"}},
    {2,
     {"ddp.use_distributed_optimizer=true",
      "ddp.data_parallel_sharding_strategy=optim_grads_params", "checkpoint.async_save=true"}},
    {4,
     {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
      "parallel.pipeline_model_parallel_size=2"}},
    {2, {"lora.rank=3", "parallel.tensor_model_parallel_size=2", "checkpoint.async_save=true"}}};

/// A single spike, in iteration 26.
class SpikeRecoveryTest : public testing::SpikeRuns {
 protected:
  SpikeRecoveryTest() { wild_ = folder_.write("rare", text(240, {31})); }

  static Fields rewinding(const Layout& layout) {
    Fields fields = {"train.on_spike=rewind", "train.train_iters=33", "optimizer.lr=0.001",
                     fmt::format("checkpoint.save_interval={}", kInterval)};
    fields.insert(fields.end(), layout.fields.begin(), layout.fields.end());
    return fields;
  }

  /// Resumes from the checkpoint in `folder`.
  Config resumed(const Layout& layout, const std::string& folder) const {
    Fields fields = rewinding(layout);
    fields.push_back("checkpoint.load=" + folder);
    return config(wild_, fields);
  }

  /// The number of iterations reported up to and including the first spike that the run went back
  /// from.
  static size_t told_until_first_return(const std::vector<Told>& told) {
    for (size_t i = 1; i < told.size(); ++i)
      if (told[i].iteration <= told[i - 1].iteration) return i;
    ADD_FAILURE() << "the run did not go back";
    return 1;
  }

  static std::vector<Told> last_of(const std::vector<Told>& told, size_t count) {
    return {told.end() - static_cast<std::ptrdiff_t>(std::min(count, told.size())), told.end()};
  }
};

TEST_F(SpikeRecoveryTest, AResumedRunKnowsWhatWasLeftOut) {
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    const Layout& layout = kLayouts[i];
    SCOPED_TRACE(fmt::format("{} ranks: {}", layout.world, fmt::join(layout.fields, " ")));
    const SpikeOutcome all =
        train(wild(rewinding(layout)), layout.world, at(fmt::format("whole_{}", i)));
    ASSERT_EQ(all.end, RunEnd::done);
    const size_t until = told_until_first_return(all.told);
    // Before and after the first checkpoint that records which samples were left out.
    for (const size_t more : {1, 4}) {
      const std::string folder = at(fmt::format("resumed_{}_{}", i, more));
      std::vector<Told> told =
          train(wild(rewinding(layout)), layout.world, folder, {.stopped_after = until + more})
              .told;
      ASSERT_EQ(told.size(), until + more);
      const SpikeOutcome rest = train(resumed(layout, folder), layout.world, folder);
      EXPECT_EQ(rest.end, RunEnd::done);
      told.insert(told.end(), rest.told.begin(), rest.told.end());
      EXPECT_EQ(told, all.told) << more;
    }
  }
}

TEST_F(SpikeRecoveryTest, AJobThatIsStartedAgainGoesBackAgain) {
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    const Layout& layout = kLayouts[i];
    SCOPED_TRACE(fmt::format("{} ranks: {}", layout.world, fmt::join(layout.fields, " ")));
    const Config config = wild(rewinding(layout));
    const SpikeOutcome all = train(config, layout.world, at(fmt::format("unharmed_{}", i)));
    const size_t until = told_until_first_return(all.told);
    for (const size_t more : {0, 5}) {
      const std::string folder = at(fmt::format("killed_{}_{}", i, more));
      const std::vector<Told> told =
          train(config, layout.world, folder, {.start = {"a job", 0}, .killed_after = until + more})
              .told;
      ASSERT_EQ(told.size(), until + more);
      const SpikeOutcome rest = train(config, layout.world, folder, {.start = {"a job", 1}});
      EXPECT_EQ(rest.end, RunEnd::done);
      EXPECT_EQ(rest.told, last_of(all.told, rest.told.size())) << more;
      EXPECT_GT(rest.told.front().iteration, kInterval) << "from the start";
    }
  }
}

Fields with_copies(Fields fields) {
  fields.insert(fields.end(), {"train.elastic=dp", "checkpoint.in_memory_replicas=1"});
  return fields;
}

/// Only the last reported step is repeated. Saves are made in the foreground: the end of a run
/// drops one in the background, and the run would then go back further.
TEST_F(SpikeRecoveryTest, RanksThatKeepCopiesLoseNoStepAndGoBackAgain) {
  for (size_t i = 1; i < kLayouts.size(); ++i) {
    Layout layout = kLayouts[i];
    std::erase(layout.fields, "checkpoint.async_save=true");
    SCOPED_TRACE(fmt::format("{} ranks: {}", layout.world, fmt::join(layout.fields, " ")));
    const Config config = wild(with_copies(rewinding(layout)));
    const SpikeOutcome all =
        train(wild(rewinding(layout)), layout.world, at(fmt::format("unharmed_{}", i)));
    const size_t until = told_until_first_return(all.told);
    for (const size_t more : {0, 3}) {
      const std::string folder = at(fmt::format("copied_{}_{}", i, more));
      std::vector<StateCopies> copies(static_cast<size_t>(layout.world));
      train(config, layout.world, folder,
            {.start = {"a job", 0}, .killed_after = until + more, .copies = &copies});
      copies[i % copies.size()].clear();
      const SpikeOutcome rest =
          train(config, layout.world, folder, {.start = {"a job", 1}, .copies = &copies});
      EXPECT_EQ(rest.end, RunEnd::done);
      EXPECT_EQ(rest.told, last_of(all.told, all.told.size() - (until + more) + 1)) << more;
    }
  }
}

/// A copy made between the two spikes knows of the first.
TEST_F(SpikeRecoveryTest, ASecondSpikeEndsARunThatHasResumedFromACopy) {
  wild_ = folder_.write("two", text(240, {77, 101}));
  Fields fields = with_copies(rewinding({2, {}}));
  fields.emplace_back("checkpoint.save_interval=12");
  const SpikeOutcome all = train(wild(fields), 2, at("twice"));
  ASSERT_EQ(all.end, RunEnd::diverged);
  const size_t until = told_until_first_return(all.told);
  std::vector<StateCopies> copies(2);
  train(wild(fields), 2, at("again"),
        {.start = {"a job", 0}, .killed_after = until + 2, .copies = &copies});
  copies[0].clear();
  const SpikeOutcome rest =
      train(wild(fields), 2, at("again"), {.start = {"a job", 1}, .copies = &copies});
  EXPECT_EQ(rest.end, RunEnd::diverged);
  EXPECT_EQ(rest.divergence, all.divergence);
  EXPECT_EQ(rest.told, last_of(all.told, all.told.size() - until - 1));
}

/// The one that it was fine-tuned from has the name of the one that it goes back to.
TEST_F(SpikeRecoveryTest, ARunGoesBackToAStepThatItHasSavedAnew) {
  for (const int64_t world : {1, 2}) {
    const Layout layout = {world, {}};
    const SpikeOutcome all =
        train(wild(rewinding(layout)), world, at(fmt::format("apart_{}", world)));
    const size_t until = told_until_first_return(all.told);
    const std::string folder = at(fmt::format("shared_{}", world));
    const std::string step = fmt::format("{}/step_{}", folder, all.told[until].iteration - 1);
    std::filesystem::create_directories(folder);
    std::filesystem::copy(base_ + "/step_30", step, std::filesystem::copy_options::recursive);
    Fields fields = rewinding(layout);
    fields.push_back("checkpoint.load=" + step);
    EXPECT_EQ(train(wild(fields), world, folder).told, all.told) << world;
  }
}

/// Even if another run has left a checkpoint of the same step in the folder.
TEST_F(SpikeRecoveryTest, AfterASaveThatFailedTheRunGoesBackFurther) {
  for (const char* const async : {"checkpoint.async_save=false", "checkpoint.async_save=true"})
    for (const int64_t world : {1, 2}) {
      const Layout layout = {world, {async}};
      SCOPED_TRACE(fmt::format("{} ranks: {}", world, async));
      const std::string name = fmt::format("failed_{}_{}", world, async);
      const Config config = wild(rewinding(layout));
      const SpikeOutcome all = train(config, world, at(world == 1 ? name : "whole_" + name));
      const size_t until = told_until_first_return(all.told);
      const int64_t saved = all.told[until].iteration - 1;
      ASSERT_GT(saved, kInterval);
      const std::string obstacle = at(name) + "/latest.partial";
      SpikeRunEvents events;
      bool is_first = true;
      events.iteration = [&](const IterationMetrics& m) {
        if (m.iteration != saved || !std::exchange(is_first, false)) return;
        std::filesystem::create_directories(obstacle);
      };
      events.going_back = [&] { std::filesystem::remove_all(obstacle); };
      const SpikeOutcome found = train(config, world, at(name), events);
      EXPECT_EQ(found.end, RunEnd::done);
      ASSERT_GT(found.told.size(), until);
      EXPECT_EQ(found.told[until].iteration, saved - kInterval + 1);
    }
}

}  // namespace
}  // namespace lockstep
