#include "lockstep/kernels/matrix_product.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include "lockstep/core/error.h"
#include "lockstep/kernels/transpose_loop.h"

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

/// Calls of oneDNN: of its operator, and of products by blocks.
struct Calls {
  int operators = 0, blocks = 0;
  bool operator==(const Calls&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Calls& calls) {
  return out << calls.operators << " and " << calls.blocks;
}

thread_local Calls counted_calls;

Calls count_calls(const std::function<void()>& body) {
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        const std::string name = call.name();
        if (name == "mkldnn::_linear_pointwise") ++counted_calls.operators;
        if (name == "lockstep::block_product") ++counted_calls.blocks;
        return nullptr;
      }));
  counted_calls = {};
  body();
  at::removeCallback(handle);
  return counted_calls;
}

constexpr Calls kNone = {}, kOperator = {1, 0}, kBlocks = {0, 1};

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
                            {17, 4097, 31},   {257, 64, 64},    {1 << 20, 1, 1}, {256, 64, 64},
                            {1024, 64, 70},   {320, 101, 99},   {64, 256, 256}};

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
  calls = gaps = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call)
                                     -> std::unique_ptr<at::ObserverContext> {
        const std::string name = call.name();
        calls += name == "mkldnn::_linear_pointwise" || name == "lockstep::block_product" ? 1 : 0;
        if (name != "mkldnn::_linear_pointwise") return nullptr;
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
  EXPECT_EQ(count_calls([&] { expect_product(linear_product(x, w, one), x, w.t(), one); }), kNone);
  for (const at::Tensor& bias : {at::randn({511}), at::randn({512}).to(at::kBFloat16)})
    EXPECT_THROW(linear_product(x, w, bias), c10::Error);
}

TEST_F(MatrixProduct, GoesThroughManyRowsInParts) {
  const at::Tensor grad = at::randn({20'000, 600}), x = at::randn({20'000, 30});
  at::Tensor sums = at::ones({600, 30});
  EXPECT_EQ(count_calls([&] { add_product(sums, grad.t(), x); }), (Calls{3, 0}));
  expect_product(sums, grad.t(), x, at::ones({600, 30}));
  EXPECT_EQ(count_calls([&] { product_into(sums, grad.t(), x); }), (Calls{3, 0}));
  expect_product(sums, grad.t(), x);
}

TEST_F(MatrixProduct, LargeOnesInFp32AreThoseOfOneDnn) {
  const at::Tensor x = at::randn({1024, 128});
  for (const int64_t out : {384, 1024}) {  // of 48 K elements, which fit into caches, and of 128 K
    const at::Tensor w = at::randn({out, 128}), result = at::zeros({1024, out});
    const Calls expected = out == 384 ? kBlocks : kOperator;
    EXPECT_EQ(count_calls([&] { linear_product(x, w); }), expected);
    EXPECT_EQ(count_calls([&] { product(x, w.t()); }), expected);
    EXPECT_EQ(count_calls([&] { product_into(result, x, w.t()); }), expected);
    EXPECT_EQ(count_calls([&] { linear_product_into(result, x, w); }), expected);
    EXPECT_EQ(count_calls([&] { add_product(result, x, w.t()); }), expected);
    EXPECT_EQ(count_calls([&] { linear_product(x, w, at::zeros({out})); }), kOperator);
  }
}

/// The number of tokens is that of rows, or of the terms of a gradient of weights.
TEST_F(MatrixProduct, BlocksAreForSomeNumbersOfTokensAlone) {
  const at::Tensor w = at::randn({64, 96});
  for (const int64_t tokens : {512, 1024, 1000, 515}) {
    const at::Tensor x = at::randn({tokens, 96}), grad = at::randn({tokens, 64});
    at::Tensor sums = at::ones({64, 96});
    const bool blocks = tokens % 64 == 0;
    EXPECT_EQ(count_calls([&] { expect_product(linear_product(x, w), x, w.t()); }),
              blocks ? kBlocks : kOperator);
    EXPECT_EQ(count_calls([&] { expect_product(product(grad, w), grad, w); }),
              blocks ? kBlocks : kOperator);
    EXPECT_EQ(count_calls([&] { expect_product(product(grad.t(), x), grad.t(), x); }),
              blocks ? kBlocks : kOperator);
    EXPECT_EQ(count_calls([&] { add_product(sums, grad.t(), x); }),
              blocks ? kBlocks : (tokens < 683 ? kNone : kOperator));
    expect_product(sums, grad.t(), x, at::ones({64, 96}));
  }
}

