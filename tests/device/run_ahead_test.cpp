// On a device, Trainer::run() launches an iteration before it knows the numbers of the previous
// one. What it reports and saves, and its final state, must match the CPU, which knows them at
// once.

#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/models/router.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

using Settings = std::vector<std::string>;
/// What a run reported, in order, with all bits of the numbers.
using Story = std::vector<std::string>;

struct Job {
  std::string name;
  int64_t world = 1;
  Settings settings;
};

/// Iterations before whose launch an event happens.
struct Events {
  std::optional<int64_t> stop_in = {};    ///< SIGTERM arrives; the run is then resumed
  std::optional<int64_t> poison_in = {};  ///< a weight becomes NaN
};

void PrintTo(const Job& job, std::ostream* out) { *out << job.name; }

std::string line_of(const IterationMetrics& m) {
  return fmt::format("iteration {}: loss {:a}, norm {:a}, rate {:a}, {} samples, {} tokens{}{}",
                     m.iteration, m.lm_loss, m.grad_norm, m.learning_rate, m.consumed_samples,
                     m.num_tokens, m.skipped ? ", skipped " : "", name_of(m.spike));
}

double sum_of(const std::vector<StateTensor>& state) {
  double sum = 0;
  for (const StateTensor& tensor : state)
    sum += tensor.values.detach().to(at::kCPU).to(at::kDouble).sum().item<double>();
  return sum;
}

/// Tokens that the routers have counted and not yet applied to a bias.
int64_t waiting_tokens(const Trainer& trainer) {
  int64_t tokens = 0;
  for (const auto& router : find_routers(trainer.model()))
    if (router->tokens_per_expert().defined())
      tokens += router->tokens_per_expert().sum().item<int64_t>();
  return tokens;
}

std::string line_of(Trainer& trainer, bool last) {
  const TrainingProgress progress = trainer.progress();
  return fmt::format(
      "save{}: iteration {}, {} samples, {} skipped, {} steps, {} tokens, state {:a}",
      last ? " at the end" : "", progress.iteration, progress.consumed_samples,
      progress.skipped_steps, progress.optimizer.num_steps, waiting_tokens(trainer),
      sum_of(trainer.state(/*with_optimizer=*/true)));
}

class RunAhead : public ::testing::TestWithParam<Job> {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  RunAhead() { path_ = folder_.write("text", synthetic_text()); }

