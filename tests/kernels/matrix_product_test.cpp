#include "lockstep/kernels/matrix_product.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/record_function.h>

#include "lockstep/core/error.h"

namespace lockstep::kernels {
namespace {

/// Uses oneDNN's product on every processor.
class MatrixProduct : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("LOCKSTEP_ONEDNN", "1", /*overwrite=*/1);
    at::manual_seed(5);
  }
};

thread_local int calls_of_onednn = 0;

/// How often `body` calls oneDNN's product.
int count_calls(const std::function<void()>& body) {
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        if (std::string(call.name()) == "mkldnn::_linear_pointwise") ++calls_of_onednn;
        return nullptr;
      }));
  calls_of_onednn = 0;
  body();
  at::removeCallback(handle);
  return calls_of_onednn;
}

/// Compares with fp64. The bound holds for any order of the sums: each addition and multiplication
/// is rounded once, by at most half a unit in the last place.
void expect_product(const at::Tensor& found, const at::Tensor& a, const at::Tensor& b,
                    const at::Tensor& added = at::zeros({1})) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble), z = added.to(at::kDouble);
  const at::Tensor exact = at::matmul(x, y) + z;
  const auto operations = static_cast<double>(a.size(-1) + 2);
  const at::Tensor bound = (at::matmul(x.abs(), y.abs()) + z.abs()) *
                           (operations * std::numeric_limits<float>::epsilon() / 2 * 1.01);
  ASSERT_EQ(found.sizes(), exact.sizes());
  EXPECT_TRUE((found.to(at::kDouble) - exact).abs().le(bound).all().item<bool>());
}

struct Sizes {
  int64_t rows, in, out;
};

constexpr Sizes kLarge[] = {{1024, 128, 384}, {1000, 129, 383}, {1, 1024, 1024}, {4096, 3, 97},
                            {17, 4097, 31},   {257, 64, 64},    {1 << 20, 1, 1}};

TEST_F(MatrixProduct, IsTheProductInEveryForm) {
  for (const auto& [rows, in, out] : kLarge) {
    const at::Tensor x = at::randn({rows, in}), w = at::randn({out, in}), bias = at::randn({out});
    expect_product(linear_product(x, w), x, w.t());
    expect_product(linear_product(x, w, bias), x, w.t(), bias);
    expect_product(product(x, w.t()), x, w.t());
    expect_product(product(x, w.t().contiguous()), x, w.t());
    at::Tensor result = at::full({rows, out}, 7.0F);
    product_into(result, x, w.t());
    expect_product(result, x, w.t());
    linear_product_into(result, x, w, bias);
    expect_product(result, x, w.t(), bias);
    const at::Tensor before = at::randn({rows, out});
    result.copy_(before);
    add_product(result, x, w.t());
    expect_product(result, x, w.t(), before);
    if (rows % 4 == 0) {
      const at::Tensor batches = x.view({rows / 4, 4, in});
      expect_product(linear_product(batches, w, bias).view({rows, out}), x, w.t(), bias);
    }
  }
}

TEST_F(MatrixProduct, TakesTransposedAndStridedOperands) {
  const at::Tensor grad = at::randn({1000, 150}), x = at::randn({1000, 80});
  expect_product(product(grad.t(), x), grad.t(), x);
  const at::Tensor wide = at::randn({1000, 300}), columns = wide.narrow(1, 100, 150);
  expect_product(product(columns.t(), x), columns.t(), x);
  expect_product(product(columns, grad.t()), columns, grad.t());
  at::Tensor sums = at::zeros({150, 160});
  add_product(sums.narrow(1, 40, 80), grad.t(), x);
  expect_product(sums.narrow(1, 40, 80), grad.t(), x);
  EXPECT_EQ(sums.narrow(1, 0, 40).abs().max().item<float>(), 0);
  EXPECT_EQ(sums.narrow(1, 120, 40).abs().max().item<float>(), 0);
}

bool is_dense(const at::Tensor& x) {
  return x.is_contiguous() || (x.dim() == 2 && x.t().is_contiguous());
}

/// oneDNN accepts such operands, but is a thousand times slower. It reads a bias as if it had no
/// gaps.
TEST_F(MatrixProduct, OneDnnGetsNoOperandWithGaps) {
  thread_local int calls = 0, gaps = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (std::string(call.name()) != "mkldnn::_linear_pointwise") return nullptr;
        ++calls;
        for (size_t i = 0; i < 3; ++i)
          if (call.inputs()[i].isTensor()) {
            const at::Tensor x = call.inputs()[i].toTensor();
            gaps += is_dense(x) ? 0 : 1;
          }
        return nullptr;
      }).needsInputs(true));
  const std::vector<at::Tensor> rows = {
      at::randn({512, 300}).narrow(1, 7, 256),     at::randn({512, 512}).slice(1, 0, 512, 2),
      at::randn({1024, 256}).slice(0, 0, 1024, 2), at::randn({1, 256}).expand({512, 256}),
      at::randn({512, 1}).expand({512, 256}),      at::randn({512, 3, 256}).select(1, 1)};
  const std::vector<at::Tensor> biases = {at::randn({1024}).slice(0, 0, 1024, 2),
                                          at::randn({1}).expand(512), at::randn({512})};
  const at::Tensor plain = at::randn({512, 256}), square = at::randn({512, 512});
  for (const at::Tensor& x : rows) {
    EXPECT_FALSE(is_dense(x));
    for (const at::Tensor& bias : biases) {
      expect_product(linear_product(x, plain, bias), x, plain.t(), bias);
      expect_product(linear_product(plain, x, bias), plain, x.t(), bias);
      at::Tensor result = at::empty({512, 512});
      linear_product_into(result, plain, x, bias);
      expect_product(result, plain, x.t(), bias);
    }
    expect_product(product(square, x), square, x);
    expect_product(product(x.t(), square), x.t(), square);
    at::Tensor sums = at::zeros({512, 256});
    product_into(sums, square, x);
    expect_product(sums, square, x);
    add_product(sums.zero_(), square, x);
    expect_product(sums, square, x);
  }
  at::removeCallback(handle);
  EXPECT_EQ(calls, static_cast<int>(rows.size() * (3 * biases.size() + 4)));
  EXPECT_EQ(gaps, 0);
}

