// A rank fails while the others wait for their devices, over a backend with NCCL's rules. Every
// rank ends within the timeout of the groups, with an error that names the culprit. c10d's
// watchdog, which would end the process a minute later, does not act.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

using std::chrono::seconds;

constexpr seconds kTimeout{3};
/// Time to look for lost ranks, and to learn what the others have done.
constexpr seconds kExplanation{5};

void expect_part(const std::string& error, const std::string& part) {
  EXPECT_NE(error.find(part), std::string::npos) << "no '" << part << "' in: " << error;
}

/// Five steps of two all-reduces. The host reads the sums. Rank 1 calls fault(step) between the
/// two.
RankBody sums(const std::function<void(const ParallelState&, int)>& fault) {
  return [fault](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    for (int step = 1; step <= 5; ++step) {
      state.begin_step(step);
      at::Tensor x = at::ones({1000}, state.device());
      all_reduce(group, x, ReduceOp::sum, "first").wait();
      if (state.rank() == 1) fault(state, step);
      all_reduce(group, x, ReduceOp::sum, "second").wait();
      const auto sum = x.sum().item<double>();
      state.check_failures();
      EXPECT_EQ(sum, 1000.0 * static_cast<double>(group.size() * group.size()));
    }
  };
}

/// LOCKSTEP_DEVICE_RUNS=50 repeats each failure that often, each time with different delays.
uint64_t number_of_runs() {
  const char* const text = std::getenv("LOCKSTEP_DEVICE_RUNS");
  return text ? std::stoul(text) : 1;
}

class DeviceFailures : public ::testing::TestWithParam<uint64_t> {
 protected:
  static DeviceRankOptions patient_options() {
    DeviceRankOptions options;
    options.timeout = kTimeout;
    options.abort_on_error = false;
    options.device.seed = GetParam();
    if (GetParam() % 2 == 0) {  // every stream lags until somebody waits for it
      options.device.delayed = 1;
      options.device.longest_delay = std::chrono::milliseconds(20);
    }
    return options;
  }

  /// The errors of all ranks. Checks that the ranks end in time.
  static std::vector<std::string> errors_in_time(int64_t world, const RankBody& body,
                                                 DeviceRankOptions options = patient_options()) {
    const auto begin = std::chrono::steady_clock::now();
    auto errors = errors_of_device_ranks(world, body, std::move(options));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 2 * kTimeout + kExplanation);
    return errors;
  }

  static std::vector<std::string> errors_of_training(int64_t world,
                                                     const std::vector<std::string>& overrides,
                                                     const std::string& label);
};

INSTANTIATE_TEST_SUITE_P(Run, DeviceFailures, ::testing::Range(uint64_t{1}, number_of_runs() + 1));

TEST_P(DeviceFailures, WhatOneRankThrowsReachesTheOthersBeforeTheTimeout) {
  DeviceRankOptions options = patient_options();
  options.timeout = 20 * kTimeout;
  const auto fault = [](const ParallelState&, int step) {
    if (step == 3) throw std::runtime_error("no such file");
  };
  const auto errors = errors_in_time(3, sums(fault), options);
  EXPECT_EQ(errors[1], "no such file");
  for (const int rank : {0, 2}) expect_part(errors[rank], "rank 1: no such file; so all_reduce");
}

TEST_P(DeviceFailures, ACollectiveThatOneRankLeavesOutIsNamed) {
  const auto errors = errors_in_time(3, [](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    for (int step = 1; step <= 3; ++step) {
      state.begin_step(step);
      at::Tensor x = at::ones({1000}, state.device()), y = at::ones({10}, state.device());
      if (state.rank() != 1 || step != 2) all_reduce(group, x, ReduceOp::sum, "gradients").wait();
      all_reduce(group, y, ReduceOp::sum, "loss").wait();
      y.sum().item<double>();
      state.check_failures();
    }
  });
  for (const std::string& error : errors) {
    expect_part(error, "gradients");
    expect_part(error, "rank 1");
    expect_part(error, "step 2");
  }
}

