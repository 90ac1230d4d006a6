// Our kernels, and operators of libtorch that are called with unusual arguments, against the CPU.
// scripts/gpu_check runs these again under compute-sanitizer.

#include <cmath>
#include <vector>

#include "lockstep/distributed/owned_grads.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/fingerprint.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/models/context_parallel_blocks.h"
#include "lockstep/models/core_attention.h"
#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/weight_gradient.h"
#include "lockstep/tests/gpu/cuda_fixture.h"
#include "lockstep/tests/support/adamw_scalars.h"
#include "lockstep/tests/support/awaited_gradients.h"

namespace lockstep::testing {
namespace {

using kernels::UpdateSegments;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kNumel = 100003;
const UpdateSegments kSegments = {{0, 3}, {3, 3000}, {3100, 3101}, {4000, 8096}, {8097, kNumel}};

/// Weights, gradients, mean and mean square.
Tensors operands(at::ScalarType weights, at::ScalarType grads, at::ScalarType moments) {
  return {wave(kNumel, 0.3, weights), wave(kNumel, 0.7, grads), wave(kNumel, 0.2, moments) * 0.1,
          wave(kNumel, 0.9, moments).square()};
}

Tensors on_cuda(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.to(kCuda));
  return copies;
}

void three_steps_of_adamw(const Tensors& t, const at::Tensor& low,
                          const kernels::StepControl& control = {}) {
  for (int step = 1; step <= 3; ++step) {
    kernels::AdamWScalars scalars = scalars_of_step(step);
    scalars.grad_scale = 0.5;
    kernels::adamw(t[0], t[1], t[2], t[3], low, kSegments, scalars, control);
  }
}

void expect_close(const Tensors& found, const Tensors& expected, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LT(relative_distance(found[i], expected[i]), tolerance) << "operand " << i;
}

TEST(Kernels, AdamWEqualsTheCpu) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const Tensors cpu = operands(dtype, dtype, dtype);
    const bool low = dtype == at::kFloat;
    const at::Tensor cpu_low = low ? at::zeros({kNumel}, at::kBFloat16) : at::Tensor();
    Tensors before;
    for (const at::Tensor& tensor : cpu) before.push_back(tensor.clone());
    three_steps_of_adamw(cpu, cpu_low);
    EXPECT_GT(relative_distance(before[0], cpu[0]), 1e-3) << "the step changes nothing";
    LOCKSTEP_NEEDS_CUDA();
    const Tensors gpu = on_cuda(before);
    const at::Tensor gpu_low = low ? at::zeros_like(cpu_low, kCuda) : at::Tensor();
    three_steps_of_adamw(gpu, gpu_low);
    expect_close(gpu, cpu, low ? 1e-5 : 1e-12);
    if (!low) continue;
    for (const kernels::UpdateSegment& segment : kSegments)
      EXPECT_TRUE(at::equal(gpu_low.slice(0, segment.start, segment.end),
                            gpu[0].slice(0, segment.start, segment.end).to(at::kBFloat16)));
  }
}

TEST(Kernels, AdamWWithNarrowGradientsAndMomentsEqualsTheCpu) {
  for (const auto grads : {at::kBFloat16, at::kHalf})
    for (const auto copy : {at::kBFloat16, at::kHalf}) {
      const Tensors cpu = operands(at::kFloat, grads, at::kBFloat16);
      const at::Tensor cpu_low = at::zeros({kNumel}, copy);
      Tensors before;
      for (const at::Tensor& tensor : cpu) before.push_back(tensor.clone());
      three_steps_of_adamw(cpu, cpu_low);
      LOCKSTEP_NEEDS_CUDA();
      const Tensors gpu = on_cuda(before);
      three_steps_of_adamw(gpu, at::zeros_like(cpu_low, kCuda));
      // A moment halfway between two bf16 numbers may be rounded either way, which changes each of
      // the three updates.
      expect_close({gpu[0]}, {cpu[0]}, 2e-4);
      expect_close({gpu[2], gpu[3]}, {cpu[2], cpu[3]}, 0.01);
    }
}

