// Runs that are built without random initial weights, because they load all of them.

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/core/check.h"
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
using Fields = std::vector<std::string>;
using Values = std::map<std::string, at::Tensor>;

constexpr int64_t kSteps = 3;

/// Copies of the values that a rank would save, by name and state.
Values values_of(Trainer& trainer) {
  Values values;
  for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/true))
    values[tensor.name + " " + tensor.state] = tensor.values.detach().clone();
  return values;
}

void expect_equal(const Values& found, const Values& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, values] : wanted) EXPECT_TRUE(at::equal(found.at(name), values)) << name;
}

class SkippedInitializationTest : public ::testing::Test {
 protected:
  SkippedInitializationTest() { text_ = folder_.write("text", testing::synthetic_text()); }

  Config config(Fields fields) const {
    fields.insert(fields.begin(), {"data.path=" + text_, "ddp.use_distributed_optimizer=true",
                                   "parallel.tensor_model_parallel_size=2"});
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 24 "
        "seq_length: 16 vocab_size: 257 make_vocab_size_divisible_by: 4 num_experts: 2 } "
        "optimizer { lr: 0.01 lr_decay_style: \"constant\" } "
        "train { global_batch_size: 4 micro_batch_size: 1 train_iters: 20 eval_iters: 0 }",
        "test", fields);
  }

  static void on_ranks(const Config& config,
                       const std::function<void(const ParallelState&)>& body) {
    testing::run_ranks(4, body, {.sizes = parallel_options(config, c10::kCPU).sizes});
  }

  /// Trains and saves into a folder, as the job "ours".
  std::string saved(const Fields& fields) const {
    const std::string into = folder_.path() / "saved";
    const Config config = this->config(fields);
    on_ranks(config, [&](const ParallelState& state) {
      Trainer trainer(config, state);
      for (int64_t i = 0; i < kSteps; ++i) trainer.train_step();
      RunCheckpoints(config.checkpoint, into, state, {"ours"}).after_iteration(trainer, true);
    });
    return into;
  }

  /// Loads the same checkpoint into a run with initial values and into one without.
  static void load_both(const Config& config, const std::string& from, bool weights_only,
                        const std::function<void(Trainer& usual, Trainer& other)>& body) {
    on_ranks(config, [&](const ParallelState& state) {
      Trainer usual(config, state), other(config, state, /*perform_initialization=*/false);
      for (const StateTensor& tensor : other.state(/*with_optimizer=*/false)) {
        if (tensor.name.find("lora_A") != std::string::npos) continue;
        const bool constant = tensor.name.ends_with("norm.weight");
        EXPECT_TRUE(tensor.values.eq(constant ? 1 : 0).all().item<bool>()) << tensor.name;
      }
      CheckpointReader reader(from);
      usual.load(reader, weights_only);
      other.load(reader, weights_only);
      expect_equal(values_of(other), values_of(usual));
      body(usual, other);
    });
  }

  TemporaryFolder folder_;
  std::string text_;
};

TEST_F(SkippedInitializationTest, WeightsAreZerosUntilTheyAreLoaded) {
  for (const char* precision : {"fp32", "bf16"}) {
    const Fields fields = {fmt::format("train.precision={}", precision)};
    load_both(config(fields), saved(fields), /*weights_only=*/false,
              [&](Trainer& usual, Trainer& other) {
                for (int64_t i = 0; i < kSteps; ++i)
                  EXPECT_EQ(other.train_step().lm_loss, usual.train_step().lm_loss) << precision;
                expect_equal(values_of(other), values_of(usual));
              });
  }
}

TEST_F(SkippedInitializationTest, WeightsAloneReplaceAllOfThem) {
  const Fields fields = {"train.precision=bf16"};
  load_both(config(fields), saved(fields), /*weights_only=*/true,
            [&](Trainer& usual, Trainer& other) {
              for (int64_t i = 0; i < kSteps; ++i) {
                usual.train_step();
                other.train_step();
              }
              expect_equal(values_of(other), values_of(usual));
            });
}

