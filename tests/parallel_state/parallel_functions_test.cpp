#include "lockstep/parallel_state/parallel_functions.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

// Each function compared with ATen and autograd in one process that holds all ranks' tensors.

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::run_ranks;
using testing::throws_with;
using Tensors = std::vector<at::Tensor>;

/// Whole numbers that differ between ranks, so sums are exact.
at::Tensor whole_numbers(std::vector<int64_t> shape, int64_t seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return ((at::arange(numel, at::kDouble) * (2 * seed + 3) + seed).remainder(17) - 8).view(shape);
}

at::Tensor chunk(const at::Tensor& tensor, int64_t n, int64_t dim, int64_t rank) {
  return tensor.chunk(n, dim)[static_cast<size_t>(rank)];
}

at::Tensor total(const Tensors& tensors) { return at::stack(tensors).sum(0); }

/// Rows that rank `from` sends to rank `to`. Some are 0.
int64_t rows_sent(int64_t from, int64_t to) { return (from + 2 * to) % 3; }

std::vector<int64_t> rows(int64_t n, int64_t rank, bool to_others) {
  std::vector<int64_t> result;
  for (int64_t peer = 0; peer < n; ++peer)
    result.push_back(to_others ? rows_sent(rank, peer) : rows_sent(peer, rank));
  return result;
}

/// A function, and its result on `rank` from the inputs of all ranks in one process.
struct Case {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x, const ProcessGroup& group)> function;
  std::function<at::Tensor(const Tensors& inputs, int64_t rank)> oracle;
  bool same_input = false;
  bool same_output = false;  ///< later operations are the same on all ranks and count once
  bool mean = false;         ///< the loss is the mean of the ranks' losses
  std::function<std::vector<int64_t>(int64_t n, int64_t rank)> shape = [](int64_t n, int64_t) {
    return std::vector<int64_t>{n, 2 * n, n};
  };
};

std::vector<Case> cases_along(int64_t dim) {
  const auto joined = [dim](const Tensors& inputs, int64_t) { return at::cat(inputs, dim); };
  const auto gather = [dim](GradientState state) {
    return [=](const at::Tensor& x, const ProcessGroup& group) {
      return gather_from_group(x, group, dim, state, "x");
    };
  };
  return {
      {.name = "scatter",
       .function = [dim](auto& x, auto& group) { return scatter_to_group(x, group, dim, "x"); },
       .oracle =
           [dim](auto& inputs, int64_t rank) {
             return chunk(inputs[0], static_cast<int64_t>(inputs.size()), dim, rank);
           },
       .same_input = true},
      {.name = "gather, complete",
       .function = gather(GradientState::complete),
       .oracle = joined,
       .same_output = true},
      {.name = "gather, partial-sum",
       .function = gather(GradientState::partial_sum),
       .oracle = joined},
      {.name = "gather, partial-mean",
       .function = gather(GradientState::partial_mean),
       .oracle = joined,
       .mean = true},
      {.name = "reduce-scatter",
       .function = [dim](auto& x,
                         auto& group) { return reduce_scatter_to_group(x, group, dim, "x"); },
       .oracle =
           [dim](auto& inputs, int64_t rank) {
             return chunk(total(inputs), static_cast<int64_t>(inputs.size()), dim, rank);
           }},
  };
}

Case exchange_of(int64_t split_dim, int64_t gather_dim) {
  return {
      .name = "all-to-all of dimensions",
      .function = [=](auto& x,
                      auto& g) { return all_to_all_dims(x, g, split_dim, gather_dim, "x"); },
      .oracle =
          [=](auto& inputs, int64_t rank) {
            Tensors pieces;
            for (const at::Tensor& input : inputs)
              pieces.push_back(chunk(input, static_cast<int64_t>(inputs.size()), split_dim, rank));
            return at::cat(pieces, gather_dim);
          }};
}

Case exchange_of_rows() {
  return {.name = "all-to-all of rows",
          .function =
              [](auto& x, auto& group) {
                return all_to_all_rows(x, group, rows(group.size(), group.rank(), false),
                                       rows(group.size(), group.rank(), true), "x");
              },
          .oracle =
              [](auto& inputs, int64_t rank) {
                const auto n = static_cast<int64_t>(inputs.size());
                Tensors pieces;
                for (int64_t from = 0; from < n; ++from)
                  pieces.push_back(inputs[static_cast<size_t>(from)].split_with_sizes(
                      rows(n, from, true))[static_cast<size_t>(rank)]);
                return at::cat(pieces);
              },
          .shape =
              [](int64_t n, int64_t rank) {
                int64_t all = 0;
                for (const int64_t count : rows(n, rank, true)) all += count;
                return std::vector<int64_t>{all, 2};
              }};
}

