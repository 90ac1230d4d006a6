// Training on the asynchronous device, over a backend with NCCL's rules: losses, norms and all
// final weights have the bits of the same ranks on the CPU, and a step waits for its device as
// often as docs/gpu.md says.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

using Overrides = std::vector<std::string>;

constexpr int kSteps = 3;

/// Of delays; LOCKSTEP_DEVICE_SEEDS=20 tries more.
uint64_t seeds() {
  const char* const text = std::getenv("LOCKSTEP_DEVICE_SEEDS");
  return text ? std::stoul(text) : 2;
}

struct Layout {
  std::string name;
  int64_t world;
  Overrides overrides;
  /// Times that a rank's host may wait for its device in a step after the first; unset: any number.
  std::optional<int64_t> waits = 1;
  /// Of weights, in parts of the largest, where the device takes another kernel than the CPU; and
  /// of losses and norms.
  double tolerance = 0;
};

void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

/// What rank 0 saw, and the weights of all ranks.
struct Outcome {
  std::vector<double> curve;
  std::map<std::pair<int64_t, std::string>, at::Tensor> weights;
  std::map<int64_t, int64_t> waits;  ///< of a rank, the most of any step after the first
};

class DeviceTraining : public ::testing::TestWithParam<Layout> {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  DeviceTraining() { path_ = folder_.write("text", synthetic_text()); }

