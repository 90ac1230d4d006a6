#include <limits>

#include <torch/csrc/autograd/autograd.h>

#include "lockstep/tests/device/lagging_tests.h"

namespace lockstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Net = std::function<Tensors(const Tensors&)>;

struct OperatorCase {
  std::string name;
  Tensors inputs;  ///< on the CPU; floating-point ones get gradients
  Net net;
};

at::Tensor wave(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  const int64_t count = c10::multiply_integers(shape);
  return at::sin(at::arange(count, at::kDouble) * 0.7 + count).to(dtype).view(shape);
}

struct Outcome {
  Tensors results, gradients;
};

/// Forward, and backward starting from waves of the results' shapes.
Outcome run_case(const OperatorCase& given, c10::Device device) {
  Outcome outcome;
  Tensors inputs;
  for (const at::Tensor& input : given.inputs) {
    inputs.push_back(input.to(device).detach());
    inputs.back().requires_grad_(input.is_floating_point());
  }
  outcome.results = given.net(inputs);
  Tensors roots, seeds;
  for (const at::Tensor& result : outcome.results)
    if (result.requires_grad()) {
      roots.push_back(result);
      seeds.push_back(wave(result.sizes(), result.scalar_type()).to(device));
    }
  if (!roots.empty()) torch::autograd::backward(roots, seeds);
  for (const at::Tensor& input : inputs) outcome.gradients.push_back(input.grad());
  return outcome;
}

void expect_same(const OperatorCase& given, uint64_t seed) {
  const std::string where = given.name + ", seed " + std::to_string(seed);
  const Outcome expected = run_case(given, at::kCPU);
  const Outcome found = run_case(given, lagging_device(1));
  ASSERT_EQ(found.results.size(), expected.results.size()) << where;
  for (size_t i = 0; i < expected.results.size(); ++i)
    expect_same_bits(found.results[i].detach(), expected.results[i].detach(),
                     where + ", result " + std::to_string(i));
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    expect_same_bits(found.gradients[i], expected.gradients[i],
                     where + ", gradient " + std::to_string(i));
}

at::Tensor ids(int64_t count, int64_t below) {
  return (at::arange(count) * 7 + 3).remainder(below);
}

std::vector<OperatorCase> layer_cases(at::ScalarType dtype) {
  const std::string of = std::string(", ") + at::toString(dtype);
  const at::Tensor x = wave({5, 3, 16}, dtype), w = wave({24, 16}, dtype), b = wave({24}, dtype);
  const at::Tensor q = wave({2, 4, 6, 8}, dtype);
  return {
      {"linear" + of,
       {x, w, b},
       [](const Tensors& t) { return Tensors{at::linear(t[0], t[1], t[2])}; }},
      {"linear, no bias" + of,
       {x, w},
       [](const Tensors& t) { return Tensors{at::linear(t[0], t[1])}; }},
      {"gelu" + of, {x}, [](const Tensors& t) { return Tensors{at::gelu(t[0], "tanh")}; }},
      {"silu" + of, {x}, [](const Tensors& t) { return Tensors{at::silu(t[0]) * t[0]}; }},
      {"rms_norm" + of,
       {x, wave({16}, dtype)},
       [](const Tensors& t) { return Tensors{at::rms_norm(t[0], {16}, t[1], 1e-5)}; }},
      {"layer_norm" + of,
       {x, wave({16}, dtype), wave({16}, dtype)},
       [](const Tensors& t) { return Tensors{at::layer_norm(t[0], {16}, t[1], t[2], 1e-5)}; }},
      {"fused attention" + of,
       {q, q + 1, q - 1},
       [](const Tensors& t) {
         return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true)};
       }},
      {"attention with a mask" + of,
       {q, q + 1, q - 1},
       [](const Tensors& t) {
         const at::Tensor future = at::ones({6, 6}, t[0].options().dtype(at::kBool)).triu_(1);
         const at::Tensor scores = at::matmul(t[0], t[1].transpose(2, 3));
         const at::Tensor masked =
             scores.masked_fill(future, -std::numeric_limits<double>::infinity());
         return Tensors{at::matmul(at::softmax(masked, -1), t[2])};
       }},
      {"embedding" + of,
       {wave({11, 8}, dtype), ids(12, 11).view({3, 4})},
       [](const Tensors& t) { return Tensors{at::embedding(t[0], t[1])}; }},
      {"cross entropy" + of,
       {wave({12, 11}, dtype), ids(12, 11)},
       [](const Tensors& t) {
         return Tensors{at::cross_entropy_loss(t[0], t[1], {}, at::Reduction::None),
                        at::cross_entropy_loss(t[0], t[1], {}, at::Reduction::Mean, 3, 0.1)};
       }},
  };
}