/// All cases. Those with a dimension appear once for each of `dims`.
std::vector<Case> cases_of(const std::vector<int64_t>& dims) {
  std::vector<Case> cases = {
      {.name = "copy",
       .function = [](auto& x, auto& group) { return copy_to_group(x, group, "x"); },
       .oracle = [](auto& inputs, int64_t) { return inputs[0]; },
       .same_input = true},
      {.name = "reduce",
       .function = [](auto& x, auto& group) { return reduce_from_group(x, group, "x"); },
       .oracle = [](auto& inputs, int64_t) { return total(inputs); },
       .same_output = true},
      exchange_of(1, 0),
      exchange_of(0, 1),
      exchange_of(-1, -2),
      exchange_of_rows()};
  for (const int64_t dim : dims)
    for (const Case& one : cases_along(dim)) cases.push_back(one);
  return cases;
}

/// The input of one rank.
at::Tensor input_of(const Case& test, int64_t n, int64_t rank) {
  return whole_numbers(test.shape(n, rank), test.same_input ? 1 : rank);
}

/// The gradient of the result on one rank.
at::Tensor gradient_of_result(const Case& test, const at::Tensor& result, int64_t rank) {
  return whole_numbers(result.sizes().vec(), 40 + (test.same_output ? 0 : rank));
}

/// Result and gradient of `rank`, in one process.
std::pair<at::Tensor, at::Tensor> expected_of(const Case& test, int64_t n, int64_t rank) {
  Tensors inputs;
  for (int64_t r = 0; r < n; ++r) inputs.push_back(input_of(test, n, r).requires_grad_(true));
  if (test.same_input) inputs.assign(static_cast<size_t>(n), inputs[0]);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int64_t r = 0; r < (test.same_output ? 1 : n); ++r) {
    const at::Tensor result = test.oracle(inputs, r);
    loss = loss + (result * gradient_of_result(test, result, r)).sum();
  }
  (test.mean ? loss / n : loss).backward();
  const auto own = static_cast<size_t>(rank);
  return {test.oracle(inputs, rank).detach(), inputs[own].grad()};
}

TEST(ParallelFunctions, ValuesAndGradientsAreThoseOfOneProcess) {
  const auto cases = cases_of({0, 1, 2, -1, -3});
  for (const int64_t n : {2, 3, 4})
    run_ranks(n, [n, &cases](const ParallelState& state) {
      for (const Case& test : cases) {
        SCOPED_TRACE(test.name + " over " + std::to_string(n));
        const auto [value, gradient] = expected_of(test, n, state.rank());
        const at::Tensor x = input_of(test, n, state.rank()).requires_grad_(true);
        const at::Tensor result = test.function(x, state.world());
        EXPECT_TRUE(at::equal(result, value));
        EXPECT_TRUE(result.is_contiguous());
        const at::Tensor above = gradient_of_result(test, result, state.rank());
        const at::Tensor passed = above.clone();
        result.backward(passed);
        EXPECT_TRUE(at::allclose(x.grad(), gradient, 1e-14, 1e-14));
        EXPECT_TRUE(at::equal(passed, above)) << "backward changed the gradient that it got";
        EXPECT_TRUE(at::equal(x.detach(), input_of(test, n, state.rank()))) << "x was changed";
      }
    });
}

/// The job's loss as a function of its inputs.
double job_loss(const Case& test, const ProcessGroup& group, const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  const at::Tensor result = test.function(x, group);
  const at::Tensor loss = (at::sin(result) * gradient_of_result(test, result, group.rank())).sum();
  const bool average = test.mean || test.same_output;
  all_reduce(group, loss, average ? ReduceOp::average : ReduceOp::sum, "loss").wait();
  return loss.item<double>();
}

TEST(ParallelFunctions, GradientsAreTheDifferencesOfTheJobsLoss) {
  const auto cases = cases_of({1});
  run_ranks(2, [&cases](const ParallelState& state) {
    constexpr double kStep = 1e-5;
    for (const Case& test : cases) {
      const at::Tensor x = (input_of(test, 2, state.rank()) * 0.1).requires_grad_(true);
      const at::Tensor result = test.function(x, state.world());
      (at::sin(result) * gradient_of_result(test, result, state.rank())).sum().backward();
      for (int64_t owner = 0; owner < (test.same_input ? 1 : 2); ++owner)
        for (int64_t i = 0; i < c10::multiply_integers(test.shape(2, owner)); ++i) {
          const bool mine = test.same_input || owner == state.rank();
          const at::Tensor up = x.detach().clone(), down = x.detach().clone();
          if (mine) up.view(-1)[i] += kStep, down.view(-1)[i] -= kStep;
          const double slope =
              (job_loss(test, state.world(), up) - job_loss(test, state.world(), down)) /
              (2 * kStep);
          if (!mine) continue;
          EXPECT_NEAR(x.grad().view(-1)[i].item<double>(), slope, 1e-7) << test.name;
        }
    }
  });
}