  Config config() const {
    Overrides all = {"data.path=" + path_};
    all.insert(all.end(), GetParam().overrides.begin(), GetParam().overrides.end());
    return parse_config(
        "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
        "seq_length: 16 vocab_size: 256 position_embedding_type: \"rope\" } "
        "train { global_batch_size: 8 micro_batch_size: 1 eval_iters: 1 train_iters: 3 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// One rank's run. `waits()` counts those of its device so far.
  static void train(const Config& config, const ParallelState& state, Outcome& outcome,
                    std::mutex& mutex, const std::function<int64_t()>& waits) {
    Trainer trainer(config, state);
    std::vector<double> curve;
    int64_t most = 0;
    for (int step = 0; step < kSteps; ++step) {
      const int64_t before = waits();
      const IterationMetrics metrics = trainer.train_step();
      if (step > 0) most = std::max(most, waits() - before);
      curve.push_back(metrics.lm_loss);
      curve.push_back(metrics.grad_norm);
    }
    curve.push_back(trainer.validate().validation_loss);
    const std::lock_guard<std::mutex> lock(mutex);
    if (state.rank() == 0) outcome.curve = curve;
    outcome.waits[state.rank()] = most;
    for (const auto& chunk : trainer.training_model().chunks())
      for (const NamedParameter& param : collect_parameters(*chunk))
        outcome.weights[{state.rank(), param.name}] = param.tensor.detach().to(at::kCPU).clone();
  }

  Outcome on_cpu() const {
    const Config config = this->config();
    Outcome outcome;
    std::mutex mutex;
    run_ranks(GetParam().world,
              [&](const ParallelState& state) {
                train(config, state, outcome, mutex, [] { return int64_t{0}; });
              },
              {.sizes = parallel_options(config, c10::kCPU).sizes});
    return outcome;
  }

  Outcome on_devices(uint64_t seed) const {
    const Config config = this->config();
    Outcome outcome;
    std::mutex mutex;
    DeviceRankOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    options.device.seed = seed;
    if (seed % 2 == 0) {  // every stream lags until somebody waits for it
      options.device.delayed = 1;
      options.device.longest_delay = std::chrono::milliseconds(20);
    }
    run_device_ranks(
        GetParam().world,
        [&](const ParallelState& state) {
          const int device = state.device().index();
          train(config, state, outcome, mutex, [&] { return device_counts(device).waits; });
        },
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
  std::string path_;
};

TEST_P(DeviceTraining, TrainsAsTheCpuAndWaitsNoMoreThanItMust) {
  const Outcome expected = on_cpu();
  for (uint64_t seed = 1; seed <= seeds(); ++seed) {
    const Outcome found = on_devices(seed);
    expect_same(found, expected, "seed " + std::to_string(seed));
    if (!GetParam().waits) continue;
    for (const auto& [rank, waits] : found.waits)
      EXPECT_LE(waits, *GetParam().waits) << "seed " << seed << ", rank " << rank;
  }
}

const Overrides kDouble = {"train.precision=fp64"};
const Overrides kOverlap = {"ddp.overlap_grad_reduce=true", "ddp.bucket_size=1000"};
const Overrides kSharded = {"ddp.overlap_grad_reduce=true", "ddp.bucket_size=1000",
                            "ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"};

Overrides with(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

Overrides parallel(const std::map<std::string, int64_t>& sizes, const Overrides& more = {}) {
  Overrides list;
  for (const auto& [axis, size] : sizes)
    list.push_back("parallel." + axis + "_parallel_size=" + std::to_string(size));
  return with(list, more);
}

const Layout kLayouts[] = {
    {"one_rank", 1, {}},
    {"dp2", 2, {}},
    {"dp2_average", 2, {"ddp.calculate_per_token_loss=false"}},
    {"dp2_average_bf16",
     2,
     {"ddp.calculate_per_token_loss=false", "ddp.grad_reduce_in_fp32=false",
      "train.precision=bf16"}},
    {"dp2_bf16_gradients", 2, {"ddp.grad_reduce_in_fp32=false", "train.precision=bf16"}},
    {"dp2_overlap", 2, kOverlap},
    {"dp2_sharded", 2, kSharded},
    {"dp4_sharded_instances", 4,
     with(kSharded, {"parallel.num_distributed_optimizer_instances=2"})},
    {"tp2", 2, parallel({{"tensor_model", 2}})},
    {"tp2_sp_dropout", 2,
     parallel({{"tensor_model", 2}},
              {"parallel.sequence_parallel=true", "model.hidden_dropout=0.1"})},
    {"pp2", 2, parallel({{"pipeline_model", 2}})},
    {"pp2_zb", 2, parallel({{"pipeline_model", 2}}, {"parallel.pipeline_schedule=zb-h1"})},
    {"pp3_interleaved", 3,
     parallel({{"pipeline_model", 3}, {"virtual_pipeline_model", 2}},
              {"model.num_layers=6", "train.global_batch_size=6"})},
    {"pp4_interleaved", 4,
     parallel({{"pipeline_model", 4}, {"virtual_pipeline_model", 2}}, {"model.num_layers=8"})},
    {"cp2_p2p", 2, parallel({{"context", 2}}, kDouble), 1, 1e-10},
    {"cp2_a2a", 2, parallel({{"context", 2}}, with(kDouble, {"parallel.cp_comm_type=a2a"})), 1,
     1e-10},
    {"cp2_all_gather", 2,
     parallel({{"context", 2}}, with(kDouble, {"parallel.cp_comm_type=all_gather"})), 1, 1e-10},
    {"cp4_p2p", 4, parallel({{"context", 4}}, kDouble), 1, 1e-10},
    {"cp4_a2a_p2p", 4,
     parallel({{"context", 4}},
              with(kDouble, {"parallel.cp_comm_type=a2a+p2p",
                             "parallel.hierarchical_context_parallel_sizes=2,2"})),
     1, 1e-10},
    {"tp2_pp2_dp2", 8,
     with(parallel({{"tensor_model", 2}, {"pipeline_model", 2}},
                   {"parallel.sequence_parallel=true"}),
          kSharded)},
};

const Overrides kExperts = {"model.num_experts=4", "model.moe_router_topk=2",
                            "model.moe_aux_loss_coeff=0.1", "model.moe_z_loss_coeff=0.01"};
const Overrides kBiases = {"model.add_bias_linear=true", "model.activation=gelu",
                           "model.moe_shared_expert_intermediate_size=8"};
const Overrides kCapacity = {"model.moe_expert_capacity_factor=0.8"};
const Overrides kPadded = {"model.moe_expert_capacity_factor=1.2",
                           "model.moe_pad_expert_input_to_capacity=true"};
const Overrides kRecompute = {"model.recompute_granularity=full", "model.recompute_num_layers=4"};
const Overrides kAllGather = {"model.moe_token_dispatcher_type=allgather"};

Overrides experts(const std::map<std::string, int64_t>& sizes, const Overrides& more = {}) {
  return parallel(sizes, with(kExperts, more));
}

/// Of a step with expert parallelism: one for each of 4 layers in each micro-batch, and the step's.
int64_t waits_of(int64_t microbatches) { return 1 + 4 * microbatches; }

const Layout kExpertLayouts[] = {
    {"one_rank", 1, experts({})},
    {"bf16", 1, experts({}, {"train.precision=bf16"})},
    {"biases_shared", 1, experts({}, kBiases)},
    {"biases_bf16", 1, experts({}, with(kBiases, {"train.precision=bf16"}))},
    {"capacity", 1, experts({}, with(kCapacity, kBiases))},
    {"padded", 1, experts({}, kPadded)},
    {"recompute", 1, experts({}, with(kRecompute, kCapacity))},
    {"allgather", 1, experts({}, with(kAllGather, kCapacity))},
    {"expert_bias", 1,
     experts({}, {"model.moe_router_score_function=sigmoid",
                  "model.moe_router_enable_expert_bias=true"})},
    {"tp2_etp2", 2, experts({{"tensor_model", 2}}, {"parallel.sequence_parallel=true"})},
    {"tp2_etp2_capacity", 2, experts({{"tensor_model", 2}}, with(kCapacity, kRecompute))},
    {"etp2_allgather", 2, experts({{"expert_tensor", 2}}, with(kAllGather, kCapacity))},
    {"ep2", 2, experts({{"expert_model", 2}}), waits_of(4)},
    {"ep2_capacity", 2, experts({{"expert_model", 2}}, with(kCapacity, kBiases)), waits_of(4)},
    {"ep2_recompute", 2, experts({{"expert_model", 2}}, with(kRecompute, kPadded)), waits_of(4)},
    {"ep2_allgather", 2, experts({{"expert_model", 2}}, with(kAllGather, kRecompute)), waits_of(4)},
    {"tp2_ep2_etp2", 4,
     experts({{"tensor_model", 2}, {"expert_model", 2}, {"expert_tensor", 2}},
             {"parallel.sequence_parallel=true"}),
     waits_of(4)},
};

INSTANTIATE_TEST_SUITE_P(Experts, DeviceTraining, ::testing::ValuesIn(kExpertLayouts),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Layouts, DeviceTraining, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::testing
