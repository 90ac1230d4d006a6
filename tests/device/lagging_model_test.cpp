#include <thread>

#include <ATen/Parallel.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/models/core_attention.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/device/lagging_graphs.h"
#include "lockstep/tests/support/gpt_parts.h"

namespace lockstep::testing {
namespace {

struct Step {
  at::Tensor losses;
  std::map<std::string, at::Tensor> gradients;
};

/// Forward and backward of a model in one process. Every token has the same weight.
Step run_gpt(const TransformerConfig& config, at::ScalarType dtype, c10::Device device) {
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt
                                                       : std::optional<c10::Device>(device));
  const GPTModel model(config, {.dtype = dtype, .device = device});
  const at::Tensor ids = sample_ids(config, 3);
  Step step;
  step.losses =
      model.forward(ids.slice(1, 0, config.seq_length).to(device), ids.slice(1, 1).to(device));
  step.losses.sum().backward();
  for (const NamedParameter& param : collect_parameters(model))
    step.gradients[param.name] = param.tensor.grad();
  return step;
}

void expect_same_step(const TransformerConfig& config, at::ScalarType dtype, uint64_t seeds) {
  const Step expected = run_gpt(config, dtype, at::kCPU);
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const bool lazy = seed % 2 == 0;
    use_lagging_device({.devices = kLaggingDevices,
                        .seed = seed,
                        .longest_delay = std::chrono::microseconds(lazy ? 1000000 : 100),
                        .delayed = lazy ? 1 : 0.3});
    const std::string where =
        std::string(at::toString(dtype)) + ", seed " + std::to_string(seed) + ", ";
    const Step found = run_gpt(config, dtype, lagging_device(static_cast<int>(seed % 4)));
    expect_same_bits(found.losses.detach(), expected.losses.detach(), where + "losses");
    ASSERT_EQ(found.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients)
      expect_same_bits(found.gradients.at(name), gradient, where + name);
  }
}

TransformerConfig llama() {
  TransformerConfig config = small_gpt();
  config.num_query_groups = 2;
  config.untie_embeddings_and_output_weights = true;
  return config;
}

TransformerConfig gpt2() {
  TransformerConfig config = small_gpt();
  config.normalization = Normalization::LayerNorm;
  config.position_embedding_type = PositionEmbeddingType::learned_absolute;
  config.activation = Activation::gelu;
  config.add_bias_linear = true;
  return config;
}

TEST_F(LaggingDevice, AGptHasTheBitsOfTheCpu) { expect_same_step(llama(), at::kFloat, kSeeds); }

TEST_F(LaggingDevice, AGptWithLayerNormAndTiedWeightsHasTheBitsOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    expect_same_step(gpt2(), dtype, 3);
}

TEST_F(LaggingDevice, AGptWithDropoutHasTheBitsOfTheCpu) {
  TransformerConfig config = llama();
  config.hidden_dropout = 0.1;
  config.attention_dropout = 0.1;
  expect_same_step(config, at::kFloat, 3);
}

TEST_F(LaggingDevice, DocumentsAreKeptApartWithoutAWaitWhereWeightsDropOut) {
  Config config;
  config.model = small_gpt();
  config.model.attention_dropout = 0.1;
  const TokenPositions tokens = {
      .documents = std::make_shared<const SequenceDocuments>(SequenceDocuments{{5, 3}, {1, 7}})};
  const auto attend = [&](c10::Device device) {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
    const auto core = make_core_attention({.config = resolve(config).model, .options = options}, 0);
    const auto heads = [&](double phase) {
      const at::Tensor numbers = at::arange(8 * 2 * 4 * 6, at::kFloat).mul(1.3).add(phase).sin();
      return numbers.view({8, 2, 4, 6}).to(device);
    };
    const at::Tensor query = heads(0), key = heads(1), value = heads(2);
    reset_device_counts();
    return core->forward(query, key, value, tokens, /*training=*/true);
  };
  const at::Tensor found = attend(lagging_device(0));
  EXPECT_EQ(device_counts(0).waits, 0);
  expect_same_bits(found, attend(at::kCPU), "attention");
}

