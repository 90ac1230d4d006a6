#include "lockstep/core/step_clock.h"

#include <gtest/gtest.h>

#include <thread>

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPause(3);

void pause() { std::this_thread::sleep_for(kPause); }

/// A sleep lasts at least as long as requested; all other times in the test are exactly 0.
TEST(StepClock, TimeCountsForTheInnermostPart) {
  StepClock clock(c10::kCPU);
  clock.begin();
  {
    const InPart forward(&clock, StepPart::forward);
    pause();
    {
      const InPart data(&clock, StepPart::data);
      pause();
    }
    const InPart communication(&clock, StepPart::communication);
    pause();
  }
  pause();
  clock.end();
  const StepTimes times = clock.take();
  for (const StepPart part :
       {StepPart::forward, StepPart::data, StepPart::communication, StepPart::other})
    EXPECT_GE(times[part], 3) << name_of(part);
  EXPECT_EQ(times[StepPart::backward], 0);
  EXPECT_EQ(times[StepPart::optimizer], 0);
  EXPECT_GE(times.total(), 12);
  EXPECT_FALSE(clock.has_ended_step());
}

TEST(StepClock, OtherThreadsDoNotCount) {
  StepClock clock(c10::kCPU);
  clock.begin();
  std::thread([&] {
    const InPart part(&clock, StepPart::backward, /*on_device=*/true);
    pause();
  }).join();
  clock.end();
  const StepTimes times = clock.take();
  EXPECT_EQ(times[StepPart::backward], 0);
  EXPECT_GE(times[StepPart::other], 3);
}

TEST(StepClock, NothingIsMeasuredOutsideOfAStep) {
  StepClock clock(c10::kCPU);
  { const InPart part(&clock, StepPart::forward); }
  { const InPart part(nullptr, StepPart::forward); }
  clock.end();
  EXPECT_FALSE(clock.has_ended_step());
  clock.begin();
  clock.end();
  EXPECT_EQ(clock.take()[StepPart::forward], 0);
}

TEST(StepClock, AStepThatIsGivenUpLeavesNothing) {
  StepClock clock(c10::kCPU);
  clock.begin();
  {
    const InPart part(&clock, StepPart::forward);
    pause();
    clock.abandon();
  }
  EXPECT_FALSE(clock.has_ended_step());
  clock.begin();
  const InPart part(&clock, StepPart::backward);
  clock.begin();  // without an end, as after an exception
  clock.end();
  const StepTimes times = clock.take();
  EXPECT_EQ(times[StepPart::forward], 0);
  EXPECT_EQ(times[StepPart::backward], 0);
}

TEST(StepClock, AResetDropsWhatWasNotTaken) {
  StepClock clock(c10::kCPU);
  clock.begin();
  clock.end();
  clock.begin();
  clock.reset();
  EXPECT_FALSE(clock.has_ended_step());
  clock.end();
  EXPECT_FALSE(clock.has_ended_step());
}

TEST(StepClock, StepsAreTakenInTheirOrder) {
  StepClock clock(c10::kCPU);
  for (const StepPart part : {StepPart::forward, StepPart::data}) {
    clock.begin();
    {
      const InPart now(&clock, part);
      pause();
    }
    clock.end();
  }
  const StepTimes first = clock.take(), second = clock.take();
  EXPECT_GE(first[StepPart::forward], 3);
  EXPECT_EQ(first[StepPart::data], 0);
  EXPECT_GE(second[StepPart::data], 3);
  EXPECT_EQ(second[StepPart::forward], 0);
}

}  // namespace
}  // namespace lockstep