TEST_P(DeviceFailures, ARankThatIsTooSlowIsNamedAndLearnsOfItsFailure) {
  const auto errors = errors_in_time(2, sums([](const ParallelState&, int step) {
                                       if (step == 2) std::this_thread::sleep_for(2 * kTimeout);
                                     }));
  expect_part(errors[0], "all_reduce (sum) of second over group dp [0, 1] failed on rank 0");
  expect_part(errors[0], "timed out");
  expect_part(errors[1], "rank 0");
}

TEST_P(DeviceFailures, ARankThatEndsEarlyIsNamed) {
  const auto errors = errors_in_time(2, [](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    at::Tensor x = at::ones({10}, state.device());
    all_reduce(group, x, ReduceOp::sum, "first").wait();
    if (state.rank() == 1) return;
    all_reduce(group, x, ReduceOp::sum, "second").wait();
    x.sum().item<double>();
    state.check_failures();
  });
  expect_part(errors[0], "second");
  expect_part(errors[0], "rank 1");
  EXPECT_EQ(errors[1], "");
}

TEST_P(DeviceFailures, ARankWhoseThreadDiesIsNamed) {
  std::optional<ParallelState> never_ended;
  const auto errors = errors_in_time(3, [&](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    at::Tensor x = at::ones({10}, state.device());
    all_reduce(group, x, ReduceOp::sum, "first").wait();
    if (state.rank() == 1) {
      never_ended = state;
      return;
    }
    all_reduce(group, x, ReduceOp::sum, "second").wait();
    x.sum().item<double>();
    state.check_failures();
  });
  for (const int rank : {0, 2}) {
    expect_part(errors[rank], "second");
    expect_part(errors[rank], "rank 1");
  }
}

TEST_P(DeviceFailures, ARankThatNcclFindsGoneIsNamedBeforeTheTimeout) {
  DeviceRankOptions options = patient_options();
  options.timeout = 20 * kTimeout;
  options.rules = std::make_shared<NcclRules>();
  std::optional<ParallelState> never_ended;
  const auto errors = errors_in_time(
      3,
      [&](const ParallelState& state) {
        const ProcessGroup group = state.group(GroupKind::dp);
        at::Tensor x = at::ones({10}, state.device());
        all_reduce(group, x, ReduceOp::sum, "first").wait();
        x.sum().item<double>();
        if (state.rank() == 1) {
          never_ended = state;
          options.rules->report_errors("remote process exited");
          return;
        }
        all_reduce(group, x, ReduceOp::sum, "second").wait();
        x.sum().item<double>();
        state.check_failures();
      },
      options);
  for (const int rank : {0, 2}) {
    expect_part(errors[rank], "all_reduce (sum) of second over group dp [0, 1, 2] failed on rank");
    expect_part(errors[rank], "remote process exited");
    EXPECT_EQ(errors[rank].find("Exception raised from"), std::string::npos) << errors[rank];
    expect_part(errors[rank], "rank 1: no answer");
  }
}

/// NCCL's abort waits for the device, where the other group's kernel runs. The group whose kernel
/// never ends is made last here, and aborted last unless all are aborted at once.
TEST_P(DeviceFailures, AKernelOfOneGroupDoesNotKeepAnotherFromBeingAborted) {
  DeviceRankOptions options = patient_options();
  options.timeout = 20 * kTimeout;
  options.sizes.tensor = 2;
  const auto errors = errors_in_time(
      4,
      [](const ParallelState& state) {
        at::Tensor x = at::ones({10}, state.device());
        for (const GroupKind kind : {GroupKind::tp, GroupKind::dp})
          all_reduce(state.group(kind), x, ReduceOp::sum, "first").wait();
        x.cpu();
        if (state.rank() == 3) throw std::runtime_error("no such file");
        all_reduce(state.group(GroupKind::dp), x, ReduceOp::sum, "second").wait();
        x.cpu();
        all_reduce(state.group(GroupKind::tp), x, ReduceOp::sum, "third").wait();
        x.cpu();
        state.check_failures();
      },
      options);
  EXPECT_EQ(errors[3], "no such file");
  for (const int rank : {0, 1, 2}) expect_part(errors[rank], "rank 3: no such file");
}

