#include <utility>

#include "lockstep/core/parameters.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/moe_layer.h"
#include "lockstep/tests/device/lagging_tests.h"

namespace lockstep::testing {
namespace {

/// Values and gradients of a computation, and the number of waits.
struct ExpertRun {
  std::vector<at::Tensor> tensors;
  int64_t waits = 0;
};

void expect_same_run(const ExpertRun& found, const ExpertRun& expected, const std::string& where) {
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < expected.tensors.size(); ++i)
    expect_same_bits(found.tensors[i], expected.tensors[i], where + std::to_string(i));
}

at::Tensor expert_numbers(std::vector<int64_t> shape, double seed, at::ScalarType dtype) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + seed).view(shape).to(dtype);
}

/// Experts 1 and 3 of four have no rows; the last two rows belong to no expert.
ExpertRun grouped_products(at::ScalarType dtype, c10::Device device) {
  const at::Tensor x = expert_numbers({11, 6}, 0.3, dtype).to(device).requires_grad_(true);
  const at::Tensor weight = expert_numbers({4, 8, 6}, 0.5, dtype).to(device).requires_grad_(true);
  const at::Tensor bias = expert_numbers({4, 8}, 0.7, dtype).to(device).requires_grad_(true);
  const at::Tensor grad = expert_numbers({11, 8}, 0.9, dtype).to(device);
  const at::Tensor ends = at::tensor({4, 4, 9, 9}, at::kInt).to(device);
  reset_device_counts();
  const auto groups = c10::make_intrusive<kernels::RowGroups>(ends);
  const at::Tensor y = add_expert_bias(grouped_linear(x, weight, groups), bias, groups);
  y.backward(grad);
  const int64_t waits = device.is_cpu() ? 0 : device_counts(device.index()).waits;
  return {{y.detach().narrow(0, 0, 9).clone(), x.grad().narrow(0, 0, 9).clone(), weight.grad(),
           bias.grad()},
          waits};
}

TEST_F(LaggingDevice, ExpertsWithoutRowsHaveGradientsOfZeroAndNobodyWaits) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const ExpertRun expected = grouped_products(dtype, at::kCPU);
    for (const int64_t empty : {1, 3}) {
      EXPECT_EQ(expected.tensors[2][empty].count_nonzero().item<int64_t>(), 0);
      EXPECT_EQ(expected.tensors[3][empty].count_nonzero().item<int64_t>(), 0);
    }
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      seed % 2 == 0 ? restart_lazy(seed) : restart(seed);
      const ExpertRun found = grouped_products(dtype, lagging_device(1));
      EXPECT_EQ(found.waits, 0);
      expect_same_run(found, expected, std::string(at::toString(dtype)) + " ");
    }
  }
}

/// Forward and backward of a layer that has biases and a shared expert. Its state is that of a lone
/// rank, which need not know the device.
ExpertRun moe_layer(c10::Device device, RouterLoadBalancing balancing = RouterLoadBalancing::none) {
  TransformerConfig config;
  config.hidden_size = 6;
  config.ffn_hidden_size = 12;
  config.moe_ffn_hidden_size = 12;
  config.moe_shared_expert_intermediate_size = 8;
  config.num_experts = 4;
  config.init_method_std = 0.5;
  config.add_bias_linear = true;
  config.activation = Activation::gelu;
  config.moe_router_load_balancing_type = balancing;
  config.moe_aux_loss_coeff = balancing == RouterLoadBalancing::none ? 0 : 0.1;
  const LayerContext context{
      .config = config, .options = at::TensorOptions(at::kFloat).device(device), .name = "mlp."};
  const MoELayer layer(context);
  const at::Tensor x = expert_numbers({8, 2, 6}, 0.4, at::kFloat).to(device).requires_grad_(true);
  reset_device_counts();
  const at::Tensor y = layer.forward(x);
  y.square().sum().backward();
  ExpertRun run{{y.detach(), x.grad()}, device.is_cpu() ? 0 : device_counts(device.index()).waits};
  for (const NamedParameter& param : collect_parameters(layer))
    run.tensors.push_back(param.tensor.grad());
  return run;
}

/// The device's kernels without those for grouped products, as CUDA has none in fp32.
class NoGroupedKernels {
 public:
  NoGroupedKernels() : kernels_(*kernels::find_device_kernels(c10::kPrivateUse1)) {
    kernels::DeviceKernels others = kernels_;
    others.grouped_rows = nullptr;
    others.grouped_matrices = nullptr;
    others.grouped_sums = nullptr;
    kernels::register_device_kernels(c10::kPrivateUse1, others);
  }
  ~NoGroupedKernels() { kernels::register_device_kernels(c10::kPrivateUse1, kernels_); }
  NoGroupedKernels(const NoGroupedKernels&) = delete;
  NoGroupedKernels& operator=(const NoGroupedKernels&) = delete;

 private:
  kernels::DeviceKernels kernels_;
};

TEST_F(LaggingDevice, ALayerOfExpertsWaitsNotAtAllAndWithoutAGroupedKernelOnce) {
  const ExpertRun expected = moe_layer(at::kCPU);
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    seed % 2 == 0 ? restart_lazy(seed) : restart(seed);
    const ExpertRun found = moe_layer(lagging_device(0));
    EXPECT_EQ(found.waits, 0);
    expect_same_run(found, expected, "grouped ");
    const NoGroupedKernels none;
    const ExpertRun one_by_one = moe_layer(lagging_device(0));
    EXPECT_EQ(one_by_one.waits, 1);
    expect_same_run(one_by_one, expected, "one by one ");
  }
}

TEST_F(LaggingDevice, ChoicesOfAllMicroBatchesAreCountedOnTheDeviceOfTheLayer) {
  const ExpertRun expected = moe_layer(at::kCPU, RouterLoadBalancing::global_aux_loss);
  const ExpertRun found = moe_layer(lagging_device(2), RouterLoadBalancing::global_aux_loss);
  EXPECT_EQ(found.waits, 0);
  expect_same_run(found, expected, "balanced ");
}

}  // namespace
}  // namespace lockstep::testing
