#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/row_order.h"
#include "lockstep/tests/support/throws_with.h"

// The mapping between tokens and rows, and the experts' products, compared with libtorch's
// operators.

namespace lockstep {
namespace {

constexpr int64_t kExperts = 5, kWidth = 24;

at::Tensor sines(std::vector<int64_t> shape, double seed, at::ScalarType dtype) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + seed).view(shape).to(dtype);
}

/// Chooses each pair with probability `density`. Some weights are 0.
Routing drawn_routing(int64_t tokens, double density, std::mt19937_64& engine) {
  std::uniform_real_distribution<double> uniform;
  Routing routing{at::zeros({tokens, kExperts}, at::kFloat),
                  at::zeros({tokens, kExperts}, at::kBool)};
  for (int64_t pair = 0; pair < tokens * kExperts; ++pair) {
    const bool chosen = uniform(engine) < density;
    const bool weighs = chosen && uniform(engine) < 0.9;
    routing.map.mutable_data_ptr<bool>()[pair] = chosen;
    routing.probs.mutable_data_ptr<float>()[pair] =
        weighs ? static_cast<float>(uniform(engine)) + 0.1F : 0;
  }
  return routing;
}

/// The sum over the chosen pairs of weight times token, and its gradients.
struct Combined {
  at::Tensor value, of_tokens, of_weights;

  template <class Combine>
  Combined(const at::Tensor& tokens, const at::Tensor& weights, Combine combine) {
    const at::Tensor x = tokens.clone().requires_grad_(true);
    const at::Tensor w = weights.clone().requires_grad_(true);
    const at::Tensor y = combine(x, w);
    value = y.detach();
    y.backward(sines(y.sizes().vec(), 0.6, y.scalar_type()));
    of_tokens = x.grad();
    of_weights = w.grad();
  }
};

Combined by_index_add(const at::Tensor& tokens, const Routing& routing) {
  const at::Tensor pairs = routing.map.t().nonzero();
  const at::Tensor token = pairs.select(1, 1);
  return {tokens, routing.probs, [&](const at::Tensor& x, const at::Tensor& w) {
            const at::Tensor weights = w.index({token, pairs.select(1, 0)});
            const at::Tensor rows =
                x.index_select(0, token) * weights.unsqueeze(-1).to(x.scalar_type());
            return at::zeros(x.sizes(), x.options()).index_add(0, token, rows);
          }};
}

Combined by_rows(const at::Tensor& tokens, const Routing& routing, int64_t rows) {
  const RowOrderPtr order = order_rows(routing, rows);
  return {tokens, routing.probs, [&](const at::Tensor& x, const at::Tensor& w) {
            const at::Tensor weights = weights_of_rows(w, order).unsqueeze(-1);
            return sums_of_rows(rows_of_tokens(x, order) * weights.to(x.scalar_type()), order);
          }};
}

void expect_same(const Combined& found, const Combined& expected) {
  EXPECT_TRUE(at::equal(found.value, expected.value));
  EXPECT_TRUE(at::equal(found.of_tokens, expected.of_tokens));
  EXPECT_TRUE(at::equal(found.of_weights, expected.of_weights));
}

TEST(RowOrder, HasTheBitsOfIndexAddForAnyChoice) {
  std::mt19937_64 engine(7);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const int64_t tokens : {0, 1, 33})
      for (const double density : {0.0, 0.1, 0.5, 1.0}) {
        SCOPED_TRACE(tokens);
        const Routing routing = drawn_routing(tokens, density, engine);
        const auto pairs = routing.map.sum().item<int64_t>();
        const at::Tensor x = sines({tokens, kWidth}, 0.3, dtype);
        const Combined expected = by_index_add(x, routing);
        expect_same(by_rows(x, routing, pairs), expected);
        if (tokens > 0) expect_same(by_rows(x, routing, pairs + 9), expected);
      }
}

TEST(RowOrder, HasTheBitsOfIndexAddForTheTopOfARouter) {
  TransformerConfig config;
  config.num_experts = kExperts;
  for (const int64_t topk : {1, 2, 5})
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      config.moe_router_topk = topk;
      Routing routing = route_tokens(sines({40, kExperts}, 0.2, at::kFloat) * 90, config);
      ASSERT_TRUE(routing.sizes().all_taken);
      const at::Tensor x = sines({40, kWidth}, 0.3, dtype);
      expect_same(by_rows(x, routing, routing.sizes().pairs), by_index_add(x, routing));
      for (const bool pad : {false, true}) {
        Routing limited = routing;
        limited.map = limit_to_capacity(routing, 7, pad);
        limited.probs = routing.probs.masked_fill(limited.map.logical_not(), 0);
        limited.known = sizes_with_capacity(routing.sizes(), 40, kExperts, 7, pad);
        ASSERT_LE(limited.map.sum().item<int64_t>(), limited.sizes().pairs);
        expect_same(by_rows(x, limited, limited.sizes().pairs), by_index_add(x, limited));
      }
    }
}