  Config config(const Settings& more) const {
    Settings all = {"data.path=" + path_};
    all.insert(all.end(), GetParam().settings.begin(), GetParam().settings.end());
    all.insert(all.end(), more.begin(), more.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
        "seq_length: 16 vocab_size: 256 position_embedding_type: \"rope\" } "
        "train { global_batch_size: 4 micro_batch_size: 1 eval_iters: 1 train_iters: 6 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  static Story story_of(const Config& config, const ParallelState& state, const Events& events) {
    Story story;
    Trainer trainer(config, state);
    TrainCallbacks callbacks;
    callbacks.iteration = [&](const IterationMetrics& m) { story.push_back(line_of(m)); };
    callbacks.validation = [&](const ValidationMetrics& m) {
      story.push_back(fmt::format("validation {}: {:a}", m.iteration, m.validation_loss));
    };
    callbacks.checkpoint_is_due = [](int64_t iteration) { return iteration == 3; };
    callbacks.checkpoint = [&](bool last) {
      if (last || trainer.iteration() == 3) story.push_back(line_of(trainer, last));
    };
    callbacks.should_stop = [&] {
      const int64_t next = trainer.iteration() + 1;
      if (next == events.poison_in)
        trainer.model().parameters()[0].detach().fill_(std::numeric_limits<float>::quiet_NaN());
      return next == events.stop_in ? RunEnd::sigterm : RunEnd::none;
    };
    const auto run = [&] {
      story.emplace_back(name_of(trainer.run(callbacks)));
      story.push_back(fmt::format("iteration {}", trainer.iteration()));
    };
    run();
    if (events.stop_in) run();
    if (trainer.end() == RunEnd::diverged)
      story.push_back(
          fmt::format("{}; good: {}", trainer.divergence(), trainer.last_good_iteration()));
    story.push_back(line_of(trainer, /*last=*/true));
    return story;
  }

  static std::vector<Story> on_devices(const Config& config, const Events& events) {
    return stories(
        [&](const RankBody& body) {
          DeviceRankOptions options;
          options.sizes = parallel_options(config, c10::kCPU).sizes;
          options.device.delayed = 0.5;
          run_device_ranks(GetParam().world, body, options);
        },
        config, events);
  }

  static std::vector<Story> on_cpu(const Config& config, const Events& events) {
    return stories(
        [&](const RankBody& body) {
          run_ranks(GetParam().world, body, {.sizes = parallel_options(config, c10::kCPU).sizes});
        },
        config, events);
  }

  static void expect_same_story(const Config& config, const Events& events = {}) {
    const std::vector<Story> expected = on_cpu(config, events);
    EXPECT_EQ(on_devices(config, events), expected);
    last_line_ = expected.front().at(expected.front().size() - 2);
  }

  TemporaryFolder folder_;
  std::string path_;
  static inline std::string last_line_;  ///< the last line but one: how the run diverged

 private:
  template <class Run>
  static std::vector<Story> stories(Run run, const Config& config, const Events& events) {
    std::vector<Story> all(static_cast<size_t>(GetParam().world));
    run([&](const ParallelState& state) {
      all[static_cast<size_t>(state.rank())] = story_of(config, state, events);
    });
    return all;
  }
};

TEST_P(RunAhead, ARunIsToldAndSavedAsOnTheCpu) { expect_same_story(config({})); }

TEST_P(RunAhead, ValidationsOnTheWaySeeTheirOwnIteration) {
  expect_same_story(config({"train.eval_interval=2"}));
}

TEST_P(RunAhead, AStoppedRunEndsAfterTheSameIterationAndGoesOn) {
  for (const int64_t iteration : {1, 2, 3, 6})
    expect_same_story(config({}), {.stop_in = iteration});
}

TEST_P(RunAhead, ALossThatIsNotANumberEndsTheRunAfterItsIteration) {
  expect_same_story(config({}), {.poison_in = 5});
  EXPECT_EQ(last_line_, "iteration 5: the loss is not a number; good: 3");
}

TEST_P(RunAhead, SkippedStepsInARowEndTheRunAsOnTheCpu) {
  expect_same_story(
      config({"optimizer.grad_norm_skip_threshold=0.001", "train.max_skipped_steps=3"}));
  EXPECT_NE(last_line_.find("found 3 skipped steps in a row"), std::string::npos) << last_line_;
}

TEST_P(RunAhead, SpikesAreSkippedAsOnTheCpu) {
  // With nothing to go back to, rewind also skips, but drops the iteration that was launched.
  for (const char* const what : {"train.on_spike=skip", "train.on_spike=rewind"}) {
    const Config sensitive = config({what, "train.spike_window=2", "train.spike_zscore=0.01",
                                     "train.train_iters=9", "checkpoint.save_interval=100"});
    expect_same_story(sensitive);
    int64_t spikes = 0;
    for (const Story& story : on_cpu(sensitive, {}))
      for (const std::string& line : story)
        if (line.find("skipped grad_norm") != line.npos || line.find("skipped loss") != line.npos)
          ++spikes;
    EXPECT_GE(spikes, GetParam().world);
  }
}

TEST_P(RunAhead, ALossScaleThatAdaptsIsThatOfTheStepBefore) {
  expect_same_story(config({"train.precision=fp16", "optimizer.initial_loss_scale=65536000",
                            "optimizer.loss_scale_window=2", "optimizer.hysteresis=1"}));
}

const Settings kShardedAhead = {"ddp.overlap_grad_reduce=true", "ddp.bucket_size=1000",
                                "ddp.use_distributed_optimizer=true",
                                "ddp.overlap_param_gather=true"};
const Job kJobs[] = {
    {"one_rank", 1, {}},
    {"dp2_sharded", 2, kShardedAhead},
    {"dp2_sharded_params",
     2,
     {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
      "ddp.data_parallel_sharding_strategy=optim_grads_params"}},
    {"pp2", 2, {"parallel.pipeline_model_parallel_size=2"}},
    {"offloaded",
     2,
     {"optimizer.offload=true", "model.recompute_granularity=full",
      "model.offload_activations=true", "ddp.use_distributed_optimizer=true"}},
    {"adapters", 2, {"lora.rank=4", "lora.dropout=0.1", "ddp.use_distributed_optimizer=true"}},
    {"experts",
     1,
     {"model.num_experts=4", "model.moe_router_topk=2", "model.moe_router_enable_expert_bias=true",
      "model.moe_router_score_function=sigmoid"}},
    {"balanced_over_all_micro_batches",
     1,
     {"model.num_experts=4", "model.moe_router_topk=2",
      "model.moe_router_load_balancing_type=global_aux_loss", "model.moe_aux_loss_coeff=0.1"}},
};
INSTANTIATE_TEST_SUITE_P(Jobs, RunAhead, ::testing::ValuesIn(kJobs),
                         [](const auto& info) { return info.param.name; });

/// (reported iteration, iteration launched by then), while the device is held up in the latter.
TEST(RunAheadOrder, AnIterationIsToldWhileTheDeviceWorksOnTheNext) {
  use_lagging_device();
  TemporaryFolder folder;
  const Config config = parse_config(
      "model { num_layers: 1 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
      "seq_length: 16 vocab_size: 256 } "
      "train { global_batch_size: 2 micro_batch_size: 1 eval_iters: 0 train_iters: 4 } "
      "optimizer { lr: 0.01 }",
      "test", {"data.path=" + folder.write("text", synthetic_text())});
  std::vector<std::pair<int64_t, int64_t>> told;
  run_device_ranks(1, [&](const ParallelState& state) {
    Trainer trainer(config, state);
    std::optional<Gate> gate;
    int64_t launched = 0;
    TrainCallbacks callbacks;
    callbacks.should_stop = [&] {
      // The first iteration waits for one-time work.
      if (++launched > 1) gate.emplace(current_stream(state.device().index()));
      return RunEnd::none;
    };
    callbacks.iteration = [&](const IterationMetrics& m) {
      told.emplace_back(m.iteration, launched);
      if (gate) gate->release();
    };
    trainer.run(callbacks);
  });
  EXPECT_EQ(told, (std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {2, 3}, {3, 4}, {4, 4}}));
}

}  // namespace
}  // namespace lockstep::testing