/// An index out of bounds stops rank 1's device, and every later question about it throws.
TEST_P(DeviceFailures, AnErrorOfADeviceIsToldByItsRankAndReachesTheOthers) {
  const auto errors = errors_in_time(3, [](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    at::Tensor x = at::ones({4, 2}, state.device());
    all_reduce(group, x, ReduceOp::sum, "first").wait();
    x.cpu();
    const int64_t row = state.rank() == 1 ? 9 : 1;
    at::Tensor rows = at::embedding(x, at::tensor({row}).to(state.device()));
    all_reduce(group, rows, ReduceOp::sum, "second").wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the watch looks at it
    rows.cpu();
    state.check_failures();
  });
  for (const std::string& error : errors) expect_part(error, "aten::index_select");
  for (const int rank : {0, 2}) {
    expect_part(errors[rank], "rank 1");
    expect_part(errors[rank], "second");
  }
  clear_device_errors();
}

/// Calls whose first use blocks the host of rank 0 until rank 1 arrives, and their names in errors.
const std::vector<std::pair<std::string, void (*)(const ParallelState&)>> kFirstUses = {
    {"all_reduce (sum) of first",
     [](const ParallelState& state) {
       at::Tensor x = at::ones({10}, state.device());
       all_reduce(state.group(GroupKind::dp), x, ReduceOp::sum, "first").wait();
     }},
    {"receive (from 1) of message",
     [](const ParallelState& state) {
       at::Tensor x = at::ones({10}, state.device());
       receive(state.group(GroupKind::dp), x, 1, "message").wait();
     }},
    {"send (to 1) of message",
     [](const ParallelState& state) {
       at::Tensor x = at::ones({10}, state.device());
       send(state.group(GroupKind::dp), x, 1, "message").wait();
     }},
    {"send (to 1) of first message", [](const ParallelState& state) {
       connect_pairs(state.group(GroupKind::dp), {{0, 1}});
     }}};

TEST_P(DeviceFailures, ARankThatEndsBeforeTheFirstUseOfAGroupIsNamed) {
  for (const auto& [what, use] : kFirstUses) {
    const auto errors = errors_in_time(2, [use = use](const ParallelState& state) {
      state.group(GroupKind::dp);
      if (state.rank() == 0) use(state);
    });
    expect_part(errors[0], what);
    expect_part(errors[0], "rank 1");
    EXPECT_EQ(errors[1], "");
  }
}

TEST_P(DeviceFailures, ARankThatThrowsBeforeTheFirstUseOfAGroupIsNamedBeforeTheTimeout) {
  for (const auto& [what, use] : kFirstUses) {
    DeviceRankOptions options = patient_options();
    options.timeout = 20 * kTimeout;
    const auto errors = errors_in_time(
        2,
        [use = use](const ParallelState& state) {
          state.group(GroupKind::dp);
          if (state.rank() == 1) throw std::runtime_error("no such file");
          use(state);
        },
        options);
    expect_part(errors[0], "rank 1: no such file; so " + what);
  }
}

TEST_P(DeviceFailures, ARankThatNeverAnswersInTheOtherDirectionIsNamed) {
  const auto errors = errors_in_time(2, [](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    at::Tensor x = at::ones({10}, state.device());
    if (state.rank() == 1) {
      receive(group, x, 0, "question").wait();
      x.cpu();
      return;
    }
    send(group, x, 1, "question").wait();
    receive(group, x, 1, "answer").wait();
    x.cpu();
    state.check_failures();
  });
  expect_part(errors[0], "receive (from 1) of answer");
  expect_part(errors[0], "rank 1 has ended");
  EXPECT_EQ(errors[1], "");
}

