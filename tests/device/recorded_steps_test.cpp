// train.cuda_graph: a recorded step that is launched for other data gives the same bits and the
// same communication as a run that launches every operation.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_documents.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

using Fields = std::vector<std::string>;

struct RecordedJob {
  std::string name;
  int64_t world = 1;
  Fields fields;
  bool cpu_has_same_bits = true;  ///< false: the device uses another kernel
  bool has_documents = false;     ///< whose ends are in the samples
};

void PrintTo(const RecordedJob& job, std::ostream* out) { *out << job.name; }

/// The results of a run.
struct Trace {
  std::vector<std::string> told;           ///< lines of rank 0, with all bits
  std::map<int64_t, std::string> weights;  ///< sums of a rank's state, with all bits
  std::map<int64_t, std::vector<std::string>> calls;
  std::map<int64_t, int64_t> replays, most_waits;
};

class RecordedSteps : public ::testing::TestWithParam<RecordedJob> {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  RecordedSteps() {
    path_ = GetParam().has_documents ? write_documents(folder_.path() / "documents")
                                     : folder_.write("text", synthetic_text());
  }

  Config config(const std::string& graph, const Fields& more = {}) const {
    Fields all = {"data.path=" + path_, "train.cuda_graph=" + graph};
    all.insert(all.end(), GetParam().fields.begin(), GetParam().fields.end());
    all.insert(all.end(), more.begin(), more.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
        "seq_length: 16 vocab_size: 256 position_embedding_type: \"rope\" } "
        "train { global_batch_size: 8 micro_batch_size: 1 eval_iters: 1 train_iters: 7 "
        "eval_interval: 5 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_warmup_iters: 3 }",
        "test", all);
  }

  int64_t microbatches() const {
    const ParallelConfig parallel = config("none").parallel;
    return 8 * parallel.tensor_model_parallel_size * parallel.context_parallel_size /
           GetParam().world;
  }

  static Trace run(const Config& config, bool on_device, uint64_t seed = 1) {
    Trace trace;
    std::mutex mutex;
    CollectiveLog log;
    const auto body = [&](const ParallelState& state) { run_rank(config, state, trace, mutex); };
    const int64_t world = GetParam().world;
    if (on_device) {
      DeviceRankOptions options;
      options.sizes = parallel_options(config, c10::kCPU).sizes;
      options.device.seed = seed;
      options.device.delayed = 0.5;
      options.log = &log;
      run_device_ranks(world, body, options);
    } else {
      run_ranks(world, body, {.sizes = parallel_options(config, c10::kCPU).sizes, .log = &log});
    }
    for (int64_t rank = 0; rank < world; ++rank)
      for (const CollectiveRecord& call : log.of_rank(rank))
        if (call.label.find("desync") == std::string::npos)
          trace.calls[rank].push_back(fmt::format("{} of {} over {}, {} bytes", call.operation,
                                                  call.label, call.group, call.bytes));
    return trace;
  }

  TemporaryFolder folder_;
  std::string path_;

 private:
  static void run_rank(const Config& config, const ParallelState& state, Trace& trace,
                       std::mutex& mutex) {
    const c10::Device device = state.device();
    const auto counts = [&] {
      return device.is_cpu() ? DeviceCounts{} : device_counts(device.index());
    };
    const int64_t replays = counts().replays;
    int64_t waits = counts().waits, most = 0;
    std::vector<std::string> told;
    std::string weights;
    {
      Trainer trainer(config, state);
      TrainCallbacks callbacks;
      callbacks.iteration = [&](const IterationMetrics& m) {
        told.push_back(fmt::format("{}: {:a} {:a} {:a} {}", m.iteration, m.lm_loss, m.grad_norm,
                                   m.learning_rate, m.num_tokens));
        // In the steady state: iteration 4 is reported during the launch of the next one.
        if (m.iteration == 4) most = counts().waits - waits;
        waits = counts().waits;
      };
      callbacks.validation = [&](const ValidationMetrics& m) {
        told.push_back(fmt::format("validation {:a}", m.validation_loss));
      };
      trainer.run(callbacks);
      double sum = 0, squares = 0;
      for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/true)) {
        const at::Tensor values = tensor.values.detach().to(at::kCPU).to(at::kDouble);
        sum += values.sum().item<double>();
        squares += values.square().sum().item<double>();
      }
      weights = fmt::format("{:a} {:a}", sum, squares);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (state.rank() == 0) trace.told = told;
    trace.weights[state.rank()] = weights;
    trace.replays[state.rank()] = counts().replays - replays;
    trace.most_waits[state.rank()] = most;
  }
};