TEST_F(SkippedInitializationTest, AdaptersOfALoadedModelHaveTheirInitialValues) {
  load_both(config({"lora.rank=3"}), saved({}), /*weights_only=*/true,
            [&](Trainer&, Trainer& other) {
              int64_t adapters = 0;
              for (const auto& [name, values] : values_of(other))
                if (name.ends_with("lora_A ")) adapters += values.ne(0).any().item<bool>();
              EXPECT_GT(adapters, 0);
            });
}

TEST_F(SkippedInitializationTest, OnlyARunThatLoadsGoesWithout) {
  struct Case {
    const char* what;
    CheckpointConfig checkpoint;
    std::string folder;
    JobStart start;
    bool loads;
  };
  const std::string from = saved({}), none = folder_.path() / "none";
  CheckpointConfig named, absent, finetuned;
  named.load = from;
  absent.load = none;
  absent.load_if_present = true;
  finetuned.load = from;
  finetuned.finetune = true;
  const std::vector<Case> cases = {
      {"a new run", {}, "", {}, false},
      {"a folder of another run", {}, from, {"ours"}, false},
      {"its own folder, started again", {}, from, {"ours", 1}, true},
      {"another job, started again", {}, from, {"theirs", 1}, false},
      {"another job that names the folder", named, from, {"theirs", 1}, true},
      {"checkpoint.load", named, "", {}, true},
      {"checkpoint.finetune", finetuned, "", {}, true},
      {"checkpoint.load_if_present, nothing there", absent, "", {}, false},
  };
  const Config config = this->config({});
  on_ranks(config, [&](const ParallelState& state) {
    for (const Case& one : cases) {
      RunCheckpoints checkpoints(one.checkpoint, one.folder, state, one.start);
      EXPECT_EQ(checkpoints.will_load(), one.loads) << one.what;
      Trainer trainer(config, state, !checkpoints.will_load());
      EXPECT_EQ(checkpoints.load(trainer).has_value(), one.loads) << one.what;
      EXPECT_TRUE(std::isfinite(trainer.train_step().lm_loss)) << one.what;
    }
    CheckpointConfig required = absent;
    required.load_if_present = false;
    RunCheckpoints checkpoints(required, "", state);
    EXPECT_FALSE(checkpoints.will_load());
    Trainer trainer(config, state);
    EXPECT_TRUE(throws_with<FileError>([&] { checkpoints.load(trainer); },
                                       "'" + none + "' holds no complete checkpoint"));
  });
}

TEST_F(SkippedInitializationTest, CopiesOfWhichAPartIsLostAreNotAReason) {
  const Config config = this->config({"train.elastic=dp", "checkpoint.in_memory_replicas=1"});
  std::vector<StateCopies> copies(4);
  const auto round = [&](int64_t restarts, const auto& body) {
    on_ranks(config, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(config.checkpoint, "", state, {"job", restarts},
                                 &copies[static_cast<size_t>(state.rank())]);
      body(checkpoints, state);
    });
  };
  const auto train = [&](RunCheckpoints& checkpoints, const ParallelState& state) {
    Trainer trainer(config, state);
    for (int64_t i = 0; i < kSteps; ++i) {
      trainer.train_step();
      checkpoints.after_iteration(trainer, false);
    }
  };
  round(0, train);
  copies[3] = StateCopies();
  round(1, [&](RunCheckpoints& checkpoints, const ParallelState& state) {
    ASSERT_TRUE(checkpoints.will_load());
    Trainer trainer(config, state, /*perform_initialization=*/false);
    EXPECT_EQ(checkpoints.load(trainer), RunCheckpoints::kInMemory);
    EXPECT_EQ(trainer.iteration(), kSteps);
  });
  copies[2] = StateCopies();
  copies[3] = StateCopies();
  round(2, [&](RunCheckpoints& checkpoints, const ParallelState& state) {
    EXPECT_FALSE(checkpoints.will_load());
    Trainer trainer(config, state);
    EXPECT_FALSE(checkpoints.load(trainer));
    EXPECT_NE(checkpoints.note().find("is incomplete"), std::string::npos) << checkpoints.note();
  });
}

}  // namespace
}  // namespace lockstep