TEST_P(DeviceFailures, AGroupThatGoesLetsItsOperationsEnd) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    DeviceRankOptions options = patient_options();
    options.device.seed = seed;
    options.device.delayed = 0.5;
    run_device_ranks(
        3,
        [](const ParallelState& state) {
          at::Tensor x = at::ones({1000}, state.device());
          for (int i = 0; i < 20; ++i) x.mul_(1);  // the sum has to wait for these
          Work work = all_reduce(state.group(GroupKind::dp), x, ReduceOp::sum, "sum");
          if (state.rank() == 1) return;
          work.wait();
          EXPECT_EQ(x.sum().item<double>(), 3000) << "rank " << state.rank();
        },
        options);
  }
}

TEST_P(DeviceFailures, AGroupThatGoesDoesNotWaitForAPeerThatLeavesItsPartOut) {
  errors_in_time(2, [](const ParallelState& state) {
    at::Tensor x = at::ones({10}, state.device());
    all_reduce(state.group(GroupKind::dp), x, ReduceOp::sum, "first").wait();
    if (state.rank() == 0) (void)all_reduce(state.group(GroupKind::dp), x, ReduceOp::sum, "second");
  });
}

/// Runs two steps of `lockstep train`. In the second, rank 1 throws before the collective `label`.
std::vector<std::string> DeviceFailures::errors_of_training(
    int64_t world, const std::vector<std::string>& overrides, const std::string& label) {
  const TemporaryFolder folder;
  std::vector<std::string> all = {"data.path=" + folder.write("text", synthetic_text())};
  all.insert(all.end(), overrides.begin(), overrides.end());
  const Config config = parse_config(
      "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 seq_length: 16 } "
      "train { global_batch_size: 8 micro_batch_size: 1 train_iters: 2 }",
      "test", all);
  DeviceRankOptions options = patient_options();
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  std::atomic<int> step = 0;
  options.observer = [&](const CollectiveRecord& call) {
    if (call.rank == 1 && step == 1 && call.label.find(label) != std::string::npos)
      throw std::runtime_error("a fault before '" + call.label + "'");
  };
  return errors_in_time(
      world,
      [&](const ParallelState& state) {
        Trainer trainer(config, state);
        trainer.train_step();
        if (state.rank() == 1) step = 1;
        trainer.train_step();
      },
      options);
}

void expect_told_by_rank_1(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    expect_part(errors[rank], rank == 1 ? "a fault before" : "rank 1: a fault before");
}

TEST_P(DeviceFailures, ARankThatFailsWithinATrainingStepIsNamedByAll) {
  for (const char* label : {"bucket", "num_tokens", "loss"})
    expect_told_by_rank_1(errors_of_training(2, {"ddp.overlap_grad_reduce=true"}, label));
}

/// NCCL does not abort a communicator before the graphs with its collectives are gone.
TEST_P(DeviceFailures, ARankThatFailsBesideARecordedMicroBatchIsNamedByAll) {
  expect_told_by_rank_1(
      errors_of_training(4,
                         {"parallel.tensor_model_parallel_size=2", "train.cuda_graph=microbatch",
                          "ddp.overlap_grad_reduce=true"},
                         "bucket"));
}

TEST_P(DeviceFailures, AStageThatFailsIsNamedByTheWholePipeline) {
  expect_told_by_rank_1(errors_of_training(
      3,
      {"parallel.pipeline_model_parallel_size=3", "parallel.virtual_pipeline_model_parallel_size=2",
       "model.num_layers=6", "train.global_batch_size=6"},
      "input of F1"));
}

}  // namespace
}  // namespace lockstep::testing
