// Parameters whose usage changes between the micro-batches of an iteration, compared with
// c10d::Reducer and with plain averages.

#include <gtest/gtest.h>

#include <random>

#include <torch/csrc/distributed/c10d/logger.hpp>

#include "lockstep/core/error.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/c10d_reducer.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::linear_loss;
using testing::named_zeros;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;

using Used = std::vector<size_t>;
using Counts = std::vector<int32_t>;

/// A backward inside no_sync().
void accumulate(Reducer& reducer, const std::vector<NamedParameter>& params, const Used& used,
                double coefficient) {
  const auto guard = reducer.no_sync();
  linear_loss(params, used, coefficient).backward();
}

std::vector<ReducerOptions> options_that_find_unused() {
  std::vector<ReducerOptions> result;
  for (const bool as_view : {true, false})
    for (const bool skip : {false, true})
      result.push_back({.bucket_bytes_caps = {1},
                        .find_unused_parameters = true,
                        .skip_all_reduce_unused_params = skip,
                        .gradient_as_bucket_view = as_view});
  return result;
}

TEST(ReducerUsage, AParameterUsedInsideNoSyncAloneIsAveraged) {
  for (const ReducerOptions& options : options_that_find_unused())
    for (const bool with_outputs : {true, false}) {
      CollectiveLog log;
      run_ranks(2,
                [&](const ParallelState& state) {
                  const auto params = named_zeros({2, 3});
                  Reducer reducer(params, replicas(state), options);
                  for (int step = 0; step < 2; ++step) {
                    reducer.zero_grad_buffer();
                    accumulate(reducer, params, {0, 1}, 1. + state.rank());
                    reducer.prepare_for_forward();
                    const at::Tensor loss = linear_loss(params, {0}, 1);
                    reducer.prepare_for_backward(with_outputs ? std::vector{loss}
                                                              : std::vector<at::Tensor>());
                    loss.backward();
                    EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2.5));
                    EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 1.5));
                    EXPECT_EQ(reducer.used_counts(), (Counts{2, 2}));
                  }
                },
                {.log = &log});
      int64_t of_parameter = 0;
      for (const CollectiveRecord& call : log.of_rank(1))
        if (call.operation == "all_reduce (sum)" && call.bytes == 12) ++of_parameter;
      EXPECT_EQ(of_parameter, 2);  // once in each step, for its bucket
    }
}

TEST(ReducerUsage, ItCountsWhereAnotherRankAloneHasUsedIt) {
  for (const ReducerOptions& options : options_that_find_unused())
    run_ranks(3, [&](const ParallelState& state) {
      const auto params = named_zeros({2, 3});
      Reducer reducer(params, replicas(state), options);
      if (state.rank() == 2) accumulate(reducer, params, {1}, 6);
      reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
      EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 2));
      EXPECT_EQ(reducer.used_counts(), (Counts{3, 1}));
      // The next iteration starts over: nobody uses it, so it keeps its bits.
      reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
      EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 2));
      EXPECT_EQ(reducer.used_counts(), (Counts{3, 0}));
    });
}

TEST(ReducerUsage, AStaticGraphAveragesWhatItsFirstIterationUsedInsideNoSync) {
  for (const bool as_view : {true, false})
    run_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({2, 3});
      Reducer reducer(params, replicas(state),
                      {.static_graph = true, .gradient_as_bucket_view = as_view});
      for (int step = 0; step < 3; ++step) {
        reducer.zero_grad_buffer();
        accumulate(reducer, params, {1}, 1. + state.rank());
        reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
        EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 1.5)) << step;
      }
    });
}

TEST(ReducerUsage, AStaticGraphRefusesAParameterThatIsUsedLaterInsideNoSync) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(state), {.static_graph = true});
    for (int step = 0; step < 2; ++step) {
      if (step == 1 && state.rank() == 1) accumulate(reducer, params, {1}, 1);
      reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
    }
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("Reducer: static_graph: parameter 1 ('p1') received a gradient inside "
                         "no_sync(), but no rank used it up to the end of the first iteration"),
              std::string::npos)
        << error;
}

