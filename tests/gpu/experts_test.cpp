// Experts on a GPU. Without one, all tests are skipped.

#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/parameters.h"
#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/moe_layer.h"
#include "lockstep/parallel_state/devices.h"

namespace lockstep {
namespace {

const c10::Device kGpu(c10::kCUDA, 0);

class CudaExperts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

at::Tensor expert_wave(std::vector<int64_t> shape, double seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + seed).view(shape);
}

struct Products {
  at::Tensor y, of_x, of_weight, of_bias;
};

/// Experts 1 and 3 of four have no rows; the last 8 rows are NaN and belong to no expert.
Products products(at::ScalarType dtype, c10::Device device, at::ScalarType computed) {
  const auto on_device = [&](const at::Tensor& values) {
    return values.to(dtype).to(device, computed).requires_grad_(true);
  };
  const at::Tensor rows = expert_wave({72, 32}, 0.3), grad = expert_wave({72, 48}, 0.9);
  for (const at::Tensor& values : {rows, grad}) values.narrow(0, 64, 8).fill_(std::nan(""));
  const at::Tensor x = on_device(rows), weight = on_device(expert_wave({4, 48, 32}, 0.5)),
                   bias = on_device(expert_wave({4, 48}, 0.7));
  const auto groups =
      c10::make_intrusive<kernels::RowGroups>(at::tensor({24, 24, 64, 64}, at::kInt).to(device));
  const at::Tensor y = add_expert_bias(grouped_linear(x, weight, groups), bias, groups);
  y.backward(on_device(grad).detach());
  const auto host = [](const at::Tensor& t) { return t.detach().cpu().to(at::kDouble); };
  return {host(y).narrow(0, 0, 64), host(x.grad()).narrow(0, 0, 64), host(weight.grad()),
          host(bias.grad())};
}

TEST_F(CudaExperts, ProductsEqualTheCpusAndExpertsWithoutRowsHaveGradientsOfZero) {
  for (const auto& [dtype, tolerance] :
       std::vector<std::pair<at::ScalarType, double>>{{at::kBFloat16, 0.03}, {at::kFloat, 1e-4}}) {
    const Products expected = products(dtype, at::kCPU, at::kDouble);
    // Frees blocks of NaN, so that uninitialized memory is likely to hold NaN.
    for (int i = 0; i < 4; ++i)
      at::full({4, 48, 32}, std::nan(""), at::TensorOptions(kGpu).dtype(dtype));
    const Products found = products(dtype, kGpu, dtype);
    EXPECT_TRUE(at::allclose(found.y, expected.y, tolerance, tolerance));
    EXPECT_TRUE(at::allclose(found.of_x, expected.of_x, tolerance, tolerance));
    EXPECT_TRUE(at::allclose(found.of_weight, expected.of_weight, tolerance, 10 * tolerance));
    EXPECT_TRUE(at::allclose(found.of_bias, expected.of_bias, tolerance, 10 * tolerance));
    for (const int64_t empty : {1, 3}) {
      EXPECT_EQ(found.of_weight[empty].count_nonzero().item<int64_t>(), 0);
      EXPECT_EQ(found.of_bias[empty].count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST_F(CudaExperts, EveryRunOfALayerHasTheSameBits) {
  TransformerConfig config;
  config.hidden_size = 64;
  config.ffn_hidden_size = 128;
  config.moe_ffn_hidden_size = 128;
  config.num_experts = 8;
  config.moe_router_topk = 3;
  config.init_method_std = 0.5;
  config.moe_expert_capacity_factor = 1;
  LayerContext context{
      .config = config, .options = at::TensorOptions(at::kBFloat16).device(kGpu), .name = "mlp."};
  context.state = ParallelState::single_process(kGpu);
  MoELayer layer(context);
  std::vector<at::Tensor> first;
  for (int run = 0; run < 5; ++run) {
    layer.zero_grad();
    const at::Tensor x =
        expert_wave({512, 2, 64}, 0.4).to(kGpu, at::kBFloat16).requires_grad_(true);
    const at::Tensor y = layer.forward(x);
    y.square().sum().backward();
    std::vector<at::Tensor> values = {y.detach(), x.grad()};
    for (const NamedParameter& param : collect_parameters(layer))
      values.push_back(param.tensor.grad().clone());
    if (run == 0) first = values;
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_TRUE(at::equal(values[i], first[i])) << "run " << run << ", tensor " << i;
  }
}

}  // namespace
}  // namespace lockstep
