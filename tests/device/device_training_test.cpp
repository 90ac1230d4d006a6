// Training on the asynchronous device, over a backend with NCCL's rules. Losses, norms and all
// final weights have the bits of the same ranks on the CPU, and a step waits for its device as
// often as docs/gpu.md says.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/tests/device/expert_layouts.h"
#include "lockstep/tests/device/feature_layouts.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_documents.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

constexpr int kSteps = 3;

#ifdef __SANITIZE_THREAD__
constexpr int kSlowness = 10;
#else
constexpr int kSlowness = 1;
#endif
/// A device with lagging streams falls far behind its host if other programs slow the host down.
constexpr std::chrono::seconds kGroupTimeout{60 * kSlowness}, kDeadline{240 * kSlowness};

/// Number of seeds for the delays; LOCKSTEP_DEVICE_SEEDS=20 tries more.
uint64_t seeds() {
  const char* const text = std::getenv("LOCKSTEP_DEVICE_SEEDS");
  return text ? std::stoul(text) : 2;
}

/// What rank 0 measured, and the weights of all ranks.
struct Outcome {
  std::vector<double> curve;
  std::map<std::pair<int64_t, std::string>, at::Tensor> weights;
  /// Counts of each rank in the step with the most waits, not counting the first step.
  std::map<int64_t, DeviceCounts> waits;
};

class DeviceTraining : public ::testing::TestWithParam<DeviceLayout> {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  DeviceTraining() {
    const Overrides& given = GetParam().overrides;
    const auto has = [&](const char* field) {
      return std::find(given.begin(), given.end(), field) != given.end();
    };
    if (has(kConversations))
      data_ = folder_.write("lines.jsonl", synthetic_conversations());
    else if (has(kPositionsInDocuments))
      data_ = write_documents(folder_.path() / "documents");
    else
      data_ = folder_.write("text", synthetic_text());
  }

  Config config() const {
    const Overrides& given = GetParam().overrides;
    Overrides all = {"data.path=" + data_};
    all.insert(all.end(), given.begin(), given.end());
    return parse_config(kDeviceModel, "test", all);
  }

  static DeviceCounts counts_of(const ParallelState& state) {
    return state.device().is_cpu() ? DeviceCounts() : device_counts(state.device().index());
  }

  /// One rank's run.
  static void train(const Config& config, const ParallelState& state, Outcome& outcome,
                    std::mutex& mutex) {
    Trainer trainer(config, state);
    std::vector<double> curve;
    DeviceCounts most;
    for (int step = 0; step < kSteps; ++step) {
      const DeviceCounts before = counts_of(state);
      const IterationMetrics metrics = trainer.train_step();
      const DeviceCounts counts = counts_of(state) - before;
      if (step > 0 && counts.waits >= most.waits) most = counts;
      curve.push_back(metrics.lm_loss);
      curve.push_back(metrics.grad_norm);
    }
    curve.push_back(trainer.validate().validation_loss);
    (void)trainer.state(/*with_optimizer=*/false);  // gathers what is sharded
    const std::lock_guard<std::mutex> lock(mutex);
    if (state.rank() == 0) outcome.curve = curve;
    outcome.waits[state.rank()] = most;
    size_t chunks = 0;
    for (const auto& chunk : trainer.training_model().chunks()) {
      const std::string place = "chunk " + std::to_string(chunks++) + ", ";
      for (const NamedParameter& param : collect_parameters(*chunk))
        outcome.weights[{state.rank(), place + param.name}] =
            param.tensor.detach().to(at::kCPU).clone();
    }
  }

  Outcome on_cpu() const {
    const Config config = this->config();
    Outcome outcome;
    std::mutex mutex;
    run_ranks(GetParam().world,
              [&](const ParallelState& state) { train(config, state, outcome, mutex); },
              {.sizes = parallel_options(config, c10::kCPU).sizes, .timeout = kGroupTimeout});
    return outcome;
  }

  Outcome on_devices(uint64_t seed) const {
    const Config config = this->config();
    Outcome outcome;
    std::mutex mutex;
    DeviceRankOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    options.timeout = kGroupTimeout;
    options.deadline = kDeadline;
    options.ranks_per_device = GetParam().ranks_per_device;
    options.device.seed = seed;
    options.device.loads_kernels = GetParam().ranks_per_device == 1;
    if (seed % 2 == 0) {  // every stream lags until somebody waits for it
      options.device.delayed = 1;
      options.device.longest_delay = std::chrono::milliseconds(20);
    }
    run_device_ranks(
        GetParam().world, [&](const ParallelState& state) { train(config, state, outcome, mutex); },
        options);
    return outcome;
  }

  static void expect_same(const Outcome& found, const Outcome& expected, const std::string& where) {
    const double tolerance = GetParam().tolerance;
    ASSERT_EQ(found.curve.size(), expected.curve.size()) << where;
    for (size_t i = 0; i < found.curve.size(); ++i)
      EXPECT_LE(std::abs(found.curve[i] - expected.curve[i]), tolerance * expected.curve[i])
          << where << ", number " << i;
    ASSERT_EQ(found.weights.size(), expected.weights.size()) << where;
    std::string different;
    for (const auto& [key, weight] : expected.weights) {
      const at::Tensor wide = weight.to(at::kDouble);
      const at::Tensor apart = (found.weights.at(key).to(at::kDouble) - wide).abs().max();
      if (!(apart.item<double>() <= tolerance * wide.abs().max().item<double>()))
        different += " " + key.second + " on rank " + std::to_string(key.first);
    }
    EXPECT_EQ(different, "") << where;
  }

  TemporaryFolder folder_;
  std::string data_;
};

std::string described(const DeviceCounts& counts) {
  std::string text;
  for (const auto& [cause, times] : counts.waits_by)
    text += ", " + std::to_string(times) + " " + cause;
  return text;
}

TEST_P(DeviceTraining, TrainsAsTheCpuAndWaitsNoMoreThanItMust) {
  const Outcome expected = on_cpu();
  for (uint64_t seed = 1; seed <= seeds(); ++seed) {
    const Outcome found = on_devices(seed);
    expect_same(found, expected, "seed " + std::to_string(seed));
    if (GetParam().ranks_per_device > 1) continue;  // their waits are counted together
    for (const auto& [rank, counts] : found.waits)
      EXPECT_LE(counts.waits, GetParam().waits())
          << "seed " << seed << ", rank " << rank << described(counts);
  }
}

std::string name_of(const ::testing::TestParamInfo<DeviceLayout>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Data, DeviceTraining, ::testing::ValuesIn(data_layouts()), name_of);
INSTANTIATE_TEST_SUITE_P(Model, DeviceTraining, ::testing::ValuesIn(model_layouts()), name_of);
INSTANTIATE_TEST_SUITE_P(Features, DeviceTraining, ::testing::ValuesIn(feature_layouts()), name_of);
INSTANTIATE_TEST_SUITE_P(Offloaded, DeviceTraining, ::testing::ValuesIn(offloaded_layouts()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Experts, DeviceTraining, ::testing::ValuesIn(expert_layouts()), name_of);
INSTANTIATE_TEST_SUITE_P(Exchanged, DeviceTraining, ::testing::ValuesIn(exchanged_layouts()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Shared, DeviceTraining, ::testing::ValuesIn(shared_layouts()), name_of);

}  // namespace
}  // namespace lockstep::testing