TEST_F(LaggingDevice, ALabelThatNobodyCouldCheckHasALossOfNaN) {
  const ParallelState state = ParallelState::single_process(lagging_device(0));
  const at::Tensor logits = at::arange(16, at::kFloat).view({4, 4}).to(state.device());
  const at::Tensor labels = at::tensor({1, 4, -7, -100}, at::kLong).to(state.device());
  const VocabPartition vocabulary = vocab_partition(4, 4, 0, 1);
  reset_device_counts();
  const at::Tensor losses = vocab_parallel_cross_entropy(
      logits, labels, vocabulary, state.group(GroupKind::tp), /*label_smoothing=*/0.1);
  EXPECT_EQ(device_counts(0).waits, 0);
  EXPECT_TRUE(at::equal(losses.cpu().isnan(), at::tensor({0, 1, 1, 0}, at::kLong).to(at::kBool)));
  EXPECT_EQ(losses[3].item<float>(), 0);
}

/// Forward and backward of consecutive micro-batches, which accumulate their gradients.
class MicroBatches {
 public:
  MicroBatches(const TransformerConfig& config, c10::Device device)
      : config_(config),
        model_(config, {.dtype = at::kFloat, .device = device}),
        ids_(at::zeros({3, config.seq_length + 1}, at::TensorOptions(at::kLong).device(device))) {
    for (const NamedParameter& param : collect_parameters(model_))
      at::Tensor(param.tensor).mutable_grad() = at::zeros_like(param.tensor);
  }
  void set_ids(uint64_t seed) {
    ids_.copy_((sample_ids(config_, 3) * static_cast<int64_t>(seed)).remainder(config_.vocab_size));
  }
  void run() {
    const at::Tensor of_tokens =
        model_.forward(ids_.slice(1, 0, config_.seq_length), ids_.slice(1, 1));
    of_tokens.sum().backward();
    losses = of_tokens.detach();
  }
  std::vector<NamedParameter> parameters() const { return collect_parameters(model_); }

  at::Tensor losses;

 private:
  const TransformerConfig config_;
  const GPTModel model_;
  const at::Tensor ids_;
};

TEST_F(LaggingDevice, AMicroBatchOfAGptIsReplayedWithTheBitsOfTheCpu) {
  for (const TransformerConfig& config : {llama(), gpt2()}) {
    MicroBatches expected(config, at::kCPU), found(config, lagging_device(1));
    const Graph graph = captured(1, [&] { found.run(); });
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      restart(seed);
      for (MicroBatches* const side : {&expected, &found}) side->set_ids(seed);
      expected.run();
      graph->replay();
      EXPECT_EQ(device_counts(1).replays, 1);
      expect_same_bits(found.losses, expected.losses, "losses");
    }
    for (size_t i = 0; i < expected.parameters().size(); ++i)
      expect_same_bits(found.parameters()[i].tensor.grad(), expected.parameters()[i].tensor.grad(),
                       expected.parameters()[i].name);
  }
}

TEST_F(LaggingDevice, SeveralDevicesTrainAtOnce) {
  const Step expected = run_gpt(llama(), at::kFloat, at::kCPU);
  std::vector<Step> found(kLaggingDevices);
  std::vector<std::thread> threads;
  for (int device = 0; device < kLaggingDevices; ++device)
    threads.emplace_back([&found, device] {
      at::set_num_threads(1);
      found[static_cast<size_t>(device)] = run_gpt(llama(), at::kFloat, lagging_device(device));
    });
  for (std::thread& thread : threads) thread.join();
  for (const Step& step : found)
    for (const auto& [name, gradient] : expected.gradients)
      expect_same_bits(step.gradients.at(name), gradient, name);
}

}  // namespace
}  // namespace lockstep::testing
