#include "lockstep/pipeline/split_backward.h"

#include <gtest/gtest.h>

#include <functional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int input_products = 0, weight_products = 0;

/// x W, counting the products of its backward.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return at::matmul(x, w);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    variable_list result(2);
    if (context->needs_input_grad(0)) {
      result[0] = at::matmul(grads[0], saved[1].t());
      ++input_products;
    }
    if (context->needs_input_grad(1)) {
      result[1] = at::matmul(saved[0].t(), grads[0]);
      ++weight_products;
    }
    return result;
  }
};

class SplitBackwardTest : public ::testing::Test {
 protected:
  SplitBackwardTest() {
    at::manual_seed(3);
    for (int i = 0; i < 3; ++i) weights_.push_back(at::randn({4, 4}, at::kDouble));
    weights_.push_back(at::randn({4}, at::kDouble));
    weights_.push_back(at::randn({4}, at::kDouble));
    table_ = at::randn({9, 4}, at::kDouble).requires_grad_(true);
    for (at::Tensor& weight : weights_) weight.requires_grad_(true);
    input_products = weight_products = 0;
  }

  /// Two residual layers: one with a norm, one whose weight is a product of two parameters.
  at::Tensor model(const at::Tensor& input) const {
    const at::Tensor normed = at::layer_norm(input, {4}, weights_[3], weights_[4]);
    const at::Tensor product = Product::apply(normed, weights_[0]);
    if (hooks_product_) product.register_hook(doubled);
    const at::Tensor hidden = input + product.tanh();
    return hidden + Product::apply(hidden.sigmoid(), weights_[1] * weights_[2]);
  }

  static at::Tensor doubled(const at::Tensor& grad) { return grad * 2; }

  /// The two parts compute what a plain backward of the same graph does. Returns the number of
  /// weight products that are left for the second part.
  int expect_as_plain(const std::function<at::Tensor(const at::Tensor&)>& run) {
    const at::Tensor grad = at::randn({5, 4}, at::kDouble);
    at::Tensor x = at::randn({5, 4}, at::kDouble).requires_grad_(true);
    if (hooks_input_) x.register_hook(doubled);
    run(x).backward(grad);
    const at::Tensor expected_input = x.grad().clone();
    const auto expected = take_grads();
    x.mutable_grad() = at::Tensor();
    SplitBackward split(run(x), x);
    EXPECT_TRUE(at::equal(split.input_part(grad), expected_input));
    const int before = weight_products;
    split.weight_part();
    expect_equal(take_grads(), expected);
    return weight_products - before;
  }

  std::vector<at::Tensor> take_grads() {
    std::vector<at::Tensor> grads;
    for (at::Tensor* tensor : tensors()) {
      grads.push_back(tensor->grad().defined() ? tensor->grad().clone() : at::Tensor());
      tensor->mutable_grad() = at::Tensor();
    }
    return grads;
  }

  std::vector<at::Tensor*> tensors() {
    std::vector<at::Tensor*> all = {&table_};
    for (at::Tensor& weight : weights_) all.push_back(&weight);
    return all;
  }

  static void expect_equal(const std::vector<at::Tensor>& found,
                           const std::vector<at::Tensor>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
      if (found[i].defined()) {
        EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
      }
    }
  }

  std::vector<at::Tensor> weights_;
  at::Tensor table_;
  bool hooks_product_ = false, hooks_input_ = false;
};

TEST_F(SplitBackwardTest, TheInputFirstThenTheWeightsEachProductOnce) {
  const at::Tensor grad = at::randn({5, 4}, at::kDouble);
  at::Tensor x = at::randn({5, 4}, at::kDouble).requires_grad_(true);
  model(x).backward(grad);
  const at::Tensor expected_input = x.grad().clone();
  const auto expected = take_grads();
  x.mutable_grad() = at::Tensor();
  input_products = weight_products = 0;

  auto output = model(x);
  SplitBackward split(output, x);
  output = at::Tensor();
  EXPECT_TRUE(at::equal(split.input_part(grad), expected_input));
  EXPECT_EQ(input_products, 2);
  EXPECT_EQ(weight_products, 0);
  for (const at::Tensor& grads : take_grads()) EXPECT_FALSE(grads.defined());
  split.weight_part();
  EXPECT_EQ(input_products, 2);
  EXPECT_EQ(weight_products, 2);
  expect_equal(take_grads(), expected);
}

TEST_F(SplitBackwardTest, WithoutAnInputTheFirstPartGoesToTheDeepestParameter) {
  const at::Tensor ids = at::tensor({1, 5, 1}, at::kLong);
  const at::Tensor grad = at::randn({3, 4}, at::kDouble);
  model(at::embedding(table_, ids)).backward(grad);
  const auto expected = take_grads();
  input_products = weight_products = 0;

  SplitBackward split(model(at::embedding(table_, ids)), {});
  EXPECT_FALSE(split.input_part(grad).defined());
  EXPECT_EQ(input_products, 2);
  EXPECT_EQ(weight_products, 0);
  for (const at::Tensor& grads : take_grads()) EXPECT_FALSE(grads.defined());
  split.weight_part();
  EXPECT_EQ(input_products, 2);
  expect_equal(take_grads(), expected);
}

TEST_F(SplitBackwardTest, AParameterThatEntersTwiceIsCountedOnceInEach) {
  EXPECT_EQ(expect_as_plain([&](const at::Tensor& x) {
              return Product::apply(Product::apply(x, weights_[0]).tanh(), weights_[0]);
            }),
            0);
}

TEST_F(SplitBackwardTest, HooksSeeEachGradientOnce) {
  const auto run = [this](const at::Tensor& x) { return model(x); };
  EXPECT_EQ(expect_as_plain(run), 2);
  hooks_input_ = true;  // runs in the first part only
  EXPECT_EQ(expect_as_plain(run), 2);
  hooks_product_ = true;
  EXPECT_EQ(expect_as_plain(run), 0);
  hooks_product_ = false;
  for (const size_t hooked : {1, 3}) {  // of the product of two parameters; of the norm
    const auto hook = weights_[hooked].register_hook(doubled);
    EXPECT_EQ(expect_as_plain(run), hooked == 3 ? 0 : 2);
    weights_[hooked].remove_hook(hook);
  }
}

TEST_F(SplitBackwardTest, AHookOfTheDeepestParameterIsCalledOnce) {
  const at::Tensor ids = at::tensor({1, 5, 1}, at::kLong);
  const at::Tensor grad = at::randn({3, 4}, at::kDouble);
  table_.register_hook(doubled);
  model(at::embedding(table_, ids)).backward(grad);
  const auto expected = take_grads();
  SplitBackward split(model(at::embedding(table_, ids)), {});
  split.input_part(grad);
  split.weight_part();
  expect_equal(take_grads(), expected);
}

TEST_F(SplitBackwardTest, AnInputThatIsTheOutputAndOneThatIsForgotten) {
  at::Tensor x = at::randn({4, 4}, at::kDouble).requires_grad_(true);
  SplitBackward identity(x, x);
  const at::Tensor grad = at::randn({4, 4}, at::kDouble);
  EXPECT_TRUE(at::equal(identity.input_part(grad), grad));
  identity.weight_part();
  SplitBackward forgetful(weights_[0] * 2, x);
  EXPECT_FALSE(forgetful.input_part(grad).defined());
  forgetful.weight_part();
  EXPECT_TRUE(at::equal(weights_[0].grad(), grad * 2));
}

}  // namespace
}  // namespace lockstep
