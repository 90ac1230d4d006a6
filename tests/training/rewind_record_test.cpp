// A run that goes back leaves no copy in the memory of ranks that take no part in it then.

#include "lockstep/checkpoint/rewind_record.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

TEST(RewindRecordTest, IsOfOneJobAndOfItsLastRewind) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  EXPECT_EQ(first_copy_that_counts(path, "a job"), CopyId());
  record_rewind(path, "a job", {1, 30});
  record_rewind(path, "a job", {2, 4});
  EXPECT_EQ(first_copy_that_counts(path, "a job"), (CopyId{2, 4}));
  EXPECT_EQ(first_copy_that_counts(path, "another job"), CopyId());
  EXPECT_EQ(folder.read("rewound"), "2 4 a job\n");
  for (const char* const damaged : {"", "2", "2 4", "2 4 a job", "2 x a job\n", "-1 4 a job\n"}) {
    folder.write("rewound", damaged);
    EXPECT_TRUE(throws_with<FileError>([&] { first_copy_that_counts(path, "a job"); },
                                       "'" + path + "/rewound': found '" + damaged +
                                           "', allowed: a round, the number of a copy and a job"));
  }
  std::filesystem::remove(folder.path() / "rewound");
  std::filesystem::create_directory(folder.path() / "rewound");
  EXPECT_THROW(record_rewind(path, "a job", {}), FileError);
  EXPECT_THROW(first_copy_that_counts(path, "a job"), FileError);
}

/// A job of three ranks, of which each has copies of all parts.
class AbandonedCopiesTest : public ::testing::Test {
 protected:
  AbandonedCopiesTest() {
    config_ = parse_config(
        "model { num_layers: 1 hidden_size: 8 num_attention_heads: 2 ffn_hidden_size: 8 "
        "seq_length: 8 vocab_size: 257 } "
        "train { global_batch_size: 6 micro_batch_size: 1 train_iters: 20 eval_iters: 0 }",
        "test",
        {"data.path=" + folder_.write("text", testing::synthetic_text()), "train.elastic=dp",
         "checkpoint.in_memory_replicas=2", "checkpoint.save_interval=2"});
  }

  using Body = std::function<void(Trainer&, RunCheckpoints&)>;

  /// The ranks of a round, which resume from `from`; empty: from the start.
  void run(int64_t round, std::vector<StateCopies>& copies, const std::string& from,
           const Body& body, const std::string& note = "") {
    testing::run_ranks(static_cast<int64_t>(copies.size()), [&](const ParallelState& state) {
      RunCheckpoints checkpoints(config_.checkpoint, saved(), state, {"job", round},
                                 &copies[static_cast<size_t>(state.rank())]);
      Trainer trainer(config_, state, !checkpoints.will_load());
      EXPECT_EQ(checkpoints.load(trainer).value_or(""), from) << checkpoints.note();
      EXPECT_NE(checkpoints.note().find(note), std::string::npos) << checkpoints.note();
      body(trainer, checkpoints);
    });
  }

  static void train(Trainer& trainer, RunCheckpoints& checkpoints, int64_t until) {
    while (trainer.iteration() < until) {
      trainer.train_step();
      checkpoints.after_iteration(trainer, /*last=*/false);
    }
  }

  std::string saved() const { return folder_.path() / "saved"; }
  std::string step(int64_t iteration) const { return saved() + fmt::format("/step_{}", iteration); }

  /// Two rounds, of which the second is one rank's. Returns the copies of a rank that waits then.
  std::vector<StateCopies> copies_of_waiting_rank(const Body& of_second) {
    std::vector<StateCopies> of_first(3), of_alone(1), waiting(1);
    run(0, of_first, "",
        [](Trainer& trainer, RunCheckpoints& checkpoints) { train(trainer, checkpoints, 3); });
    waiting[0] = std::move(of_first[1]);
    of_alone[0] = std::move(of_first[0]);
    run(1, of_alone, RunCheckpoints::kInMemory, of_second);
    return waiting;
  }

  TemporaryFolder folder_;
  Config config_;
};

constexpr const char* kMemory = RunCheckpoints::kInMemory;

TEST_F(AbandonedCopiesTest, ARankThatWaitsKeepsItsCopyForTheNextLoss) {
  auto waiting = copies_of_waiting_rank([](Trainer&, RunCheckpoints&) {});
  run(2, waiting, kMemory,
      [](Trainer& trainer, RunCheckpoints&) { EXPECT_EQ(trainer.iteration(), 3); });
}

TEST_F(AbandonedCopiesTest, ARankThatWaitsWhileTheRunGoesBackDoesNotBringItBack) {
  auto waiting = copies_of_waiting_rank([&](Trainer& trainer, RunCheckpoints& checkpoints) {
    EXPECT_EQ(checkpoints.go_back(trainer), step(2));
  });
  waiting.resize(2);
  run(2, waiting, step(2), [&](Trainer& trainer, RunCheckpoints& checkpoints) {
    EXPECT_EQ(trainer.iteration(), 2);
    train(trainer, checkpoints, 3);
  });
  waiting.erase(waiting.begin());
  run(3, waiting, kMemory, [](Trainer& trainer, RunCheckpoints& checkpoints) {
    EXPECT_EQ(trainer.iteration(), 3);
    train(trainer, checkpoints, 4);
  });
}

TEST_F(AbandonedCopiesTest, NoCopyCountsIfTheRecordIsDamaged) {
  auto waiting = copies_of_waiting_rank([](Trainer&, RunCheckpoints&) {});
  folder_.write("saved/rewound", "x");
  run(
      2, waiting, step(2), [](Trainer&, RunCheckpoints&) {},
      "/rewound': found 'x', allowed: a round, the number of a copy and a job; the run does not "
      "resume from the ranks' memory");
}

}  // namespace
}  // namespace lockstep
