#include "lockstep/training/schedule_notes.h"

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"

namespace lockstep {
namespace {

using Notes = std::vector<std::string>;

Notes notes(const std::vector<std::string>& fields) {
  const Config config = parse_config("train { micro_batch_size: 1 eval_iters: 0 }", "test", fields);
  return schedule_notes(config, BatchSchedule(config.train, 1));
}

TEST(ScheduleNotes, BatchesOfOneSizeAreNotExplained) {
  EXPECT_EQ(notes({"train.global_batch_size=4", "optimizer.lr_warmup_iters=5"}), Notes());
  EXPECT_EQ(notes({"optimizer.lr_decay_iters=9223372036854775807"}), Notes());
  EXPECT_EQ(notes({"train.step_batch_size_schedule=0:4", "optimizer.lr_warmup_iters=5"}), Notes());
  EXPECT_EQ(
      notes({"train.train_iters=12", "optimizer.lr_decay_iters=11", "optimizer.min_lr=1e-4"}),
      (Notes{"optimizer.lr_decay_iters is 11 and train.train_iters 12: after iteration 11 the "
             "learning rate stays at optimizer.min_lr (0.0001)"}));
}

// The numbers come from adding up batches one by one.
TEST(ScheduleNotes, AWarmUpAndADecayOfGrowingBatchesTakeLonger) {
  const auto told = [](std::vector<std::string> fields) {
    fields.insert(fields.end(), {"train.global_batch_size=1024", "train.train_iters=500",
                                 "train.rampup_batch_size=32 32 100000"});
    return notes(fields);
  };
  EXPECT_EQ(told({}), Notes()) << "such a decay ends with the run";
  EXPECT_EQ(told({"optimizer.lr_warmup_iters=50"}),
            (Notes{"optimizer.lr_warmup_iters = 50 counts batches of 1024: with "
                   "train.rampup_batch_size the warm-up takes 342 iterations"}));
  EXPECT_EQ(
      told({"optimizer.lr_warmup_iters=50", "optimizer.lr_decay_iters=500"}),
      (Notes{"optimizer.lr_warmup_iters = 50 and optimizer.lr_decay_iters = 500 count batches "
             "of 1024: with train.rampup_batch_size the warm-up takes 342 iterations and the "
             "decay takes 810 iterations"}));
  EXPECT_EQ(told({"optimizer.lr_decay_style=constant", "optimizer.lr_decay_iters=500"}), Notes());
}

TEST(ScheduleNotes, ADecayOfShrinkingBatchesEndsEarly) {
  const auto told = [](std::vector<std::string> fields) {
    fields.insert(fields.end(),
                  {"train.train_iters=2000", "train.step_batch_size_schedule=0:64 64000:32"});
    return notes(fields);
  };
  EXPECT_EQ(told({}), Notes()) << "such a decay ends with the run";
  EXPECT_EQ(told({"optimizer.lr_decay_iters=2000"}),
            (Notes{"optimizer.lr_decay_iters is 2000 and train.train_iters 2000: after iteration "
                   "1000 the learning rate stays at optimizer.min_lr (0)",
                   "optimizer.lr_decay_iters = 2000 counts batches of 32: with "
                   "train.step_batch_size_schedule the decay takes 1000 iterations"}));
}

}  // namespace
}  // namespace lockstep