TEST_P(RecordedSteps, LaunchesOfTheRecordingGiveTheBitsAndTheCallsOfTheRunWithout) {
  const Trace plain = run(config("none"), /*on_device=*/true);
  if (GetParam().cpu_has_same_bits) {
    const Trace cpu = run(config("none"), /*on_device=*/false);
    EXPECT_EQ(plain.told, cpu.told);
    EXPECT_EQ(plain.weights, cpu.weights);
  }
  for (const std::string graph : {"microbatch", "step"}) {
    for (uint64_t seed = 1; seed <= 2; ++seed) {
      const Trace found = run(config(graph), /*on_device=*/true, seed);
      EXPECT_EQ(found.told, plain.told) << graph;
      EXPECT_EQ(found.weights, plain.weights) << graph;
      EXPECT_EQ(found.calls, plain.calls) << graph;
      // In iterations 2 to 7, or 3 to 7.
      const int64_t launches = graph == "microbatch" ? 6 * (microbatches() - 1) : 5;
      for (const auto& [rank, replays] : found.replays) EXPECT_EQ(replays, launches) << graph;
      for (const auto& [rank, waits] : found.most_waits) EXPECT_LE(waits, 1) << graph;
    }
  }
}

TEST_P(RecordedSteps, ABatchThatGrowsIsRecordedAnew) {
  const Fields grows = {"train.rampup_batch_size=4 4 16", "train.train_iters=9"};
  const Trace plain = run(config("none", grows), /*on_device=*/true);
  for (const std::string graph : {"microbatch", "step"}) {
    const Trace found = run(config(graph, grows), /*on_device=*/true);
    EXPECT_EQ(found.told, plain.told) << graph;
    EXPECT_EQ(found.weights, plain.weights) << graph;
  }
}

const Fields kBoth = {"ddp.overlap_grad_reduce=true", "ddp.bucket_size=1000",
                      "ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"};
const Fields kDropped = {"model.hidden_dropout=0.2", "model.attention_dropout=0.1"};