TEST(ReducerUsage, InsideJoinWhatARankUsedBeforeItWaitsHasNoMeaning) {
  for (const ReducerOptions& options : options_that_find_unused())
    run_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({2, 3});
      Reducer reducer(params, replicas(state), options);
      at::Tensor last;
      reducer.join([&] {
        for (int step = 0; step < 2 + state.rank(); ++step) {
          reducer.zero_grad_buffer();
          accumulate(reducer, params, {1}, 2. + 2. * state.rank());
          reduce(reducer, [&] { return linear_loss(params, {0}, 4); });
          last = params[1].tensor.grad().clone();
          EXPECT_TRUE(all_equal_to(last, step < 2 ? 3 : 2)) << step;
        }
        if (state.rank() == 0) accumulate(reducer, params, {1}, 100);
      });
    });
}

/// The parameters that each rank uses in each backward, and the size of its gradient there.
struct Plan {
  struct Backward {
    Used used;
    double coefficient = 0;
  };
  std::vector<int64_t> numels;
  bool zeroes = false;                                        ///< zero gradients in each step
  std::vector<std::vector<std::vector<Backward>>> backwards;  ///< [step][micro-batch][rank]
};

Plan random_plan(std::mt19937& random, size_t ranks) {
  Plan plan;
  plan.zeroes = random() % 2 == 0;
  for (size_t p = 0; p < 3 + random() % 3; ++p) plan.numels.push_back(1 + random() % 5);
  for (int step = 0; step < 3; ++step) {
    plan.backwards.emplace_back(1 + random() % 4);
    for (size_t batch = 0; batch < plan.backwards.back().size(); ++batch)
      for (size_t rank = 0; rank < ranks; ++rank) {
        Plan::Backward backward{.used = {}, .coefficient = 6. * (1 + random() % 8)};
        for (size_t p = 0; p < plan.numels.size(); ++p)
          if (random() % 3 == 0) backward.used.push_back(p);
        const bool last = batch + 1 == plan.backwards.back().size();
        if (last && backward.used.empty()) backward.used.push_back(random() % plan.numels.size());
        plan.backwards.back()[batch].push_back(backward);
      }
  }
  return plan;
}

/// The gradients of a rank after each step; NaN: undefined.
using GradientTrace = std::vector<std::vector<double>>;

std::vector<double> gradients_of(const std::vector<NamedParameter>& params) {
  std::vector<double> result;
  for (const NamedParameter& param : params) {
    const at::Tensor& grad = param.tensor.grad();
    result.push_back(grad.defined() ? grad[0].item<double>() : std::nan(""));
    if (!grad.defined()) continue;
    EXPECT_TRUE(at::allclose(grad, at::full_like(grad, result.back()), 1e-5));
  }
  return result;
}

/// Runs `plan` with our Reducer or c10d's. `zero` begins a step, `accumulates(loss)` runs a
/// backward that is not reduced, `reduces(loss)` one that is.
template <class Zero, class Accumulates, class Reduces>
GradientTrace run_plan(const Plan& plan, size_t rank, const std::vector<NamedParameter>& params,
                       Zero zero, Accumulates accumulates, Reduces reduces) {
  GradientTrace trace;
  for (const auto& step : plan.backwards) {
    if (plan.zeroes) zero();
    for (size_t batch = 0; batch < step.size(); ++batch) {
      const Plan::Backward& backward = step[batch][rank];
      const auto loss = [&] { return linear_loss(params, backward.used, backward.coefficient); };
      if (batch + 1 == step.size())
        reduces(loss);
      else if (!backward.used.empty())
        accumulates(loss);
    }
    trace.push_back(gradients_of(params));
  }
  return trace;
}

GradientTrace run_ours(const Plan& plan, const ParallelState& state,
                       const ReducerOptions& options) {
  const auto params = named_zeros(plan.numels);
  Reducer reducer(params, replicas(state), options);
  return run_plan(
      plan, static_cast<size_t>(state.rank()), params, [&] { reducer.zero_grad_buffer(); },
      [&](auto loss) {
        const auto guard = reducer.no_sync();
        loss().backward();
      },
      [&](auto loss) { reduce(reducer, loss); });
}