TEST(Kernels, AStepThatIsSkippedOnTheDeviceChangesNothing) {
  const Tensors cpu = operands(at::kFloat, at::kFloat, at::kFloat);
  const auto control = [](double scale, double proceed, c10::Device device) {
    return at::tensor({scale, proceed}, at::kDouble).to(device);
  };
  Tensors kept;
  for (const at::Tensor& tensor : cpu) kept.push_back(tensor.clone());
  three_steps_of_adamw(cpu, {}, control(NAN, 0, at::kCPU));
  for (size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(at::equal(cpu[i], kept[i])) << i;
  LOCKSTEP_NEEDS_CUDA();
  const Tensors gpu = on_cuda(kept);
  three_steps_of_adamw(gpu, {}, control(NAN, 0, kCuda));
  for (size_t i = 0; i < gpu.size(); ++i) EXPECT_TRUE(at::equal(gpu[i].cpu(), kept[i])) << i;
  three_steps_of_adamw(cpu, {}, control(0.25, 1, at::kCPU));
  three_steps_of_adamw(gpu, {}, control(0.25, 1, kCuda));
  expect_close(gpu, cpu, 1e-5);
}

TEST(Kernels, SgdEqualsTheCpu) {
  for (const auto dtype : {at::kFloat, at::kDouble})
    for (const double momentum : {0.0, 0.9}) {
      const Tensors cpu = operands(dtype, dtype, dtype);
      const auto update = [&](const Tensors& t) {
        for (int step = 0; step < 3; ++step)
          kernels::sgd(t[0], t[1], momentum > 0 ? t[2] : at::Tensor(), {}, kSegments,
                       {.learning_rate = 0.01, .momentum = momentum, .weight_decay = 0.1});
      };
      Tensors before;
      for (const at::Tensor& tensor : cpu) before.push_back(tensor.clone());
      update(cpu);
      LOCKSTEP_NEEDS_CUDA();
      const Tensors gpu = on_cuda(before);
      update(gpu);
      expect_close(gpu, cpu, dtype == at::kFloat ? 1e-5 : 1e-12);
    }
}

TEST(Kernels, SumOfSquaresEqualsTheCpuAndIsTheSameInEveryRun) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const int64_t n : {0, 1, 257, 1 << 20}) {
      const at::Tensor x = wave(n, 0.37, dtype);
      const auto expected = kernels::sum_of_squares(x).item<double>();
      EXPECT_NEAR(expected, x.to(at::kDouble).square().sum().item<double>(), 1e-9 * (1 + expected));
      LOCKSTEP_NEEDS_CUDA();
      const at::Tensor on_gpu = x.to(kCuda), first = kernels::sum_of_squares(on_gpu);
      EXPECT_TRUE(first.is_cuda());
      EXPECT_NEAR(first.item<double>(), expected, 1e-12 * (1 + expected));
      EXPECT_EQ(kernels::sum_of_squares(on_gpu).item<double>(), first.item<double>());
    }
}

TEST(Kernels, FingerprintsEqualThoseOfTheCpu) {
  const at::Tensor all = wave(1 << 20, 0.37, at::kBFloat16).view(at::kByte);
  for (const int64_t first : {0, 1, 2, 4, 16})  // aligned for packs, or not
    for (const int64_t count : {0, 1, 3, 4, 15, 16, 17, 4095, 4097, (1 << 21) - 20}) {
      const at::Tensor bytes = all.narrow(0, first, count);
      const auto expected = kernels::fingerprint(bytes).item<int64_t>();
      EXPECT_EQ(kernels::fingerprint_by_operators(bytes).item<int64_t>(), expected);
      LOCKSTEP_NEEDS_CUDA();
      const at::Tensor found = kernels::fingerprint(all.to(kCuda).narrow(0, first, count));
      EXPECT_TRUE(found.is_cuda());
      EXPECT_EQ(found.item<int64_t>(), expected) << first << " " << count;
    }
}