std::vector<OperatorCase> tensor_cases(at::ScalarType dtype) {
  const std::string of = std::string(", ") + at::toString(dtype);
  const at::Tensor x = wave({6, 8}, dtype), y = wave({8, 5}, dtype);
  return {
      {"arithmetic" + of,
       {x, x + 2},
       [](const Tensors& t) {
         return Tensors{t[0] + t[1] * 2,
                        1 - t[0],
                        t[0] / t[1],
                        at::addcmul(t[0], t[1], t[1], 0.5),
                        at::maximum(t[0], t[1]),
                        t[0].pow(2),
                        t[0].exp().to(at::kDouble),
                        at::where(t[0] > 0, t[0], t[1]),
                        at::where(t[0] > 0, t[0], 0.0)};
       }},
      {"reductions" + of,
       {x},
       [](const Tensors& t) {
         return Tensors{t[0].sum(),           t[0].mean(0),
                        t[0].amax(1),         t[0].logsumexp(-1),
                        t[0].cumsum(1),       at::linalg_vector_norm(t[0], 2),
                        t[0].std(),           at::isfinite(t[0]).all(),
                        at::nan_to_num(t[0]), at::count_nonzero(t[0] > 0),
                        t[0].argmax(1)};
       }},
      {"products" + of,
       {x, y, wave({8}, dtype)},
       [](const Tensors& t) {
         return Tensors{t[0].mm(t[1]), t[0].mv(t[2]), at::outer(t[2], t[2]),
                        at::bmm(t[0].view({2, 3, 8}), t[1].expand({2, 8, 5})),
                        at::addmm(t[0].slice(1, 0, 5), t[0], t[1], 0.5, 2)};
       }},
      {"layout" + of,
       {x},
       [](const Tensors& t) {
         return Tensors{at::cat({t[0], t[0] * 2}, 1),
                        at::stack({t[0], t[0]}),
                        t[0].t().contiguous(),
                        t[0].t().reshape({-1}),
                        t[0].unfold(1, 3, 2),
                        t[0].flip(0),
                        t[0].repeat({2, 1}),
                        t[0].chunk(2, 1)[1].clone(),
                        at::constant_pad_nd(t[0], {1, 2}),
                        t[0].repeat_interleave(2, 1),
                        t[0].tril(),
                        t[0].view(-1).roll(3)};
       }},
      {"indices" + of,
       {x, ids(8, 6), ids(48, 8).view({6, 8})},
       [](const Tensors& t) {
         const at::Tensor zeros = at::zeros_like(t[0]);
         return Tensors{t[0].index_select(0, t[1]),
                        t[0].gather(1, t[2]),
                        t[0].index({t[1]}),
                        zeros.scatter_add(1, t[2], t[0]),
                        zeros.index_add(1, t[1] + 2 - 2, t[0]),
                        zeros.index_put({t[1].slice(0, 0, 6)}, t[0], /*accumulate=*/true)};
       }},
      {"order" + of,
       {x},
       [](const Tensors& t) {
         const auto [sorted, places] = at::sort(t[0], /*stable=*/true, 1, /*descending=*/true);
         const auto [best, where] = at::topk(t[0], 3, 1);
         return Tensors{sorted, places, best, where,
                        at::searchsorted(t[0].detach().cumsum(0)[5], t[0])};
       }},
  };
}

TEST_F(LaggingDevice, LayersHaveTheBitsOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const OperatorCase& given : layer_cases(dtype))
      for (uint64_t seed = 1; seed <= 3; ++seed) {
        restart(seed);
        expect_same(given, seed);
      }
}

TEST_F(LaggingDevice, OperatorsHaveTheBitsOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const OperatorCase& given : tensor_cases(dtype)) {
      restart(1);
      expect_same(given, 1);
    }
}

TEST_F(LaggingDevice, NoLayerWaits) {
  for (const OperatorCase& given : layer_cases(at::kFloat)) {
    restart(1);
    run_case(given, lagging_device(0));
    auto waits = device_counts(0).waits_by;
    waits.erase("copy from pageable memory");  // the inputs
    EXPECT_TRUE(waits.empty()) << given.name << " waits for " << waits.begin()->first;
  }
}

TEST_F(LaggingDevice, InPlaceListsAndScalarsWork) {
  const auto options = at::TensorOptions(lagging_device(0));
  Tensors list = {at::ones({3}, options), at::full({2, 2}, 3.0f, options)};
  at::_foreach_mul_(list, 2.0);
  at::_foreach_mul_(list, at::full({}, 0.5, options));
  at::_foreach_add_(list, 1);
  expect_same_bits(list[0], at::full({3}, 2.0f), "first");
  expect_same_bits(list[1], at::full({2, 2}, 4.0f), "second");
  at::Tensor found = at::zeros({1}, options);
  list[0][1] = std::numeric_limits<float>::infinity();
  at::_amp_foreach_non_finite_check_and_unscale_(list, found, at::full({1}, 0.25f, options));
  EXPECT_EQ(found.item<float>(), 1);
  expect_same_bits(list[1], at::ones({2, 2}), "unscaled");
  at::Tensor out = at::empty({0}, options);
  at::mul_out(out, list[1], list[1].t());
  expect_same_bits(out, at::ones({2, 2}), "out");
}

TEST_F(LaggingDevice, FactoriesWorkWithoutAWait) {
  const auto options = at::TensorOptions(lagging_device(2));
  const at::Tensor range = at::arange(2, 9, 3, options.dtype(at::kLong));
  const at::Tensor ones = at::ones({2, 3}, options), linear = at::linspace(0, 1, 5, options);
  const at::Tensor normal = at::randn({4}, options), eye = at::eye(3, options);
  EXPECT_EQ(device_counts(2).waits, 0);
  expect_same_bits(range, at::arange(2, 9, 3), "arange");
  expect_same_bits(ones, at::ones({2, 3}), "ones");
  expect_same_bits(linear, at::linspace(0, 1, 5), "linspace");
  expect_same_bits(eye, at::eye(3), "eye");
  EXPECT_TRUE(at::isfinite(normal.cpu()).all().item<bool>());
}

}  // namespace
}  // namespace lockstep::testing