/// "all_gather of x: 96" for each call of this rank in call().
template <class Call>
std::vector<std::string> sent_by(Call call, const CollectiveLog& log, int64_t rank) {
  std::vector<CollectiveRecord> records = log.of_rank(rank);
  const auto before = static_cast<std::ptrdiff_t>(records.size());
  call();
  records = log.of_rank(rank);
  records.erase(records.begin(), records.begin() + before);
  std::vector<std::string> result;
  for (const CollectiveRecord& one : records)
    result.push_back(one.operation + " of " + one.label + ": " + std::to_string(one.bytes));
  return result;
}

TEST(ParallelFunctions, WhatIsSentForwardAndBackward) {
  // An input has 3 x 6 x 3 doubles, 432 bytes; its chunk has 144, the inputs of all ranks 1296.
  using Texts = std::vector<std::string>;
  const std::map<std::string, std::pair<Texts, Texts>> expected = {
      {"copy", {{}, {"all_reduce (sum) of gradient of x: 432"}}},
      {"reduce", {{"all_reduce (sum) of x: 432"}, {}}},
      {"scatter", {{}, {"all_gather of gradient of x: 144"}}},
      {"gather, complete", {{"all_gather of x: 432"}, {}}},
      {"gather, partial-sum",
       {{"all_gather of x: 432"}, {"reduce_scatter (sum) of gradient of x: 1296"}}},
      {"gather, partial-mean",
       {{"all_gather of x: 432"}, {"reduce_scatter (average) of gradient of x: 1296"}}},
      {"reduce-scatter",
       {{"reduce_scatter (sum) of x: 432"}, {"all_gather of gradient of x: 144"}}},
      {"all-to-all of dimensions",
       {{"all_to_all of x: 432"}, {"all_to_all of gradient of x: 432"}}},
      // Three rows of 2 doubles.
      {"all-to-all of rows", {{"all_to_all of x: 48"}, {"all_to_all of gradient of x: 48"}}}};
  CollectiveLog log;
  run_ranks(3,
            [&](const ParallelState& state) {
              const auto expect_sent = [&](auto call, const Texts& texts) {
                EXPECT_EQ(sent_by(call, log, state.rank()), texts);
              };
              for (const Case& test : cases_of({0})) {
                SCOPED_TRACE(test.name);
                const auto& [in_forward, in_backward] = expected.at(test.name);
                const at::Tensor x = input_of(test, 3, state.rank()).requires_grad_(true);
                at::Tensor result;
                const auto forward = [&] { result = test.function(x, state.world()); };
                expect_sent(forward, in_forward);
                expect_sent([&] { result.sum().backward(); }, in_backward);
                const auto without = [&] { result = test.function(x.detach(), state.world()); };
                expect_sent(without, in_forward);
                EXPECT_FALSE(result.requires_grad());
                const at::NoGradGuard no_grad;
                expect_sent(forward, in_forward);
                EXPECT_FALSE(result.grad_fn());
              }
            },
            {.log = &log});
}

TEST(ParallelFunctions, OneRankGetsItsInputBack) {
  const ParallelState state = ParallelState::single_process();
  for (const Case& test : cases_of({0})) {
    const at::Tensor x = input_of(test, 1, 0).requires_grad_(true);
    EXPECT_TRUE(test.function(x, state.world()).is_same(x)) << test.name;
  }
}