// libtorch's own operator for this has no bf16 on CUDA.
TEST(Kernels, NarrowGradientsAreDividedInFp32) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor grad = wave(5001, 0.37, dtype) * 100;
    const at::Tensor expected = (grad.to(at::kFloat) * (1.0F / 70001.0F)).to(dtype);
    const auto divided = [&](c10::Device device) {
      const at::Tensor copy = grad.to(device, /*non_blocking=*/false, /*copy=*/true);
      divide_grads({copy}, at::full({}, 70001.0, at::TensorOptions(device).dtype(at::kDouble)));
      return copy.cpu();
    };
    EXPECT_LT(relative_distance(divided(at::kCPU), expected), 0.005);
    LOCKSTEP_NEEDS_CUDA();
    EXPECT_LT(relative_distance(divided(kCuda), expected), 0.005);
  }
}

/// Output and gradients of one product for each of three experts.
Tensors through_experts(const std::vector<int64_t>& rows, c10::Device device,
                        at::ScalarType dtype) {
  const auto leaf = [&](std::vector<int64_t> shape, double speed) {
    const at::Tensor values = wave(c10::multiply_integers(shape), speed, at::kDouble).view(shape);
    return values.to(device, dtype).requires_grad_(true);
  };
  const at::Tensor input = leaf({24, 16}, 0.7), weight = leaf({3, 32, 16}, 0.3);
  const at::Tensor ends = at::tensor(rows, at::kInt).cumsum(0).to(device, at::kInt);
  const at::Tensor output =
      grouped_linear(input, weight, c10::make_intrusive<kernels::RowGroups>(ends));
  (output * wave(24 * 32, 1.1, at::kDouble).view({24, 32}).to(device, dtype)).sum().backward();
  return {output.detach(), input.grad(), weight.grad()};
}

// In bf16, this is one launch of at::_grouped_mm. An expert without rows has inner size 0.
TEST(Kernels, AnExpertWithoutRowsHasAGradientOfZeros) {
  const std::vector<std::vector<int64_t>> routes = {{24, 0, 0}, {0, 24, 0}, {16, 0, 8}, {8, 8, 8}};
  for (const std::vector<int64_t>& rows : routes) {
    const Tensors expected = through_experts(rows, at::kCPU, at::kDouble);
    for (int64_t expert = 0; expert < 3; ++expert)
      EXPECT_EQ(expected[2][expert].count_nonzero().item<int64_t>() == 0, rows[expert] == 0);
    LOCKSTEP_NEEDS_CUDA();
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const Tensors found = through_experts(rows, kCuda, dtype);
      expect_close(found, expected, dtype == at::kBFloat16 ? 0.03 : 1e-5);
      for (int64_t expert = 0; expert < 3; ++expert)
        EXPECT_EQ(found[2][expert].count_nonzero().item<int64_t>() == 0, rows[expert] == 0)
            << "expert " << expert << ", " << dtype;
    }
  }
}

/// Output and gradients of queries, keys and values for causal attention in two blocks of keys.
Tensors through_blocks(c10::Device device, at::ScalarType dtype, int64_t channels) {
  constexpr int64_t kLength = 32, kHalf = kLength / 2;
  const auto values = [&](int64_t heads, double speed) {
    return wave(kLength * 2 * heads * channels, speed, at::kDouble)
        .view({kLength, 2, heads, channels})
        .to(device, dtype);
  };
  // The second half of the queries attends to itself and to the kHalf tokens before it: a window.
  const at::Tensor query = values(4, 0.7).slice(0, kHalf), key = values(2, 0.3),
                   value = values(2, 1.1), grad = values(4, 0.9).slice(0, kHalf);
  const AttentionKernel kernel = attention_kernel(query);
  const std::vector<AttentionBlock> blocks = {
      {.queries = {0, kHalf}, .keys = {0, kHalf}, .mask = BlockMask::anti_causal},
      {.queries = {0, kHalf}, .keys = {kHalf, kHalf}, .mask = BlockMask::causal}};
  BlockwiseAttention attention(query, kernel);
  for (const AttentionBlock& block : blocks) attention.add(block, key, value);
  const auto wide = at::TensorOptions(device).dtype(BlockwiseAttentionGradient::wide(query));
  const at::Tensor of_key = at::zeros(key.sizes(), wide), of_value = at::zeros(key.sizes(), wide);
  BlockwiseAttentionGradient gradient(query, attention.output(), attention.log_sum_exp(), grad,
                                      kernel);
  for (const AttentionBlock& block : blocks) gradient.add(block, key, value, of_key, of_value);
  return {attention.output(), gradient.query_gradient(), of_key, of_value};
}

