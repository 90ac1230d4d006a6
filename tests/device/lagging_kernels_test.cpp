#include "lockstep/distributed/owned_grads.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/fingerprint.h"
#include "lockstep/kernels/fp8.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {
namespace {

constexpr int64_t kElements = 5000;

/// The tensors that an update reads and writes.
struct UpdateOperands {
  at::Tensor master, grad, first, second, low, control;

  static UpdateOperands on(c10::Device device) {
    const at::Tensor i = at::arange(kElements, at::kDouble);
    UpdateOperands made{at::sin(i).to(at::kFloat),
                        at::cos(i * 3).to(at::kFloat),
                        at::sin(i * 5).mul(0.1).to(at::kFloat),
                        at::cos(i).square().to(at::kFloat),
                        at::zeros({kElements}, at::kBFloat16),
                        at::tensor({0.5, 1.0}, at::kDouble)};
    for (at::Tensor* tensor : made.all()) *tensor = tensor->to(device);
    return made;
  }
  std::vector<at::Tensor*> all() { return {&master, &grad, &first, &second, &low, &control}; }
};

void update(UpdateOperands& x, const kernels::UpdateSegments& segments) {
  kernels::adamw(x.master, x.grad, x.first, x.second, x.low, segments,
                 {.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}, x.control);
  kernels::sgd(x.master, x.grad, x.first, x.low, segments, {.learning_rate = 0.1, .momentum = 0.5},
               x.control);
}

TEST_F(LaggingDevice, UpdatesHaveTheBitsOfTheCpu) {
  UpdateOperands expected = UpdateOperands::on(at::kCPU);
  update(expected, {{0, 700}, {1000, kElements}});
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    restart(seed);
    ASSERT_EQ(current_device(), 0);  // kernels make their tensors' device current
    UpdateOperands found = UpdateOperands::on(lagging_device(2));
    const kernels::UpdateSegments segments = {{0, 700}, {1000, kElements}};
    reset_device_counts();
    update(found, segments);
    EXPECT_EQ(device_counts(2).waits, 1) << "the upload of the segments";
    EXPECT_EQ(device_counts(2).launches, 3);
    for (size_t i = 0; i < expected.all().size(); ++i)
      expect_same_bits(*found.all()[i], *expected.all()[i], "operand " + std::to_string(i));
    expect_same_bits(kernels::sum_of_squares(found.master),
                     kernels::sum_of_squares(expected.master), "sum of squares");
    expect_same_bits(kernels::fingerprint(found.master), kernels::fingerprint(expected.master),
                     "fingerprint");
  }
}

TEST_F(LaggingDevice, AKernelOnAnotherDeviceThanItsTensorsIsAnIllegalAccess) {
  const at::Tensor flat = at::ones({8}, at::TensorOptions(lagging_device(1)));
  const auto& device_kernels = kernels::device_kernels("the test", flat.device().type());
  ASSERT_EQ(current_device(), 0);
  EXPECT_TRUE(throws_with<c10::Error>([&] { device_kernels.sum_of_squares(flat); },
                                      "illegal memory access"));
  EXPECT_TRUE(throws_with<c10::Error>(
      [&] {
        device_kernels.sgd(flat, flat, {}, {}, {{0, 8}}, {}, {});
      },
      "illegal memory access"));
  // These functions make their tensors' device current.
  EXPECT_EQ(kernels::sum_of_squares(flat).item<double>(), 8);
  EXPECT_EQ(kernels::fingerprint(flat).item<int64_t>(),
            kernels::fingerprint(at::ones({8})).item<int64_t>());
}

/// Parameters lie in their buffer without gaps, so a weight may begin anywhere.
TEST_F(LaggingDevice, MatricesThatBeginAnywhereBecomeMatricesOf8Bits) {
  const at::Tensor flat = at::sin(at::arange(264, at::kFloat)).to(at::kBFloat16);
  for (const int64_t first : {0, 4, 8}) {
    const auto narrowed = [&](c10::Device device) {
      return kernels::to_fp8_matrices(flat.to(device).narrow(0, first, 256).view({16, 16}),
                                      at::kFloat8_e4m3fn, at::full({1, 1}, 17.0f, device),
                                      kernels::Fp8Sides::both);
    };
    const kernels::Fp8Matrices found = narrowed(lagging_device(1)), expected = narrowed(at::kCPU);
    expect_same_bits(found.matrix.values.view(at::kByte), expected.matrix.values.view(at::kByte),
                     "from element " + std::to_string(first));
    expect_same_bits(found.transposed.values.view(at::kByte),
                     expected.transposed.values.view(at::kByte), "its transpose");
  }
}

TEST_F(LaggingDevice, AProductOf8BitsTakesABiasInEveryDtype) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto product = [&](c10::Device device) {
      const at::Tensor x = at::sin(at::arange(512, at::kFloat)).view({16, 32}).to(device);
      const kernels::Fp8Matrix matrix =
          kernels::to_fp8(x, at::kFloat8_e4m3fn, at::full({1, 1}, 448.0f, device));
      return kernels::scaled_mm(matrix, matrix, x.select(1, 5).to(dtype), dtype, true);
    };
    expect_same_bits(product(lagging_device(1)), product(at::kCPU), at::toString(dtype));
  }
}

TEST_F(LaggingDevice, GradientsOfAllDtypesAreDividedByNumbersOfHostOrDevice) {
  const auto divided = [](c10::Device device, c10::Device of_divisor) {
    std::vector<at::Tensor> parts;
    for (const at::ScalarType dtype :
         {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
      parts.push_back((at::cos(at::arange(50, at::kDouble)) * 1000).to(dtype).to(device));
    divide_grads(parts, at::full({}, 70001.0, at::TensorOptions(of_divisor).dtype(at::kDouble)));
    return parts;
  };
  const std::vector<at::Tensor> expected = divided(at::kCPU, at::kCPU);
  const c10::Device device = lagging_device(1);
  for (const c10::Device of_divisor : {device, c10::Device(at::kCPU)}) {
    const std::vector<at::Tensor> found = divided(device, of_divisor);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_same_bits(found[i], expected[i], "part " + std::to_string(i));
  }
}

}  // namespace
}  // namespace lockstep::testing