Fields joined(Fields first, const Fields& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

const RecordedJob kRecordedJobs[] = {
    {"one_rank", 1, {}},
    {"dropout", 1, kDropped},
    {"sgd_bf16",
     1,
     {"optimizer.optimizer=sgd", "optimizer.sgd_momentum=0.9", "train.precision=bf16"}},
    {"recompute",
     1,
     {"model.recompute_granularity=full", "model.recompute_method=uniform",
      "model.recompute_num_layers=1"}},
    {"dp2_overlap", 2, {"ddp.overlap_grad_reduce=true", "ddp.bucket_size=1000"}},
    {"dp2_average", 2, {"ddp.calculate_per_token_loss=false"}},
    {"dp2_sharded_bf16", 2, joined(kBoth, {"train.precision=bf16"})},
    {"tp2_sp_dropout", 2,
     joined(kDropped,
            {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"})},
    {"tp2_sp_overlapped",
     2,
     {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
      "parallel.tp_comm_overlap=true"}},
    {"cp2_p2p", 2, {"parallel.context_parallel_size=2", "train.precision=fp64"}, false},
    {"cp2_a2a",
     2,
     {"parallel.context_parallel_size=2", "parallel.cp_comm_type=a2a", "train.precision=fp64"},
     false},
    {"tp2_dp2_sharded", 4, joined(kBoth, {"parallel.tensor_model_parallel_size=2"})},
    {.name = "positions_in_documents",
     .fields = {"data.reset_position_ids=true", "data.eod_mask_loss=true", "model.vocab_size=257",
                "model.make_vocab_size_divisible_by=1"},
     .has_documents = true},
};
INSTANTIATE_TEST_SUITE_P(Jobs, RecordedSteps, ::testing::ValuesIn(kRecordedJobs),
                         [](const auto& info) { return info.param.name; });

TEST(RecordedStepsConfig, WhatCannotBeRecordedIsRefusedByName) {
  const auto refused = [](const std::string& graph, const std::string& field) {
    return [=] {
      check_supported(
          parse_config("model { num_layers: 4 }", "test", {"train.cuda_graph=" + graph, field}));
    };
  };
  const std::pair<const char*, const char*> fields[] = {
      {"parallel.pipeline_model_parallel_size=2", "parallel.pipeline_model_parallel_size"},
      {"model.num_experts=4", "found model.num_experts, allowed: a dense model"},
      {"ddp.check_for_nan_in_grad=true", "ddp.check_for_nan_in_grad"},
  };
  for (const std::string graph : {"microbatch", "step"})
    for (const auto& [field, told] : fields) {
      EXPECT_TRUE(throws_with<ConfigError>(refused(graph, field), told));
      EXPECT_TRUE(throws_with<ConfigError>(refused(graph, field), "train.cuda_graph = " + graph));
    }
  EXPECT_TRUE(throws_with<ConfigError>(refused("step", "optimizer.optimizer=muon"), "adam, sgd"));
  EXPECT_TRUE(throws_with<ConfigError>(refused("step", "ddp.check_for_large_grads=true"),
                                       "ddp.check_for_large_grads"));
  EXPECT_TRUE(
      throws_with<ConfigError>(refused("step", "train.precision=fp16"), "a dynamic loss scale"));
  EXPECT_TRUE(throws_with<ConfigError>(refused("microbatch", "ddp.allow_unused_parameters=true"),
                                       "ddp.allow_unused_parameters"));
}

/// Errors of two ranks that launch recorded steps. Rank 1 calls fault() before the sixth.
std::vector<std::string> errors_of_recorded_run(const std::function<void()>& fault,
                                                std::chrono::seconds timeout) {
  const TemporaryFolder folder;
  const Config config = parse_config(
      "model { num_layers: 1 hidden_size: 16 num_attention_heads: 4 seq_length: 16 } "
      "train { global_batch_size: 4 micro_batch_size: 1 train_iters: 8 eval_iters: 0 }",
      "test", {"data.path=" + folder.write("text", synthetic_text()), "train.cuda_graph=step"});
  DeviceRankOptions options;
  options.timeout = timeout;
  options.abort_on_error = false;
  return errors_of_device_ranks(
      2,
      [&](const ParallelState& state) {
        Trainer trainer(config, state);
        TrainCallbacks callbacks;
        callbacks.should_stop = [&] {
          if (state.rank() == 1 && trainer.iteration() == 5) fault();
          return RunEnd::none;
        };
        trainer.run(callbacks);
      },
      options);
}

TEST(RecordedStepsFailures, ARankThatThrowsBetweenRecordedStepsIsNamed) {
  const auto errors = errors_of_recorded_run([] { throw std::runtime_error("no such file"); },
                                             std::chrono::seconds(60));
  EXPECT_EQ(errors[1], "no such file");
  EXPECT_NE(errors[0].find("rank 1: no such file"), std::string::npos) << errors[0];
}

TEST(RecordedStepsFailures, ARankThatIsTooSlowForARecordedStepIsNamed) {
  const auto errors = errors_of_recorded_run(
      [] { std::this_thread::sleep_for(std::chrono::seconds(7)); }, std::chrono::seconds(3));
  EXPECT_NE(errors[0].find("a recorded step, up to loss"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("timed out"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("rank 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 0"), std::string::npos) << errors[1];
}

TEST(RecordedStepsFailures, WorkWhoseRecordingThrowsIsNotRecordedAndCanBeAgain) {
  run_device_ranks(1, [](const ParallelState& state) {
    const c10::StreamGuard guard(new_stream(state.device().index()));
    const at::Tensor x = at::zeros({3}, state.device());
    RecordedWork work(state);
    EXPECT_THROW(work.record([&] {
      x.add_(1);
      throw std::runtime_error("no such file");
    }),
                 std::runtime_error);
    EXPECT_FALSE(work.is_recorded());
    work.record([&] { x.add_(2); });
    EXPECT_TRUE(work.is_recorded());
    for (int i = 0; i < 2; ++i) work.launch();
    EXPECT_EQ(x.sum().item<double>(), 3 * 2 * 2);
  });
}

TEST(RecordedStepsConfig, TheCpuHasNoGraphs) {
  TemporaryFolder folder;
  const Config config = parse_config(
      "", "test", {"train.cuda_graph=step", "data.path=" + folder.write("text", synthetic_text())});
  run_ranks(1, [&](const ParallelState& state) {
    EXPECT_TRUE(throws_with<ConfigError>([&] { Trainer trainer(config, state); },
                                         "train.cuda_graph: found step, allowed on cpu: none"));
  });
}

}  // namespace
}  // namespace lockstep::testing