TEST(RowOrder, BlocksAreSortedTheOtherWayAndBack) {
  const at::Tensor blocks =
      at::tensor({2, 0, 3, 0, 0, 1, 4, 0, 0, 0, 2, 5}, at::kLong).view({4, 3});
  std::vector<int64_t> starts, expected;
  int64_t start = 0;
  for (int64_t i = 0; i < 12; ++i) {
    starts.push_back(start);
    start += blocks.view(-1)[i].item<int64_t>();
  }
  for (int64_t column = 0; column < 3; ++column)
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t i = 0; i < blocks[row][column].item<int64_t>(); ++i)
        expected.push_back(starts[static_cast<size_t>(row * 3 + column)] + i);
  const BlockOrder order = transpose_blocks(blocks, start);
  EXPECT_TRUE(at::equal(order.forth, at::tensor(expected)));
  EXPECT_TRUE(at::equal(order.back, at::tensor(expected).argsort()));
  const at::Tensor x = sines({start, 3}, 0.1, at::kFloat).requires_grad_(true);
  const at::Tensor y = reorder_rows(x, order), grad = sines({start, 3}, 0.9, at::kFloat);
  EXPECT_TRUE(at::equal(y, x.index_select(0, order.forth)));
  y.backward(grad);
  EXPECT_TRUE(at::equal(x.grad().index_select(0, order.forth), grad));
}

RowGroupsPtr groups_with(const std::vector<int64_t>& rows) {
  return c10::make_intrusive<kernels::RowGroups>(at::tensor(rows).cumsum(0).to(at::kInt));
}

/// 11 rows; experts have the first 9. The others hold NaN, and so does freed memory before the
/// call.
TEST(GroupedLinear, HasTheBitsOfALinearLayerAnExpertAndReadsNoOtherRows) {
  const std::vector<int64_t> rows = {3, 0, 4, 2, 0};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    at::full({kExperts, 7, 6}, std::nan(""), dtype);
    const at::Tensor input = sines({11, 6}, 0.4, dtype), grad = sines({11, 7}, 0.8, dtype);
    input.narrow(0, 9, 2).fill_(std::nan(""));
    grad.narrow(0, 9, 2).fill_(std::nan(""));
    const at::Tensor weight = sines({kExperts, 7, 6}, 0.5, dtype).requires_grad_(true);
    const at::Tensor bias = sines({kExperts, 7}, 0.2, dtype).requires_grad_(true);
    const at::Tensor x = input.clone().requires_grad_(true);
    const RowGroupsPtr groups = groups_with(rows);
    const at::Tensor y = add_expert_bias(grouped_linear(x, weight, groups), bias, groups);
    y.backward(grad);

    const at::Tensor x2 = input.clone().requires_grad_(true);
    const at::Tensor weight2 = weight.detach().clone().requires_grad_(true);
    const at::Tensor bias2 = bias.detach().clone().requires_grad_(true);
    std::vector<at::Tensor> parts;
    int64_t first = 0;
    for (int64_t e = 0; e < kExperts; ++e) {
      const int64_t count = rows[static_cast<size_t>(e)];
      parts.push_back(at::mm(x2.narrow(0, first, count), weight2[e].t()));
      first += count;
    }
    const at::Tensor expected =
        at::cat(parts) + bias2.repeat_interleave(at::tensor(rows), 0, first);
    expected.backward(grad.narrow(0, 0, 9));
    EXPECT_TRUE(at::equal(y.narrow(0, 0, 9), expected));
    EXPECT_TRUE(at::equal(x.grad().narrow(0, 0, 9), x2.grad().narrow(0, 0, 9)));
    EXPECT_TRUE(at::equal(weight.grad(), weight2.grad()));
    EXPECT_TRUE(at::equal(bias.grad(), bias2.grad()));
    EXPECT_EQ(weight.grad()[1].count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(bias.grad()[4].count_nonzero().item<int64_t>(), 0);
  }
}

TEST(GroupedLinear, SumsOfManyNarrowRowsAreAddedUpInFp32) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor sums =
        kernels::grouped_sums(at::ones({4100, 3}, dtype), *groups_with({4, 4096}));
    const at::Tensor expected = at::tensor({4., 4096.}, at::kDouble).unsqueeze(1).expand({2, 3});
    EXPECT_TRUE(at::equal(sums.to(at::kDouble), expected)) << sums;
  }
}

TEST(GroupedLinear, RefusesMoreRowsThanThereAre) {
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [] {
        grouped_linear(at::ones({3, 2}), at::ones({2, 4, 2}), groups_with({2, 2}));
      },
      "grouped_linear: found input 3 x 2 and weight 2 x 4 x 2 for 2 experts"));
}

}  // namespace
}  // namespace lockstep
