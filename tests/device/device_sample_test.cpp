// The sample text that a run on a device writes at its end matches that of `lockstep generate`, and
// needs no second model on the device.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/generate.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/sample_text.h"

namespace lockstep::testing {
namespace {

class DeviceSample : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  /// Trains on one rank with `precision`, saves, and writes the sample. Returns the sample, and the
  /// device's peak bytes meanwhile relative to those that the training held.
  std::pair<std::string, double> sample(const std::string& precision) {
    const Config config = parse_config(
        "model { num_layers: 2 hidden_size: 64 num_attention_heads: 4 seq_length: 16 } "
        "train { global_batch_size: 4 micro_batch_size: 1 eval_iters: 0 train_iters: 2 "
        "sample_tokens: 12 sample_prompt: \"The\" } optimizer { lr: 0.01 }",
        "test",
        {"data.path=" + folder_.write("text", synthetic_text()), "train.precision=" + precision});
    std::pair<std::string, double> result;
    run_device_ranks(1, [&](const ParallelState& state) {
      const auto device = state.device();
      RunCheckpoints checkpoints(config.checkpoint, saved(), state);
      auto trainer = std::make_unique<Trainer>(config, state);
      TrainCallbacks callbacks;
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(*trainer, last); };
      trainer->run(callbacks);
      const auto held = static_cast<double>(device_bytes(device.index()).live);
      reset_peak_bytes(device.index());
      result.first = SampleText(config).write(std::move(trainer), checkpoints.path(), device);
      result.second = static_cast<double>(device_bytes(device.index()).peak) / held;
    });
    return result;
  }

  std::string saved() const { return folder_.path() / "saved"; }

  std::string generated() const {
    const auto tokens =
        generate(*load_model(saved(), c10::kCPU).model, {'T', 'h', 'e'}, {.max_tokens = 12});
    return "The" + ByteTokenizer().decode(tokens);
  }

  TemporaryFolder folder_;
};

TEST_F(DeviceSample, IsThatOfGenerateWithoutASecondModel) {
  for (const char* const precision : {"fp32", "fp64", "bf16"}) {
    const auto [text, share] = sample(precision);
    EXPECT_EQ(text, generated()) << precision;
    EXPECT_LT(share, 1.1) << precision << ": peak of the sample over what the training held";
  }
}

}  // namespace
}  // namespace lockstep::testing