GradientTrace run_c10d(const Plan& plan, const ParallelState& state, bool as_view) {
  const auto params = named_zeros(plan.numels);
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<size_t>> buckets(1);
  for (size_t p = 0; p < params.size(); ++p) {
    tensors.push_back(params[p].tensor);
    buckets[0].push_back(p);
  }
  const std::shared_ptr<c10d::Reducer> reducer(new c10d::Reducer(testing::make_c10d_reducer(
      tensors, buckets, replicas(state),
      {.find_unused_parameters = true, .gradient_as_bucket_view = as_view})));
  const auto logger = std::make_shared<c10d::Logger>(reducer);  // it records a changing graph
  reducer->set_logger(logger);
  return run_plan(
      plan, static_cast<size_t>(state.rank()), params,
      [&] {
        for (const at::Tensor& tensor : tensors)
          if (tensor.grad().defined()) tensor.mutable_grad().zero_();
      },
      [&](auto loss) { loss().backward(); },
      [&](auto loss) {
        reducer->prepare_for_forward();
        const at::Tensor value = loss();
        reducer->prepare_for_backward({value});
        value.backward();
      });
}

/// The gradients by definition: the mean over the ranks of the accumulated gradients, for each
/// parameter that any rank has used since the previous reduction. The others stay.
std::vector<GradientTrace> plain_averages(const Plan& plan, size_t ranks) {
  std::vector<std::vector<double>> grads(ranks,
                                         std::vector<double>(plan.numels.size(), std::nan("")));
  std::vector<GradientTrace> traces(ranks);
  for (const auto& step : plan.backwards) {
    std::vector<bool> used(plan.numels.size(), false);
    for (size_t rank = 0; rank < ranks; ++rank)
      for (double& grad : grads[rank])
        if (plan.zeroes && !std::isnan(grad)) grad = 0;
    for (const auto& batch : step)
      for (size_t rank = 0; rank < ranks; ++rank)
        for (const size_t p : batch[rank].used) {
          double& grad = grads[rank][p];
          grad = (std::isnan(grad) ? 0 : grad) + batch[rank].coefficient;
          used[p] = true;
        }
    for (size_t p = 0; p < used.size(); ++p) {
      if (!used[p]) continue;
      double sum = 0;
      for (size_t rank = 0; rank < ranks; ++rank)
        if (!std::isnan(grads[rank][p])) sum += grads[rank][p];
      for (size_t rank = 0; rank < ranks; ++rank) grads[rank][p] = sum / static_cast<double>(ranks);
    }
    for (size_t rank = 0; rank < ranks; ++rank) traces[rank].push_back(grads[rank]);
  }
  return traces;
}

void expect_same(const GradientTrace& found, const GradientTrace& expected,
                 const std::string& where) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t step = 0; step < found.size(); ++step)
    for (size_t p = 0; p < found[step].size(); ++p) {
      const double a = found[step][p], b = expected[step][p];
      EXPECT_TRUE((std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= 1e-5 * std::abs(b))
          << where << ", step " << step << ", p" << p << ": " << a << ", expected " << b;
    }
}

TEST(ReducerUsage, RandomUsesAreAveragedAsByC10dAndByThePlainAverage) {
  std::mt19937 random(20);
  for (int trial = 0; trial < 40; ++trial) {
    const size_t ranks = 2 + random() % 2;
    const Plan plan = random_plan(random, ranks);
    const int64_t cap = random() % 2 == 0 ? 1 : 1 << 20;
    const std::vector<GradientTrace> expected = plain_averages(plan, ranks);
    run_ranks(static_cast<int64_t>(ranks), [&](const ParallelState& state) {
      const GradientTrace& right = expected[static_cast<size_t>(state.rank())];
      for (const bool as_view : {true, false}) {
        const std::string which =
            "trial " + std::to_string(trial) + (as_view ? ", views" : ", copies");
        expect_same(run_c10d(plan, state, as_view), right, which + ", c10d");
        for (const bool skip : {false, true})
          expect_same(run_ours(plan, state,
                               {.bucket_bytes_caps = {cap},
                                .find_unused_parameters = true,
                                .skip_all_reduce_unused_params = skip,
                                .gradient_as_bucket_view = as_view}),
                      right, which + (skip ? ", unused buckets skipped" : ""));
      }
    });
  }
}

}  // namespace
}  // namespace lockstep