TEST(Kernels, BlocksOfContextParallelAttentionEqualTheCpu) {
  // Flash attention does not take heads of 12 channels.
  for (const int64_t channels : {16, 12}) {
    const Tensors expected = through_blocks(at::kCPU, at::kDouble, channels);
    EXPECT_GT(expected[2].abs().min().item<double>(), 0);
    LOCKSTEP_NEEDS_CUDA();
    const auto half = at::TensorOptions(kCuda).dtype(at::kHalf);
    EXPECT_EQ(attention_kernel(at::zeros({1, 1, 1, channels}, half)),
              channels == 16 ? AttentionKernel::cuda_flash : AttentionKernel::plain);
    expect_close(through_blocks(kCuda, at::kDouble, channels), expected, 1e-12);
    expect_close(through_blocks(kCuda, at::kFloat, channels), expected, 1e-4);
    for (const auto narrow : {at::kBFloat16, at::kHalf})
      expect_close(through_blocks(kCuda, narrow, channels), expected, 0.04);
  }
}

/// Output and gradients of queries, keys and values, with two key heads for four query heads.
Tensors through_groups(c10::Device device, at::ScalarType dtype) {
  const auto values = [&](int64_t heads, double speed) {
    return wave(24 * 2 * heads * 16, speed, at::kDouble)
        .view({24, 2, heads, 16})
        .to(device, dtype)
        .requires_grad_(true);
  };
  const at::Tensor query = values(4, 0.7), key = values(2, 0.3), value = values(2, 1.1);
  const at::Tensor output = causal_attention(query, key, value);
  output.backward(wave(output.numel(), 0.9, at::kDouble).view(output.sizes()).to(device, dtype));
  return {output.detach(), query.grad(), key.grad(), value.grad()};
}

TEST(Kernels, GroupedQueriesEqualTheCpu) {
  const Tensors expected = through_groups(at::kCPU, at::kDouble);
  LOCKSTEP_NEEDS_CUDA();
  expect_close(through_groups(kCuda, at::kDouble), expected, 1e-12);
  expect_close(through_groups(kCuda, at::kFloat), expected, 1e-4);
  for (const auto narrow : {at::kBFloat16, at::kHalf})
    expect_close(through_groups(kCuda, narrow), expected, 0.04);
}

/// Adds two gradients of a weight of `dtype` to a buffer in fp32.
at::Tensor through_buffer(c10::Device device, at::ScalarType dtype) {
  const auto matrix = [&](int64_t rows, int64_t columns, double speed) {
    return wave(rows * columns, speed, at::kDouble).view({rows, columns}).to(device, dtype);
  };
  const at::Tensor weight = matrix(48, 32, 0.2).requires_grad_(true);
  weight.mutable_grad() = at::zeros({48, 32}, at::TensorOptions(device).dtype(at::kFloat));
  int calls = 0;
  count_gradients(weight, calls);
  for (const double speed : {0.3, 0.8})
    EXPECT_TRUE(add_weight_gradient(weight, matrix(300, 48, speed), matrix(300, 32, speed + 0.1)));
  return weight.grad();
}

TEST(Kernels, WeightGradientsInFp32OfNarrowOperandsEqualTheCpu) {
  for (const auto narrow : {at::kBFloat16, at::kHalf}) {
    const at::Tensor expected = through_buffer(at::kCPU, narrow);
    EXPECT_GT(expected.abs().max().item<double>(), 1);
    LOCKSTEP_NEEDS_CUDA();
    expect_close({through_buffer(kCuda, narrow)}, {expected}, 1e-3);
  }
}

}  // namespace
}  // namespace lockstep::testing
