#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

// What every rank in a world of 64 communicates in a step, computed in one process.

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::TemporaryFolder;

const ParallelSizes kWorld = {.world_size = 64};

class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() : path_(folder_.write("text", testing::synthetic_text())) {}

  /// Set-up, one step, one validation.
  void run(const ParallelState& state, const std::vector<std::string>& overrides = {},
           bool validate = true) const {
    std::vector<std::string> all = {"data.path=" + path_, "train.micro_batch_size=1",
                                    "train.eval_iters=1", "ddp.bucket_size=500",
                                    "parallel.desync_check_interval=1"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    Trainer trainer(parse_config("model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 "
                                 "num_query_groups: 2 ffn_hidden_size: 24 seq_length: 16 }",
                                 "test", all),
                    state);
    trainer.train_step();
    if (validate) trainer.validate();
  }

 private:
  TemporaryFolder folder_;
  std::string path_;
};

TEST_F(VerifyTest, AllRanksOfAStepDoTheSame) {
  EXPECT_EQ(verify_collectives(kWorld, [&](const ParallelState& state) { run(state); }),
            std::nullopt);
}

TEST_F(VerifyTest, AllRanksOfAStepOfTheDistributedOptimizerDoTheSame) {
  for (const char* overlap : {"true", "false"})
    EXPECT_EQ(verify_collectives(kWorld,
                                 [&](const ParallelState& state) {
                                   run(state, {"ddp.use_distributed_optimizer=true",
                                               std::string("ddp.overlap_param_gather=") + overlap});
                                 }),
              std::nullopt);
}

TEST_F(VerifyTest, ARankWithOtherBucketsIsFoundAndNamed) {
  const auto difference = verify_collectives(kWorld, [&](const ParallelState& state) {
    run(state, {state.rank() == 13 ? "ddp.bucket_size=2000" : "ddp.bucket_size=500"});
  });
  ASSERT_TRUE(difference.has_value());
  EXPECT_NE(difference->find("rank 13: all_reduce (sum) of bucket 0 "), std::string::npos);
  EXPECT_NE(difference->find("rank 12: all_reduce (sum) of bucket 0 "), std::string::npos);
}

TEST_F(VerifyTest, ARankThatLeavesOutACollectiveIsFoundAndNamed) {
  const auto difference = verify_collectives(
      kWorld, [&](const ParallelState& state) { run(state, {}, /*validate=*/state.rank() != 13); });
  ASSERT_TRUE(difference.has_value());
  EXPECT_NE(difference->find("rank 13: has not reached it"), std::string::npos) << *difference;
}

TEST_F(VerifyTest, APlanningRankDoesWhatARealOneDoes) {
  for (const char* distributed : {"false", "true"}) {
    const std::vector<std::string> overrides = {std::string("ddp.use_distributed_optimizer=") +
                                                distributed};
    CollectiveLog real, planned;
    testing::run_ranks(2, [&](const ParallelState& state) { run(state, overrides); },
                       {.log = &real});
    run(ParallelState::planning_rank({.world_size = 2}, 1,
                                     [&](const CollectiveRecord& call) { planned.add(call); }),
        overrides);
    EXPECT_EQ(planned.of_rank(1), real.of_rank(1));
  }
}

}  // namespace
}  // namespace lockstep
