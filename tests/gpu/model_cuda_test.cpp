// Training on one GPU compared with the CPU, for options that change the model or its step.

#include <cmath>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "lockstep/core/config_io.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/tests/gpu/cuda_fixture.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

using Overrides = std::vector<std::string>;

struct ModelCase {
  std::string name;
  Overrides overrides;
  double tolerance = 1e-8;  ///< of losses and norms, relative to the CPU's
};

void PrintTo(const ModelCase& model, std::ostream* out) { *out << model.name; }

class CudaTraining : public ::testing::TestWithParam<ModelCase> {
 protected:
  Config config(const Overrides& overrides) const {
    Overrides all = {"data.path=" + folder_.write("text", synthetic_text()),
                     "train.precision=fp64"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 32 num_attention_heads: 4 ffn_hidden_size: 64 "
        "seq_length: 32 } "
        "train { micro_batch_size: 2 global_batch_size: 4 eval_iters: 1 train_iters: 6 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// Losses and norms of six steps, and the validation loss. The CPU has no graphs.
  std::vector<double> curve(c10::Device device, Overrides overrides) const {
    if (device.is_cpu())
      std::erase_if(overrides, [](auto& field) { return field.starts_with("train.cuda_graph="); });
    Trainer trainer(config(overrides), ParallelState::single_process(device));
    std::vector<double> values;
    for (int step = 0; step < 6; ++step) {
      const IterationMetrics metrics = trainer.train_step();
      values.push_back(metrics.lm_loss);
      values.push_back(metrics.grad_norm);
    }
    values.push_back(trainer.validate().validation_loss);
    return values;
  }

  /// Resets the switches that train.deterministic sets.
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  TemporaryFolder folder_;
};

TEST_P(CudaTraining, FollowsTheCpu) {
  const std::vector<double> expected = curve(c10::kCPU, GetParam().overrides);
  ASSERT_TRUE(std::isfinite(expected.back()));
  ASSERT_LT(expected[10], 0.98 * expected[0]) << "a run that does not train shows nothing";
  LOCKSTEP_NEEDS_CUDA();
  const std::vector<double> found = curve(kCuda, GetParam().overrides);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(std::abs(found[i] - expected[i]), GetParam().tolerance * expected[i])
        << "number " << i << ": " << found[i] << ", on the CPU " << expected[i];
}

const ModelCase kModels[] = {
    {"tied", {}},
    {"untied", {"model.untie_embeddings_and_output_weights=true"}},
    {"gqa", {"model.num_query_groups=2"}},
    {"gpt2",
     {"model.normalization=LayerNorm", "model.activation=gelu", "model.add_bias_linear=true",
      "model.position_embedding_type=learned_absolute"}},
    {"padded_vocabulary", {"model.make_vocab_size_divisible_by=384"}},
    {"dropout", {"model.hidden_dropout=0.1", "model.attention_dropout=0.1"}},
    {"label_smoothing", {"model.label_smoothing=0.1"}},
    {"recompute_full", {"model.recompute_granularity=full", "model.hidden_dropout=0.1"}},
    {"recompute_selective", {"model.recompute_granularity=selective"}},
    {"experts",
     {"model.num_experts=4", "model.moe_router_topk=2", "model.moe_aux_loss_coeff=0.01",
      "model.moe_z_loss_coeff=0.001"}},
    {"experts_sigmoid",
     {"model.num_experts=4", "model.moe_router_score_function=sigmoid",
      "model.moe_router_enable_expert_bias=true", "model.moe_shared_expert_intermediate_size=32"}},
    {"experts_with_capacity", {"model.num_experts=4", "model.moe_expert_capacity_factor=1"}},
    {"sgd", {"optimizer.optimizer=sgd", "optimizer.lr=0.3"}},
    {"muon", {"optimizer.optimizer=muon"}, 1e-6},
    {"distributed_optimizer",
     {"ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=true",
      "ddp.overlap_param_gather=true", "ddp.bucket_size=3000"}},
    {"recorded_micro_batches", {"train.cuda_graph=microbatch", "model.hidden_dropout=0.1"}},
    {"recorded_steps",
     {"train.cuda_graph=step", "model.hidden_dropout=0.1", "optimizer.lr_decay_style=cosine",
      "ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
      "ddp.overlap_grad_reduce=true", "ddp.bucket_size=3000"}},
    {"deterministic", {"train.deterministic=true"}},
    {"fp32", {"train.precision=fp32"}, 1e-3},
    {"narrow_moments",
     {"train.precision=fp32", "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"},
     0.01},
    {"bf16", {"train.precision=bf16"}, 0.05},
    {"bf16_gradients", {"train.precision=bf16", "ddp.grad_reduce_in_fp32=false"}, 0.05},
    {"fp16_with_a_loss_scale", {"train.precision=fp16", "optimizer.initial_loss_scale=1024"}, 0.02},
    {"offloaded",
     {"optimizer.offload=true", "model.recompute_granularity=full", "model.hidden_dropout=0.1",
      "model.offload_activations=true"}},
};

INSTANTIATE_TEST_SUITE_P(Models, CudaTraining, ::testing::ValuesIn(kModels),
                         [](const auto& info) { return info.param.name; });

/// Number of calls in three steps that make the host wait for the device.
int64_t waits_of_three_steps(Trainer& trainer, bool on_cuda) {
  namespace profiler = torch::profiler::impl;
  std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU};
  if (on_cuda) activities.insert(profiler::ActivityType::CUDA);
  const profiler::ProfilerConfig options(profiler::ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(options, activities);
  torch::autograd::profiler::enableProfiler(options, activities, {at::RecordScope::FUNCTION});
  for (int step = 0; step < 3; ++step) trainer.train_step();
  const auto result = torch::autograd::profiler::disableProfiler();
  EXPECT_FALSE(result->events().empty());
  int64_t waits = 0, launches = 0;
  for (const auto& event : result->events()) {
    const std::string name = event.name();
    if (name.starts_with("cuda") && name.find("Synchronize") != std::string::npos) ++waits;
    if (name.find("LaunchKernel") != std::string::npos) ++launches;
  }
  EXPECT_EQ(launches > 0, on_cuda);
  return waits;
}

class CudaWaits : public CudaTraining {};

TEST_P(CudaWaits, ADenseStepWaitsForItsDeviceOnce) {
  const bool on_cuda = cuda_device_count() > 0;
  Trainer trainer(config(GetParam().overrides),
                  ParallelState::single_process(on_cuda ? kCuda : c10::Device(c10::kCPU)));
  for (int step = 0; step < 2; ++step) trainer.train_step();
  const int64_t waits = waits_of_three_steps(trainer, on_cuda);
  LOCKSTEP_NEEDS_CUDA();
  // One more at the start or end of Kineto.
  EXPECT_LE(waits, 3 + 1);
  EXPECT_GE(waits, 3) << "the loss was not read";
}

INSTANTIATE_TEST_SUITE_P(Models, CudaWaits,
                         ::testing::ValuesIn({kModels[0], kModels[5], kModels[14],
                                              kModels[std::size(kModels) - 1]}),
                         [](const auto& info) { return info.param.name; });

std::vector<at::Tensor> gradients_of_two_micro_batches(c10::Device device, bool offload) {
  SmallNet net;
  net.to(device);
  DistributedDataParallel ddp(net, ParallelState::single_process(device));
  {
    const auto guard = ddp.no_sync();
    net.loss(SmallNet::samples(0, 4).to(device)).backward();
  }
  net.loss(SmallNet::samples(4, 4).to(device)).backward();
  finalize_model_grads({&ddp}, at::full({}, 8));
  if (offload) {
    ddp.offload_grad_buffers();
    ddp.restore_grad_buffers();
  }
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& p : net.parameters()) gradients.push_back(p.grad().cpu());
  return gradients;
}

TEST(Cuda, ADataParallelStepLeavesTheSameGradientsAsTheCpuAlsoAfterTheyWereOffloaded) {
  const auto expected = gradients_of_two_micro_batches(c10::kCPU, false);
  LOCKSTEP_NEEDS_CUDA();
  for (const bool offload : {false, true}) {
    const auto found = gradients_of_two_micro_batches(kCuda, offload);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_LT(relative_distance(found[i], expected[i]), 1e-11) << i;
  }
}

}  // namespace
}  // namespace lockstep::testing