TEST_F(MatrixProduct, BlocksTakeMatricesInsideOthersAndBothTransposed) {
  const at::Tensor memory = at::randn({700, 500}), other = at::randn({300, 700});
  const at::Tensor a = memory.narrow(0, 5, 640).narrow(1, 3, 100);
  const at::Tensor b = other.narrow(0, 1, 100).narrow(1, 9, 90);
  const at::Tensor terms = other.narrow(0, 7, 30).narrow(1, 9, 640);
  at::Tensor sums = at::ones({640, 200});
  EXPECT_EQ(count_calls([&] { add_product(sums.narrow(1, 4, 90), a, b); }), kBlocks);
  expect_product(sums.narrow(1, 4, 90), a, b, at::ones({640, 90}));
  EXPECT_EQ(sums.narrow(1, 0, 4).ne(1).sum().item<int64_t>(), 0);
  EXPECT_EQ(sums.narrow(1, 94, 106).ne(1).sum().item<int64_t>(), 0);
  EXPECT_EQ(count_calls([&] { expect_product(product(a.t(), terms.t()), a.t(), terms.t()); }),
            kBlocks);
  // Parts of 256 and of 64 terms, and more rows than are added up at a time.
  const at::Tensor wide = other.narrow(1, 0, 320).t(), grad = at::randn({320, 1100});
  at::Tensor more = at::ones({1100, 200});
  EXPECT_EQ(
      count_calls([&] { add_product(more.narrow(1, 4, 80), grad.t(), wide.narrow(1, 9, 80)); }),
      kBlocks);
  expect_product(more.narrow(1, 4, 80), grad.t(), wide.narrow(1, 9, 80), at::ones({1100, 80}));
  const at::Tensor rows = memory.narrow(0, 0, 320).narrow(1, 9, 80);
  EXPECT_EQ(count_calls([&] { add_product(more.narrow(1, 100, 80), grad.t(), rows); }), kBlocks);
  expect_product(more.narrow(1, 100, 80), grad.t(), rows, at::ones({1100, 80}));
  EXPECT_EQ(more.narrow(1, 84, 16).ne(1).sum().item<int64_t>(), 0);
  at::Tensor columns = at::ones({90, 640}).t();  // not contiguous along its rows
  EXPECT_EQ(count_calls([&] { product_into(columns, a, b); }), kOperator);
  expect_product(columns, a, b);
}

TEST_F(MatrixProduct, BlocksHaveTheSameBitsWithAnyNumberOfThreads) {
  const at::Tensor x = at::randn({1024, 128}), w = at::randn({190, 128});
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> first;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    const at::Tensor y = linear_product(x, w);
    const std::vector<at::Tensor> found = {y, product(y, w), product(y.t(), x)};
    if (first.empty()) first = found;
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], first[i])) << i;
  }
  at::set_num_threads(threads);
}

TEST(Transpose, WritesTheElementsOfTheOtherAndNothingElse) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {16, 16}, {15, 33}, {64, 17}, {33, 48}, {3, 100}, {0, 5}, {5, 0}}) {
    const at::Tensor from = at::randn({rows + 1, columns + 3});
    at::Tensor to = at::full({columns + 2, rows + 5}, 7.0F), expected = to.clone();
    transpose_loop(from.const_data_ptr<float>(), columns + 3, to.mutable_data_ptr<float>(),
                   rows + 5, rows, columns);
    expected.narrow(0, 0, columns)
        .narrow(1, 0, rows)
        .copy_(from.narrow(0, 0, rows).narrow(1, 0, columns).t());
    EXPECT_TRUE(at::equal(to, expected)) << rows << " " << columns;
  }
}

TEST_F(MatrixProduct, SmallOnesAndOtherDtypesAreThoseOfLibtorch) {
  const at::Tensor x = at::randn({256, 64}), w = at::randn({63, 64});
  EXPECT_EQ(count_calls([&] { EXPECT_TRUE(at::equal(linear_product(x, w), at::linear(x, w))); }),
            kNone);
  EXPECT_EQ(count_calls([&] { EXPECT_TRUE(at::equal(product(x, w.t()), at::mm(x, w.t()))); }),
            kNone);
  EXPECT_EQ(count_calls([&] {
              const at::Tensor few = at::randn({63, 512}), more = at::randn({512, 256});
              add_product(at::zeros({512, 512}), few.t(), few);
              add_product(at::zeros({256, 7}), more.t(), more.narrow(1, 0, 7));
            }),
            kNone);
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
  EXPECT_EQ(count_calls([&] { EXPECT_TRUE(at::equal(product(x, x.t()), at::mm(x, x.t()))); }),
            kNone);
  at::globalContext().setUserEnabledMkldnn(true);
  EXPECT_EQ(count_calls([&] { product(x, x.t()); }), kOperator);
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