TEST(ParallelFunctions, StridesAndDtypes) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  run_ranks(3, [](const ParallelState& state) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
      Tensors terms;
      for (int64_t r = 0; r < 3; ++r) terms.push_back((whole_numbers({3, 6}, r) * 0.37).to(dtype));
      const at::Tensor leaf = terms[state.rank()].clone().requires_grad_(true);
      const at::Tensor x = leaf.t();  // [6, 3], not contiguous
      const at::Tensor sum = reduce_from_group(x, state.world(), "x");
      const auto wide = dtype == at::kBFloat16 ? at::kFloat : dtype;
      const at::Tensor exact =
          (terms[0].to(wide) + terms[1].to(wide) + terms[2].to(wide)).to(dtype).t();
      EXPECT_TRUE(at::equal(sum, exact)) << dtype;
      const at::Tensor copied = copy_to_group(sum, state.world(), "sum");
      const at::Tensor part = reduce_scatter_to_group(copied, state.world(), 0, "part");
      part.sum().backward();  // its gradient is not contiguous: one number, expanded
      EXPECT_EQ(leaf.grad().scalar_type(), dtype);
      EXPECT_TRUE(at::equal(leaf.grad(), at::full({3, 6}, 3, dtype)));
    }
  });
}

TEST(ParallelFunctions, ResultsAreChangedInPlaceWhereTheyHaveTheirOwnMemory) {
  run_ranks(2, [](const ParallelState& state) {
    for (const Case& test : cases_of({0})) {
      const at::Tensor x = input_of(test, 2, state.rank()).requires_grad_(true);
      at::Tensor result = test.function(x, state.world());
      if (test.name == "copy")
        EXPECT_THROW(result.mul_(2), c10::Error);
      else
        EXPECT_TRUE(at::equal(result.mul_(2), test.function(x, state.world()) * 2)) << test.name;
      EXPECT_TRUE(at::equal(x.detach(), input_of(test, 2, state.rank()))) << test.name;
    }
  });
}

TEST(ParallelFunctions, WhatDoesNotFitIsRefused) {
  run_ranks(2, [](const ParallelState& state) {
    const ProcessGroup world = state.world();
    const at::Tensor x = at::ones({4, 5}).requires_grad_(true);
    const auto expect_refused = [](auto call, const std::string& message) {
      EXPECT_TRUE(throws_with<UsageError>([&] { (void)call(); }, message));
    };
    const std::string of = " of layer 3 over group world [0, 1]: ";
    expect_refused([&] { return scatter_to_group(x, world, 1, "layer 3"); },
                   "scatter_to_group" + of + "dimension 1 has size 5, allowed: a multiple of 2");
    expect_refused(
        [&] { return reduce_scatter_to_group(x, world, -1, "layer 3"); },
        "reduce_scatter_to_group" + of + "dimension -1 has size 5, allowed: a multiple of 2");
    expect_refused([&] { return all_to_all_dims(x, world, 1, 0, "layer 3"); },
                   "all_to_all_dims" + of + "dimension 1 has size 5, allowed: a multiple of 2");
    expect_refused([&] { return all_to_all_dims(x, world, 0, -2, "layer 3"); },
                   "all_to_all_dims" + of + "found dimension 0 for both, allowed: two dimensions");
    expect_refused(
        [&] { return gather_from_group(x, world, 2, GradientState::complete, "layer 3"); },
        "gather_from_group" + of + "found dimension 2 of [4, 5], allowed: -2 to 1");
    for (const std::vector<int64_t>& wrong :
         std::vector<std::vector<int64_t>>{{1, 2}, {4}, {5, -1}})
      expect_refused(
          [&] {
            return all_to_all_rows(x, world, {2, 2}, wrong, "layer 3");
          },
          "all_to_all_rows" + of + "found output rows [2, 2] and input rows [");
    expect_refused(
        [&] {
          return all_to_all_rows(x, world, {5, -1}, {2, 2}, "layer 3");
        },
        "found output rows [5, -1] and input rows [2, 2] of [4, 5], allowed: one");
    const at::Tensor sum = copy_to_group(x, world, "layer 3").sum();
    expect_refused(
        [&] { return torch::autograd::grad({sum}, {x}, {}, true, /*create_graph=*/true); },
        "gradient of layer 3 over group world [0, 1]: found backward with create_graph");
  });
}

TEST(ParallelFunctions, ABackwardThatAnotherRankDoesNotReachNamesWhatItWaitedFor) {
  const auto errors = errors_of_ranks(2,
                                      [](const ParallelState& state) {
                                        const at::Tensor x = at::ones({2}).requires_grad_(true);
                                        const at::Tensor y =
                                            copy_to_group(x, state.world(), "layer 3");
                                        if (state.rank() == 1) return;
                                        EXPECT_THROW(y.sum().backward(), CommunicationError);
                                        y.sum().backward();
                                      },
                                      {.timeout = std::chrono::milliseconds(1000)});
  EXPECT_TRUE(errors[0].starts_with("all_reduce (sum) of gradient of layer 3 over group world"))
      << errors[0];
}

}  // namespace
}  // namespace lockstep