TEST_F(MatrixProduct, ABiasOfAnotherKindIsLibtorchs) {
  const at::Tensor x = at::randn({512, 256}), w = at::randn({512, 256}), one = at::randn({1});
  EXPECT_EQ(count_calls([&] { expect_product(linear_product(x, w, one), x, w.t(), one); }), 0);
  for (const at::Tensor& bias : {at::randn({511}), at::randn({512}).to(at::kBFloat16)})
    EXPECT_THROW(linear_product(x, w, bias), c10::Error);
}

TEST_F(MatrixProduct, GoesThroughManyRowsInParts) {
  const at::Tensor grad = at::randn({20'000, 600}), x = at::randn({20'000, 30});
  at::Tensor sums = at::ones({600, 30});
  EXPECT_EQ(count_calls([&] { add_product(sums, grad.t(), x); }), 3);
  expect_product(sums, grad.t(), x, at::ones({600, 30}));
  EXPECT_EQ(count_calls([&] { product_into(sums, grad.t(), x); }), 3);
  expect_product(sums, grad.t(), x);
}

TEST_F(MatrixProduct, LargeOnesInFp32AreThoseOfOneDnn) {
  const at::Tensor x = at::randn({1024, 128}), w = at::randn({384, 128});
  const at::Tensor result = at::zeros({1024, 384});
  EXPECT_EQ(count_calls([&] { linear_product(x, w); }), 1);
  EXPECT_EQ(count_calls([&] { product(x, w.t()); }), 1);
  EXPECT_EQ(count_calls([&] { product_into(result, x, w.t()); }), 1);
  EXPECT_EQ(count_calls([&] { linear_product_into(result, x, w); }), 1);
  EXPECT_EQ(count_calls([&] { add_product(result, x, w.t()); }), 1);
}

TEST_F(MatrixProduct, SmallOnesAndOtherDtypesAreThoseOfLibtorch) {
  const at::Tensor x = at::randn({256, 64}), w = at::randn({63, 64});
  EXPECT_EQ(count_calls([&] { EXPECT_TRUE(at::equal(linear_product(x, w), at::linear(x, w))); }),
            0);
  EXPECT_EQ(count_calls([&] { EXPECT_TRUE(at::equal(product(x, w.t()), at::mm(x, w.t()))); }), 0);
  EXPECT_EQ(count_calls([&] {
              const at::Tensor few = at::randn({63, 512}), more = at::randn({512, 256});
              add_product(at::zeros({512, 512}), few.t(), few);
              add_product(at::zeros({256, 16}), more.t(), more.narrow(1, 0, 16));
            }),
            0);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor a = at::randn({512, 64}).to(dtype), b = at::randn({64, 64}).to(dtype);
    EXPECT_FALSE(onednn_multiplies(a));
    EXPECT_TRUE(at::equal(linear_product(a, b), at::linear(a, b)));
    EXPECT_TRUE(at::equal(product(a, b), at::mm(a, b)));
  }
  const at::Tensor meta = at::empty({1024, 128}, at::TensorOptions(at::kMeta).dtype(at::kFloat));
  EXPECT_FALSE(onednn_multiplies(meta));
  EXPECT_EQ(product(meta, meta.t()).size(1), 1024);
}

TEST_F(MatrixProduct, IsThatOfLibtorchWhereLibtorchMayNotUseOneDnn) {
  const at::Tensor x = at::randn({1024, 128});
  at::globalContext().setUserEnabledMkldnn(false);
  EXPECT_EQ(count_calls([&] { EXPECT_TRUE(at::equal(product(x, x.t()), at::mm(x, x.t()))); }), 0);
  at::globalContext().setUserEnabledMkldnn(true);
  EXPECT_EQ(count_calls([&] { product(x, x.t()); }), 1);
}

TEST_F(MatrixProduct, OfNoRowsOrNoTermsIsLibtorchs) {
  EXPECT_EQ(linear_product(at::randn({0, 4096}), at::randn({4096, 4096})).size(0), 0);
  EXPECT_EQ(product(at::randn({64, 0}), at::randn({0, 64})).abs().max().item<float>(), 0);
}

TEST_F(MatrixProduct, HasTheSameBitsEveryTime) {
  const at::Tensor x = at::randn({1000, 200}), w = at::randn({300, 200});
  const at::Tensor first = linear_product(x, w), gradient = product(first.t(), x);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor copy = at::empty({200'008}).narrow(0, i, 200'000).view({1000, 200}).copy_(x);
    EXPECT_TRUE(at::equal(linear_product(copy, w), first));
    EXPECT_TRUE(at::equal(product(first.t(), copy), gradient));
  }
}

// Runs in its own process, because the variable is read only once.
TEST(MatrixProductDeathTest, AnotherValueOfTheVariableIsNamed) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto multiply = [] {
    ::setenv("LOCKSTEP_ONEDNN", "yes", /*overwrite=*/1);
    try {
      check_matrix_products();
    } catch (const ConfigError& error) {
      std::cerr << error.what();
      std::exit(3);
    }
  };
  EXPECT_EXIT(multiply(), ::testing::ExitedWithCode(3),
              "environment variable LOCKSTEP_ONEDNN: found 'yes', allowed: 0 or 1");
}

}  // namespace
}  // namespace lockstep::kernels
