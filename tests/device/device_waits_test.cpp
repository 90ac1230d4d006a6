// Hosts that wait for everything that runs on their devices, NCCL's kernels included: in each task
// of a pipeline, as when the allocator gives memory back, and after an error of the device.

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/pipeline/executor.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/training/run_setup.h"

namespace lockstep::testing {
namespace {

void wait_for_all_of(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

/// Three runs of a pipeline whose stages multiply by ones. The first run starts no receive early.
void run_waiting_in_each_task(const ParallelState& state, const ScheduleOptions& options) {
  const c10::Device device = state.device();
  PipelineExecutorOptions settings;
  settings.activation_shape = [](int64_t) { return TensorShape{{4}, at::kFloat}; };
  settings.backward = [device](const PipelineTask&, const std::function<at::Tensor()>& compute) {
    wait_for_all_of(device);
    return compute();
  };
  const PipelineExecutor executor(state, make_schedule(options), settings);
  const at::Tensor weight = at::ones({4}, device).requires_grad_(true);
  std::vector<PipelineStage> stages;
  for (int64_t chunk = 0; chunk < options.virtual_pipeline; ++chunk) {
    const bool last = state.rank() + 1 == options.pipeline && chunk + 1 == options.virtual_pipeline;
    stages.push_back([=](int64_t, const at::Tensor& input) {
      wait_for_all_of(device);
      const at::Tensor output = (input.defined() ? input : at::ones({4}, device)) * weight;
      return last ? output.sum() : output;
    });
  }
  for (int run = 0; run < 3; ++run) executor.run(stages);
  const auto backwards = static_cast<double>(3 * options.microbatches * options.virtual_pipeline);
  EXPECT_TRUE(at::equal(weight.grad().cpu(), at::full({4}, backwards, at::kFloat)));
}

TEST(HostsThatWaitForTheirDevices, DoNotLockAPipelineUp) {
  for (const ScheduleOptions& options : std::vector<ScheduleOptions>{
           {.pipeline = 3, .microbatches = 6},
           {.pipeline = 3, .virtual_pipeline = 2, .microbatches = 6},
           {.pipeline = 4, .virtual_pipeline = 2, .microbatches = 8},
           {.pipeline = 3, .virtual_pipeline = 2, .microbatches = 5, .microbatch_group_size = 5}})
    run_device_ranks(options.pipeline,
                     [&](const ParallelState& state) { run_waiting_in_each_task(state, options); },
                     {.sizes = {.pipeline = options.pipeline},
                      .timeout = std::chrono::seconds(10),
                      .deadline = std::chrono::seconds(30)});
}

TEST(HostsThatWaitForTheirDevices, LearnOfAnErrorThatEndedTheContext) {
  use_lagging_device();
  EXPECT_EQ(error_of_device(c10::kCPU), std::nullopt);
  EXPECT_EQ(error_of_device(lagging_device(0)), std::nullopt);
  enqueue(default_stream(1), "a kernel", [] { throw std::runtime_error("an illegal address"); });
  const auto error = error_of_device(lagging_device(1));
  ASSERT_TRUE(error.has_value());
  EXPECT_NE(error->find("a kernel: an illegal address"), std::string::npos) << *error;
  EXPECT_EQ(error->find("Exception raised from"), std::string::npos) << *error;
  EXPECT_EQ(error_of_device(lagging_device(0)), std::nullopt);
  clear_device_errors();
}

}  // namespace
}  // namespace lockstep::testing
